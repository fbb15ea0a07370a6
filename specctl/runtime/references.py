"""Artifacts by place: a folder, or a reference such as `s3://bucket/registry/NAME@prod`.

References are resolved before folders. A user with write access to a registry's folder could
otherwise add a folder of the same name, which would be loaded without signature or digest.
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
"""Environment variable: the registry of references without a place."""


def artifact_at(piece: str, expect: Expected | None, *, offline: bool = False) -> Artifact:
    """Loads the artifact that a piece of a spec names.

    Args:
        offline: resolve a reference by the cache, as of its last pull; a warning says so.

    Raises:
        UsageError: a folder that looks like a reference.
        ArtifactError: the artifact must not be loaded.
        RegistryError, StoreError: the registry refuses, or cannot be read.
    """
    if os.path.isdir(piece):
        check_is_no_reference(piece)
        check_is_artifact(Path(piece))
        from specctl.artifacts.load import load_artifact  # imports torch

        return load_artifact(Path(piece), expect=expect)
    from specctl.registry.pulling import Reader, pull_from

    place, reference = registry_and_reference(piece)
    pulled = pull_from(place, str(reference), Reader(), offline=offline, expect=expect)
    if pulled.remembered is not None:
        log.warning(
            "offline: %s is %s as of %s, from the cache", piece, pulled.artifact.digest,
            pulled.remembered,
        )  # fmt: skip
    return pulled.artifact


def is_artifact(piece: str) -> bool:
    """Whether a piece of a spec names an artifact: a folder, or a registry's PLACE/NAME@ALIAS."""
    # not Path.is_dir, which raises for a text that is too long for a path
    return os.path.isdir(piece) or _is_versioned(split_reference(piece))


def is_meant_as_artifact(piece: str) -> bool:
    """Whether text that is neither an artifact nor a known word looks like a reference:
    PLACE/NAME@ALIAS of a place that is no registry, NAME@ALIAS of `SPECCTL_REGISTRY`, or PLACE/NAME
    of a registry, without a version. Resolving it raises the fitting error.
    """
    return split_reference(piece) is not None or _by_its_look(piece) is not None


def _by_its_look(piece: str) -> tuple[str, Reference] | None:
    """Place and versioned reference by the text alone; no place is `SPECCTL_REGISTRY`."""
    place, slash, last = piece.rpartition("/")
    try:
        found = place or slash, parse_reference(last)
    except RegistryError:
        return None
    return found if _is_versioned(found) else None


def _is_versioned(found: tuple[str, Reference] | None) -> bool:
    # A name without a version could be a word of a policy, such as `mars` behind a plus.
    return found is not None and (found[1].alias or found[1].digest) is not None


def registry_and_reference(piece: str) -> tuple[str, Reference]:
    """Registry and reference of a piece for which `is_meant_as_artifact` holds."""
    found = split_reference(piece) or _by_its_look(piece)
    assert found is not None
    place = found[0] or os.environ.get(REGISTRY, "")
    if not place:
        raise UsageError(
            f"policy {piece} names no registry; write REGISTRY/NAME@ALIAS, or set {REGISTRY}"
        )
    return place, found[1]


def check_is_no_reference(piece: str) -> None:
    """Rejects a folder inside a registry, and one whose name looks like a registry reference.

    The name counts even without a registry's marker: a user who can add folders may be able to
    remove the marker.
    """
    # Not `realpath`: a link from elsewhere into a registry is deliberate.
    place, _, last = os.path.abspath(piece).rpartition("/")
    if os.path.lexists(f"{place}/{MARKER}") or split_reference(piece) is not None:
        found = f"a registry at {place} and a folder {last} in it"
    elif _by_its_look(last) is not None:
        found = f"a folder {last}, and no registry at {place}"
    else:
        return
    raise UsageError(
        f"policy {piece} is {found}: loading a folder skips a registry's checks",
        hint="remove a folder that does not belong in a registry; load others from elsewhere",
    )
