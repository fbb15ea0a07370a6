"""Artifacts that must not be loaded, of every family of notes/reliability.md 3.3 that is a folder.

A name begins with its family. `test_attacks` throws all of them at the loader; families of
signatures and logs (14 to 17, 37) are in `signing/` and `registry/`.
"""

from __future__ import annotations

from tests.artifacts.hostile import bloat, costs, files, manifests, policies, twins
from tests.artifacts.hostile.making import Hostile

__all__ = ["FAMILIES", "Hostile", "family"]


def _all() -> dict[str, Hostile]:
    rooms = [room.FAMILIES for room in (files, manifests, policies, twins, bloat, costs)]
    found = {name: hostile for room in rooms for name, hostile in room.items()}
    assert len(found) == sum(map(len, rooms)), "a name twice"
    return found


FAMILIES = _all()


def family(name: str) -> int:
    """Number of a family in notes/reliability.md 3.3."""
    return int(name.split()[0])
