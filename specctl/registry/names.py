"""Names and references as people type them, and the key segment of each name.

    NAME       PAIR  or  PAIR@HARDWARE:WORKLOAD          qwen3-8b+eagle3@h200:chat
    PAIR       TARGET  or  TARGET+DRAFTER
    REFERENCE  NAME  or  NAME@ALIAS  or  NAME@sha256:<hex>  or  NAME@v<number>

A word (TARGET, DRAFTER, HARDWARE, WORKLOAD, ALIAS) is `[a-z0-9][a-z0-9._-]*` without `..`, at most
64 bytes. A name has at most 255 bytes, since it is a segment of a key and a file name. Lower case
and ASCII only, so two names that look alike, or that a file system folds together, cannot both
exist. The last `@` part is an alias if it has no colon, a digest after `sha256:`, else hardware
and workload. `sha256` is therefore no valid hardware.

`v1` is the first version published under a name, `v2` the next; aliases cannot have this form. A
digest may be cut to its first 8 digits or more where they fit one version only.

Keys write `:` as `=`, which no name contains, so two names never share a key.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass

from specctl.errors import RegistryError
from specctl.stores import check_no_secret, is_store_url

MARKER = "registry.json"
"""The file that makes a folder or a prefix a registry."""
MAX_NAME_BYTES = 255
_WORD = r"[a-z0-9](?:[a-z0-9_-]|\.(?!\.)){0,63}"
_NAME = re.compile(
    rf"(?=.{{1,{MAX_NAME_BYTES}}}\Z)({_WORD})(?:\+({_WORD}))?(?:@(?!sha256:)({_WORD}):({_WORD}))?"
)
_ALIAS = re.compile(_WORD)
_VERSION = re.compile(r"v[1-9][0-9]{0,8}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SHORT = re.compile(r"sha256:[0-9a-f]{8,64}")
GRAMMAR = (
    "TARGET[+DRAFTER][@HARDWARE:WORKLOAD], at most 255 bytes, "
    "words [a-z0-9][a-z0-9._-]* without .. of at most 64 bytes"
)


@dataclass(frozen=True)
class Reference:
    """A name, and at most one of an alias, which may be `v<number>`, and a digest or its first
    digits."""

    name: str
    alias: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        """The text that `parse_reference` reads back."""
        version = self.alias or self.digest
        return self.name if version is None else f"{self.name}@{version}"

    @property
    def number(self) -> int | None:
        """N of `vN`, counted from 1 in the order of publication."""
        is_version = self.alias is not None and _VERSION.fullmatch(self.alias)
        return int(self.alias[1:]) if self.alias and is_version else None


def parse_name(text: str) -> str:
    """Returns a name of the grammar (else E_NAME)."""
    return _matched(_NAME, "name", GRAMMAR, text)


def parts_of(name: str) -> tuple[str | None, str | None, str | None, str | None]:
    """Target, drafter, hardware and workload of a name; None for parts that it leaves out."""
    found = _NAME.fullmatch(parse_name(name))
    assert found is not None
    return found[1], found[2], found[3], found[4]


def parse_alias(text: str) -> str:
    """Returns an alias of the grammar (else E_NAME)."""
    return _matched(_ALIAS, "alias", "[a-z0-9][a-z0-9._-]* without .., at most 64 bytes", text)


def parse_new_alias(text: str) -> str:
    """Returns an alias that is no version number such as `v1` (else E_NAME)."""
    if _VERSION.fullmatch(text):
        problem = f"{text!r} is the number of a version, like v1 and v2"
        raise RegistryError("E_NAME", "alias", problem, hint="choose another word")
    return parse_alias(text)


def parse_digest(text: str) -> str:
    """Returns `sha256:<64 hex>` (else E_NAME)."""
    return _matched(_DIGEST, "digest", "sha256:<64 lower-case hex digits>", text)


def parse_reference(text: str) -> Reference:
    """Parses a reference of the grammar (else E_NAME)."""
    head, at, tail = text.rpartition("@")
    if at and tail.startswith("sha256:"):
        digest = _matched(_SHORT, "digest", "sha256:<8 to 64 lower-case hex digits>", tail)
        return Reference(parse_name(head), digest=digest)
    if at and ":" not in tail:
        return Reference(parse_name(head), alias=parse_alias(tail))
    return Reference(parse_name(text))


def split_reference(text: str) -> tuple[str, Reference] | None:
    """A registry's place and a reference in it, from `PLACE/REFERENCE`; None for other text.

    PLACE is a URL, or a folder with a `registry.json`.

    Raises:
        UsageError: a URL with a password in it.
    """
    check_no_secret(text)
    place, slash, last = text.rpartition("/")
    if not slash or not (is_store_url(place) or os.path.exists(f"{place}/{MARKER}")):
        return None
    try:
        return place, parse_reference(last)
    except RegistryError:
        return None


def contains(text: str, word: str) -> bool:
    """Whether a word is part of a text; compares letters and digits only, ignoring case."""
    return _letters(word) in _letters(text)


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.casefold())


def segment_of(name: str) -> str:
    """The key segment of a name."""
    return parse_name(name).replace(":", "=")


def name_of(segment: str) -> str:
    """The name of a key segment (E_NAME for any other text)."""
    if ":" in segment:
        raise RegistryError("E_NAME", "key of a log", f"{segment!r} has ':' in place of '='")
    return parse_name(segment.replace("=", ":"))


def typed(url: str, *words: str) -> str:
    """A command of `specctl registry`, with the registry that it is for."""
    return f"`specctl registry {shlex.join(words)} --registry {shlex.quote(url)}`"


def _matched(pattern: re.Pattern[str], what: str, grammar: str, text: str) -> str:
    if pattern.fullmatch(text):
        return text
    fix = "take it from `specctl registry show NAME --registry PLACE`" if what == "digest" else ""
    if pattern.fullmatch(text.lower()):
        fix = f"write it in lower case: {text.lower()}"
    raise RegistryError("E_NAME", what, f"{text!r} is not {grammar}", hint=fix)
