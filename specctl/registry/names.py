"""Names and references: what people type, and the one store key that each stands for.

    NAME       PAIR  or  PAIR@HARDWARE:WORKLOAD          qwen3-8b+eagle3@h200:chat
    PAIR       TARGET  or  TARGET+DRAFTER
    REFERENCE  NAME  or  NAME@ALIAS  or  NAME@sha256:<64 hex>

A word (TARGET, DRAFTER, HARDWARE, WORKLOAD, ALIAS) is `[a-z0-9][a-z0-9._-]*` without `..`, at most
64 bytes. A name has at most 255: it is a segment of a key and a file name. Lower case and ASCII
only: two names that look alike, or that a file system folds together, cannot both exist. The last
`@` part is read by its colon: without one it is an alias, behind `sha256:` a digest, else hardware
and workload. So no hardware is called `sha256`.

In keys `:` is written `=`, which no name holds: two names never share a key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from specctl.errors import RegistryError

_WORD = r"[a-z0-9](?:[a-z0-9_-]|\.(?!\.)){0,63}"
MAX_NAME_BYTES = 255
_NAME = re.compile(rf"{_WORD}(\+{_WORD})?(@(?!sha256:){_WORD}:{_WORD})?")
_ALIAS = re.compile(_WORD)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
GRAMMAR = (
    "TARGET[+DRAFTER][@HARDWARE:WORKLOAD], at most 255 bytes, "
    "words [a-z0-9][a-z0-9._-]* without .. of at most 64 bytes"
)
SETTINGS, GARBAGE = "_settings", "_gc"
"""Logs of the registry itself; no name begins with an underscore."""
RESERVED = (SETTINGS, GARBAGE)


@dataclass(frozen=True)
class Reference:
    """A name, and which of its versions: by alias, by digest, or not said (both None)."""

    name: str
    alias: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        """The text that `parse_reference` reads back."""
        tail = self.alias or self.digest
        return self.name if tail is None else f"{self.name}@{tail}"

    def pinned(self, digest: str) -> Reference:
        """The same name at one version for ever."""
        return replace(self, alias=None, digest=digest)


def parse_name(text: str) -> str:
    """Returns a name of the grammar.

    Raises:
        RegistryError: E_NAME.
    """
    if len(text) > MAX_NAME_BYTES:
        raise _bad("name", GRAMMAR, text)
    return _whole(_NAME, "name", GRAMMAR, text)


def parse_alias(text: str) -> str:
    """Returns an alias of the grammar.

    Raises:
        RegistryError: E_NAME.
    """
    return _whole(_ALIAS, "alias", "[a-z0-9][a-z0-9._-]* without .., at most 64 bytes", text)


def parse_digest(text: str) -> str:
    """Returns `sha256:<64 hex>`.

    Raises:
        RegistryError: E_NAME.
    """
    return _whole(_DIGEST, "digest", "sha256:<64 lower-case hex digits>", text)


def parse_reference(text: str) -> Reference:
    """A reference of the grammar.

    Raises:
        RegistryError: E_NAME.
    """
    head, at, tail = text.rpartition("@")
    if at and tail.startswith("sha256:"):
        return Reference(parse_name(head), digest=parse_digest(tail))
    if at and ":" not in tail:
        return Reference(parse_name(head), alias=parse_alias(tail))
    return Reference(parse_name(text))


def log_segment(name: str) -> str:
    """The key segment of a name, or of a log of the registry itself."""
    return name if name in RESERVED else parse_name(name).replace(":", "=")


def name_of_segment(segment: str) -> str:
    """The name that a key segment stands for.

    Raises:
        RegistryError: E_NAME for a segment that no name is written as.
    """
    if segment in RESERVED:
        return segment
    if ":" in segment:
        raise _bad("key of a log", "a name with ':' written as '='", segment)
    return parse_name(segment.replace("=", ":"))


def _whole(pattern: re.Pattern[str], what: str, expected: str, text: str) -> str:
    if not pattern.fullmatch(text):
        raise _bad(what, expected, text)
    return text


def _bad(what: str, expected: str, found: str) -> RegistryError:
    is_digest = what == "digest"
    fix = "take it whole from `specctl registry show NAME`" if is_digest else f"correct the {what}"
    return RegistryError("E_NAME", what, expected=expected, found=repr(found), fix=fix)
