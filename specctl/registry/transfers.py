"""Pulling by words: what a user typed, with that user's trust, floors and cache."""

from __future__ import annotations

from pathlib import Path

from specctl.artifacts.compatibility import Expected
from specctl.artifacts.files import publish_folder
from specctl.artifacts.loading import load_artifact
from specctl.artifacts.manifest import SIGNATURE
from specctl.artifacts.signing import Trust
from specctl.artifacts.userdirs import make_homes
from specctl.registry.content import OnBytes
from specctl.registry.names import parse_reference
from specctl.registry.opening import open_registry
from specctl.registry.pulling import Pulled, Reader, pull, pull_offline
from specctl.registry.urls import registry_url


def reader_of(trust: Path | None = None) -> Reader:
    """The user, with another trust file if one is named."""
    return Reader(trust=Trust.load(trust))


def pull_from(
    place: str,
    reference: str,
    reader: Reader,
    *,
    offline: bool = False,
    expect: Expected | None = None,
    on_bytes: OnBytes = lambda _: None,
) -> Pulled:
    """`pull` or `pull_offline`, by the text of a place and of a reference.

    Raises:
        RegistryError, ArtifactError, StoreError, UsageError: see those.
        OutputError: the user's own folders cannot be written.
    """
    asked = parse_reference(reference)
    if offline:
        return pull_offline(registry_url(place), asked, reader, expect=expect)
    make_homes()
    return pull(open_registry(place), asked, reader, expect=expect, on_bytes=on_bytes)


def copy_out(pulled: Pulled, out: Path) -> Path:
    """Writes a pulled artifact as a folder of the user's own, loaded once more from there.

    One signature goes with it, where there is any: of those that are believed the one that most
    believed keys have signed.

    Raises:
        OutputError: a place that holds something else.
        StoreError: the registry does not answer.
    """
    files = {path.name: path.read_bytes() for path in sorted(pulled.folder.iterdir())}
    found = pulled.believed or (pulled.resolved.found_signatures() if pulled.resolved else ())
    if found:
        files[SIGNATURE] = found[0]
    publish_folder(out.absolute(), files, lambda folder: _load(folder, pulled))
    return out.absolute()


def _load(folder: Path, pulled: Pulled) -> None:
    load_artifact(folder, digest=pulled.artifact.digest)
