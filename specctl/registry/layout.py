"""Where things lie in a registry's store, and what makes a store a registry.

registry.json                              the marker: version and identity of the registry
blobs/sha256/<hex>                         files of artifacts
manifests/sha256/<hex>.json                `config.json` of an artifact; <hex> is its identity
signatures/sha256/<hex>/<hex>.json         envelopes over a manifest, by their own digest
log/<name>/<generation, 12 digits>.json    the history of a name: the only commit point
pins/<hex>/<nonce>.json                    pins of a manifest; <nonce>.released.json ends one
"""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import Field

from specctl.registry.names import log_segment

MARKER = "registry.json"
BLOBS, MANIFESTS = "blobs/sha256", "manifests/sha256"
SIGNATURES, LOGS, PINS = "signatures/sha256", "log", "pins"
REGISTRY_VERSION: Final = 1
"""Raised by the rule at the end of docs/registry.md."""
MAX_GENERATION = 10**12 - 1
"""Twelve digits, far below 2^53: a log cannot be fast-forwarded to where numbers end."""
TOP = frozenset(
    {MARKER, LOGS, PINS, "probe", "tmp"}
    | {one.split("/")[0] for one in (BLOBS, MANIFESTS, SIGNATURES)}
)
"""What stands at the top of a registry in a folder; `tmp` holds unfinished files."""
_ENTRY = re.compile(rf"{LOGS}/[^/]+/([0-9]{{12}})\.json")
_PIN = re.compile(rf"{PINS}/[0-9a-f]{{64}}/[0-9a-f]{{32}}(\.released)?\.json")

Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""128 random bits."""


def hex_of(digest: str) -> str:
    """The 64 digits of `sha256:<hex>`."""
    return digest.removeprefix("sha256:")


def blob_key(digest: str) -> str:
    """Key of a file's bytes."""
    return f"{BLOBS}/{hex_of(digest)}"


def manifest_key(digest: str) -> str:
    """Key of an artifact's `config.json`."""
    return f"{MANIFESTS}/{hex_of(digest)}.json"


def signature_folder(digest: str) -> str:
    """Prefix of the envelopes over a manifest."""
    return f"{SIGNATURES}/{hex_of(digest)}"


def log_folder(name: str) -> str:
    """Prefix of a name's history."""
    return f"{LOGS}/{log_segment(name)}"


def log_key(name: str, generation: int) -> str:
    """Key of one entry of a name's history."""
    return f"{log_folder(name)}/{generation:012d}.json"


def pin_folder(digest: str) -> str:
    """Prefix of the pins of an artifact."""
    return f"{PINS}/{hex_of(digest)}"


def is_pin_key(key: str) -> bool:
    """Whether a key below `pins/` can be that of a pin, or of a pin's end."""
    return _PIN.fullmatch(key) is not None


def generation_of(key: str) -> int | None:
    """The generation that `log/NAME/GENERATION.json` stands for; None for a key of another form."""
    found = _ENTRY.fullmatch(key)
    return int(found[1]) if found else None
