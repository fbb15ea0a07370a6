"""Who may do what in a registry's bucket (`stores.roles`), as far as keys can tell.

A push and a promotion write to the same history, so a bucket cannot tell them apart: that a
publisher may not move an alias is held by signatures (`require` and the role `promoter` of keys).
Nobody may delete a history, a pin or settings. Whoever commits tries first whether the store
refuses taken keys, so all of them may create that one key.
"""

from __future__ import annotations

from specctl.errors import UsageError
from specctl.registry.layout import BLOBS, LOGS, MANIFESTS, MARKER, PINS, SIGNATURES
from specctl.registry.names import GARBAGE, SETTINGS
from specctl.stores.probing import CLOCK_KEYS, PROBE_KEY
from specctl.stores.roles import Role

_CONTENT = (f"{BLOBS}/*", f"{MANIFESTS}/*", f"{SIGNATURES}/*")
_HOLDS = f"{LOGS}/{GARBAGE}/*"
"""Whoever makes content reachable may have to hold it against garbage collection."""


_OF_NAMES = ("publisher", "promoter")


def registry_roles(names: str = "*") -> dict[str, Role]:
    """The roles by name.

    Args:
        names: pattern of the names that a publisher or promoter may write to, `*` for any text.
    """
    history, settings = f"{LOGS}/{_key_pattern(names)}/*", f"{LOGS}/{SETTINGS}/*"
    roles = (
        Role("reader", "lists, shows and pulls"),
        Role(
            "publisher",
            "pushes and pins",
            creates=(*_CONTENT, history, _HOLDS, f"{PINS}/*", PROBE_KEY),
            never_creates=(settings,),  # which a pattern like `*` would reach
        ),
        Role(
            "promoter",
            "moves and rolls back aliases",
            creates=(history, _HOLDS, PROBE_KEY),
            never_creates=(settings,),
        ),
        Role(
            "gc",
            "collects garbage",
            creates=(_HOLDS, PROBE_KEY, CLOCK_KEYS),
            deletes=(*_CONTENT, CLOCK_KEYS),
        ),
        Role("owner", "makes it, sets who must sign", creates=(MARKER, PROBE_KEY, settings)),
    )
    return {role.name: role for role in roles}


def registry_role(name: str, names: str | None = None) -> Role:
    """One role.

    Args:
        names: pattern of the names that a publisher or promoter may write to; None: all.

    Raises:
        UsageError: no such role, or names for one that writes to none.
    """
    roles = registry_roles("*" if names is None else names)
    if name not in roles:
        raise UsageError(
            "role", expected=", ".join(roles), found=repr(name)[:80], fix="name one of them"
        )
    if names is not None and name not in _OF_NAMES:
        raise UsageError(
            "--names",
            expected=f"it with a role that writes to names: {' or '.join(_OF_NAMES)}",
            found=f"the role {name}",
            fix="leave it out",
        )
    return roles[name]


def _key_pattern(names: str) -> str:
    """A pattern of names as one of key segments; no segment may be left by it."""
    if "/" in names or not names:
        raise UsageError(
            "--names", expected="a pattern of names", found=repr(names)[:80], fix="leave out '/'"
        )
    return names.replace(":", "=")
