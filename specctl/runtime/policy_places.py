"""Where the artifact of a policy is: a folder, or a reference in a registry."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from specctl.artifacts.codec import Artifact, load_artifact
from specctl.artifacts.compatibility import Expected

log = logging.getLogger("specctl.policy")


def is_artifact(piece: str) -> bool:
    """Whether a piece of a spec names an artifact: a folder, or PLACE/NAME@ALIAS."""
    # isdir is false, where Path.is_dir raises, for a text too long for a path
    return os.path.isdir(piece) or ("/" in piece and _is_reference(piece))


def _is_reference(piece: str) -> bool:
    from specctl.artifacts.registry.opening import split_reference

    found = split_reference(piece)
    # A name alone says no version, and `mars` behind a plus could be of the name.
    return found is not None and (found[1].alias or found[1].digest) is not None


def artifact_at(piece: str, expect: Expected | None, *, offline: bool = False) -> Artifact:
    """The artifact that a piece names, checked as for a folder and, from a registry, much more.

    Args:
        offline: take what a reference meant when it was last pulled, from the cache, and say so.

    Raises:
        ArtifactError: it must not be loaded.
        RegistryError, StoreError: the registry says no, or cannot be asked.
    """
    if os.path.isdir(piece):
        return load_artifact(Path(piece), expect=expect)
    from specctl.artifacts.registry.opening import split_reference
    from specctl.artifacts.registry.transfers import pull_from, reader_of

    found = split_reference(piece)
    assert found is not None
    place, reference = found
    pulled = pull_from(place, str(reference), reader_of(), offline=offline, expect=expect)
    if pulled.remembered is not None:
        log.warning(
            "offline: %s is %s as of %s, from the cache", piece, pulled.artifact.digest,
            pulled.remembered,
        )  # fmt: skip
    return pulled.artifact
