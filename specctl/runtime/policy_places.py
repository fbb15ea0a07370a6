"""Where the artifact of a policy is: a folder, or a reference in a registry.

A reference is asked about first. Whoever may write to a shared folder could otherwise put a folder
of the same words beside the histories, and that would be loaded without signature or digest.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.artifacts.compatibility import Expected
from specctl.artifacts.files import check_is_artifact
from specctl.artifacts.load import Artifact, load_artifact
from specctl.errors import RegistryError, UsageError

if TYPE_CHECKING:
    from specctl.registry.names import Reference

log = logging.getLogger("specctl.policy")
REGISTRY = "SPECCTL_REGISTRY"
"""Environment variable: the registry of references that name none."""


def is_artifact(piece: str) -> bool:
    """Whether a piece of a spec names an artifact: a folder, or a registry's PLACE/NAME@ALIAS."""
    # isdir is false, where Path.is_dir raises, for a text too long for a path
    return os.path.isdir(piece) or ("/" in piece and _is_versioned(_split(piece)))


def is_meant_as_artifact(piece: str) -> bool:
    """Whether text that is neither an artifact nor a known word can only be meant as a reference.

    That is PLACE/NAME@ALIAS of a place that is no registry, NAME@ALIAS of `SPECCTL_REGISTRY`, and
    PLACE/NAME of a registry, which says no version: asking for it says what is wrong.
    """
    return _split(piece) is not None or _is_versioned(_as_words(piece))


def _as_words(piece: str) -> tuple[str, Reference] | None:
    """Place and reference by the look of the words alone; no place is `SPECCTL_REGISTRY`."""
    place, slash, last = piece.rpartition("/")
    found = _as_reference(last)
    return None if found is None else (place or slash, found[1])


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


def place_asked(piece: str) -> tuple[str, Reference]:
    """Where to ask, and for what, by text of which `is_meant_as_artifact`.

    Raises:
        UsageError: no place is named, neither here nor by the user's environment.
    """
    found = _split(piece) or _as_words(piece)
    assert found is not None
    place = found[0] or os.environ.get(REGISTRY, "")
    if not place:
        raise UsageError(
            f"policy {piece}",
            expected=f"REGISTRY/NAME@ALIAS, or {REGISTRY} set to a registry",
            found="no registry",
            fix=f"write the registry in front, or set {REGISTRY}",
        )
    return place, found[1]


def _split(piece: str) -> tuple[str, Reference] | None:
    from specctl.registry.names import split_reference

    return split_reference(piece)


def _is_versioned(found: tuple[str, Reference] | None) -> bool:
    # A name alone says no version, and `mars` behind a plus could be of the name.
    return found is not None and (found[1].alias or found[1].digest) is not None


def check_is_no_reference(piece: str) -> None:
    """Refuses a folder that lies in a registry, and one that is named as a reference is written.

    The second, since who may add to a registry's folder may perhaps remove its marker, too.
    """
    from specctl.registry.names import MARKER

    # Not `realpath`: a link is the choice of whoever made it, elsewhere.
    place, _, last = os.path.abspath(piece).rpartition("/")
    if os.path.lexists(f"{place}/{MARKER}") or _split(piece) is not None:
        raise _ambiguous(piece, f"a registry at {place} and a folder {last} in it")
    if _is_versioned(_as_reference(last)):
        raise _ambiguous(piece, f"a folder {last}, and no registry at {place}")


def _as_reference(text: str) -> tuple[str, Reference] | None:
    from specctl.registry.names import parse_reference

    try:
        return "", parse_reference(text)
    except RegistryError:
        return None


def _ambiguous(piece: str, found: str) -> UsageError:
    return UsageError(
        f"policy {piece}",
        expected="an artifact's folder outside of a registry, or REGISTRY/NAME@ALIAS",
        found=found,
        fix="load a folder of another name elsewhere; remove one that does not belong in a "
        "registry: it has none of a registry's checks",
    )
