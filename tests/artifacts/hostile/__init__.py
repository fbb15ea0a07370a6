"""Artifacts that must not be loaded: a table of makers of bytes, and the rule that refuses each.

A name begins with the number of its family. `test_attacks` throws all of them at the loader.
Families of signatures and logs (14 to 17, 37) and of runs (27 to 29) have tests of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specctl.policy import Policy
from tests.artifacts.examples import (
    POLICIES,
    read_manifest,
    replace_file,
    save_policy,
    write_manifest,
)

Make = Callable[[Path], object]
"""Writes an artifact as this folder, which is not there yet; its parent is its own."""


@dataclass(frozen=True)
class Hostile:
    """An artifact that must not be loaded.

    Attributes:
        make: writes it.
        code: the rule that refuses it.
        race: a file that the attacker replaces by a link as it is opened, and how.
    """

    make: Make
    code: str
    race: dict[str, str] = field(default_factory=dict)


@cache
def _sound(policy: Policy) -> dict[str, bytes]:
    with TemporaryDirectory() as room:
        folder = save_policy(Path(room) / "sound", policy)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def sound(folder: Path, policy: Policy | str = "hetero") -> Path:
    """A sound artifact, made once and copied: each test breaks a folder of its own."""
    folder.mkdir(parents=True)
    for name, data in _sound(POLICIES[policy] if isinstance(policy, str) else policy).items():
        (folder / name).write_bytes(data)
    return folder


def broken(change: Callable[[Path], object], policy: Policy | str = "hetero") -> Make:
    """A sound artifact after a change of its folder."""
    return lambda folder: change(sound(folder, policy))


def given(file: str, make: Callable[[], bytes], policy: str = "hetero") -> Make:
    """One file replaced and listed as it is: attackers can compute digests."""
    return broken(lambda folder: replace_file(folder, file, make()), policy)


def unlisted(file: str, change: Callable[[bytes], bytes]) -> Make:
    """One file changed, and the manifest left as it was."""
    return broken(lambda at: (at / file).write_bytes(change((at / file).read_bytes())))


def manifest_of(data: bytes) -> Make:
    return unlisted("config.json", lambda _: data)


def told(
    change: Callable[[dict[str, Any]], Mapping[str, Any]], policy: Policy | str = "hetero"
) -> Make:
    """A manifest with other fields, canonical like any."""

    def write(folder: Path) -> None:
        manifest = read_manifest(folder)
        write_manifest(folder, {**manifest, **change(manifest)})

    return broken(write, policy)


def telling(policy: Policy | str = "hetero", **changes: Any) -> Make:
    """`told`, with the same fields whatever the manifest said."""
    return told(lambda _: changes, policy)


@cache
def families() -> dict[str, Hostile]:
    from tests.artifacts.hostile import contents, files

    found = {**files.FAMILIES, **contents.FAMILIES}
    assert len(found) == len(files.FAMILIES) + len(contents.FAMILIES), "a name twice"
    return found
