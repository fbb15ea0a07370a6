"""Who may do what in a trace set's bucket (`stores.roles`).

A commit record is the acknowledgement, and a compaction's records are believed about those of
others. So collectors have every log but the compactor's, and nobody may delete a record.
"""

from __future__ import annotations

from specctl.collect.commits import COMPACTOR, writer_id
from specctl.collect.places import COMMITS, DATA, HEADER_NAME, QUARANTINE, SNAPSHOTS
from specctl.errors import UsageError
from specctl.stores.probing import CLOCK_KEYS, PROBE_KEY
from specctl.stores.roles import Role

_COMPACTIONS = f"{COMMITS}/{writer_id(COMPACTOR)}/*"

TRACE_ROLES = {
    role.name: role
    for role in (
        Role("reader", "shows, verifies, fits and replays"),
        Role(
            "collector",
            "collects into it, or merges into it",
            creates=(HEADER_NAME, f"{DATA}/*", f"{COMMITS}/*", PROBE_KEY),
            never_creates=(_COMPACTIONS,),
        ),
        Role(
            "compactor",
            "compacts, prunes, takes snapshots, keeps the quarantine",
            creates=(
                f"{DATA}/*",
                _COMPACTIONS,
                f"{SNAPSHOTS}/*",
                f"{QUARANTINE}/*",
                PROBE_KEY,
                CLOCK_KEYS,
            ),
            deletes=(f"{DATA}/*", f"{QUARANTINE}/*", CLOCK_KEYS),
        ),
    )
}


def trace_role(name: str) -> Role:
    """One role.

    Raises:
        UsageError: no such role.
    """
    if name not in TRACE_ROLES:
        raise UsageError(
            "role", expected=", ".join(TRACE_ROLES), found=repr(name)[:80], fix="name one of them"
        )
    return TRACE_ROLES[name]
