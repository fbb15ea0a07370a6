"""Artifacts by place: a folder, or a reference such as `s3://bucket/registry/NAME@prod`.

A registry is asked about a reference before a folder is looked at. Whoever may write to a shared
folder could otherwise put a folder of the same words beside the histories, and that would be loaded
without signature or digest.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.artifacts.compatibility import Expected
from specctl.artifacts.files import check_is_artifact
from specctl.errors import RegistryError, UsageError
from specctl.registry.names import MARKER, Reference, parse_reference, split_reference

if TYPE_CHECKING:
    from specctl.artifacts.load import Artifact

log = logging.getLogger("specctl.policy")
REGISTRY = "SPECCTL_REGISTRY"
"""Environment variable: the registry of references that name none."""


def artifact_at(piece: str, expect: Expected | None, *, offline: bool = False) -> Artifact:
    """The artifact that a piece names, checked as for a folder and, from a registry, much more.

    Args:
        offline: take what a reference meant when it was last pulled, from the cache, and say so.

    Raises:
        UsageError: a folder where only a reference can be meant.
        ArtifactError: it must not be loaded.
        RegistryError, StoreError: the registry says no, or cannot be asked.
    """
    if os.path.isdir(piece):
        check_is_no_reference(piece)
        check_is_artifact(Path(piece))
        from specctl.artifacts.load import load_artifact  # with torch, which words do not need

        return load_artifact(Path(piece), expect=expect)
    from specctl.registry.pulling import Reader, pull_from

    place, reference = place_asked(piece)
    pulled = pull_from(place, str(reference), Reader(), offline=offline, expect=expect)
    if pulled.remembered is not None:
        log.warning(
            "offline: %s is %s as of %s, from the cache", piece, pulled.artifact.digest,
            pulled.remembered,
        )  # fmt: skip
    return pulled.artifact


def is_artifact(piece: str) -> bool:
    """Whether a piece of a spec names an artifact: a folder, or a registry's PLACE/NAME@ALIAS."""
    # isdir is false, where Path.is_dir raises, for a text too long for a path
    return os.path.isdir(piece) or _is_versioned(split_reference(piece))


def is_meant_as_artifact(piece: str) -> bool:
    """Whether text that is neither an artifact nor a known word can only be meant as a reference.

    That is PLACE/NAME@ALIAS of a place that is no registry, NAME@ALIAS of `SPECCTL_REGISTRY`, and
    PLACE/NAME of a registry, which says no version: asking for it says what is wrong.
    """
    return split_reference(piece) is not None or _by_its_look(piece) is not None


def _by_its_look(piece: str) -> tuple[str, Reference] | None:
    """Place and versioned reference by the words alone; no place is `SPECCTL_REGISTRY`."""
    place, slash, last = piece.rpartition("/")
    try:
        found = place or slash, parse_reference(last)
    except RegistryError:
        return None
    return found if _is_versioned(found) else None


def _is_versioned(found: tuple[str, Reference] | None) -> bool:
    # A name alone says no version, and `mars` behind a plus could be of the name.
    return found is not None and (found[1].alias or found[1].digest) is not None


def place_asked(piece: str) -> tuple[str, Reference]:
    """The registry and the reference of text of which `is_meant_as_artifact`."""
    found = split_reference(piece) or _by_its_look(piece)
    assert found is not None
    place = found[0] or os.environ.get(REGISTRY, "")
    if not place:
        raise UsageError(
            f"policy {piece}: no registry is named; write REGISTRY/NAME@ALIAS, or set {REGISTRY}"
        )
    return place, found[1]


def check_is_no_reference(piece: str) -> None:
    """Rejects a folder inside a registry, and one whose name looks like a registry reference.

    The second, since who may add to a registry's folder may perhaps remove its marker, too.
    """
    # Not `realpath`: a link was chosen by its maker, elsewhere.
    place, _, last = os.path.abspath(piece).rpartition("/")
    if os.path.lexists(f"{place}/{MARKER}") or split_reference(piece) is not None:
        found = f"a registry at {place} and a folder {last} in it"
    elif _by_its_look(last) is not None:
        found = f"a folder {last}, and no registry at {place}"
    else:
        return
    raise UsageError(
        f"policy {piece} is {found}: a folder has none of a registry's checks",
        hint="remove a folder that does not belong in a registry; load others from elsewhere",
    )
