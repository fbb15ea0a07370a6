"""Who may do what in a trace set's bucket (`stores.roles`).

A commit record is the acknowledgement, and a compaction's records are believed about those of
others. So collectors have every log but the compactor's, and nobody may delete a record.
"""

from __future__ import annotations

from specctl.collect.compacting import COMPACTOR
from specctl.collect.places import COMMITS, DATA, HEADER_NAME, QUARANTINE, SNAPSHOTS
from specctl.collect.writer_log import writer_id
from specctl.errors import UsageError
from specctl.stores.probing import PROBE_KEY
from specctl.stores.roles import Role

_COMPACTIONS = f"{COMMITS}/{writer_id(COMPACTOR)}/*"
_CLOCK = "probe/clock-*"
"""What pruning learns the store's time from, and takes away again."""

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
                _CLOCK,
            ),
            deletes=(f"{DATA}/*", f"{QUARANTINE}/*", _CLOCK),
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
