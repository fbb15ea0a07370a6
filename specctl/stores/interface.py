"""The interface of a store: creation that fails where the key is taken, reading, listing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from specctl.errors import InvariantError, StoreError

MAX_KEY_BYTES = 900
"""S3 takes 1,024 bytes, of which the prefix of a URL has some."""
_SEGMENT = re.compile(r"[A-Za-z0-9_@+=-][A-Za-z0-9._@+=-]{0,254}")


class KeyTakenError(StoreError):
    """Exclusive creation lost: the key holds something already."""


class KeyAbsentError(StoreError):
    """Nothing is stored under the key."""


class ObjectTooLargeError(StoreError):
    """More bytes than the caller accepts; they were not read."""


class UnreadableError(StoreError):
    """An object that specctl never writes, such as a link, or that only its owner may read."""


class UnknownOutcomeError(StoreError):
    """A write that may or may not have happened: timeout, dropped connection, server error."""


class TransientError(StoreError):
    """A read that may succeed when tried again."""


@dataclass(frozen=True)
class StoredObject:
    """A key found by listing."""

    key: str
    size_bytes: int


class ObjectStore(Protocol):
    """Immutable objects under slash-separated keys, each written once.

    Listings may be stale and never decide anything: exclusive creation does.
    """

    url: str

    def put_new(self, key: str, data: bytes) -> None:
        """Stores bytes under a key that must be free; durable when this returns.

        Raises:
            KeyTakenError: the key is taken; its object was not touched.
            UnknownOutcomeError: whether the bytes were stored is not known.
            StoreError: the store refuses or cannot be reached; nothing was stored.
        """

    def put_file(self, key: str, path: Path) -> None:
        """Stores a finished file as `put_new` stores bytes; in a folder by a link, not a copy.

        Raises:
            As `put_new`.
        """

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The bytes of a key.

        Raises:
            KeyAbsentError: there are none.
            ObjectTooLargeError: more than `max_bytes`.
            UnreadableError: this object cannot be read, whatever happens to the others.
            TransientError: a failure that may pass.
            StoreError: any other.
        """

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        """Objects whose key starts with `prefix` (whole path segments), in the order of keys.

        Failures that may pass are tried again before they are raised.

        Raises:
            UnreadableError: a link, or a key that this store takes and that no client can name.
            TransientError, StoreError: as `get`.
        """

    def children(self, prefix: str) -> list[str]:
        """Names directly below a prefix ("" is the top) of objects and of folders that hold any.

        Sorted. Nothing further below is read, so nothing there is in the way. Errors are those of
        `objects`.
        """


def check_key(key: str) -> str:
    """Returns a key of plain segments `[A-Za-z0-9._@+=-]`, which every store reads in one way.

    Raises:
        InvariantError: any other. Callers build keys from checked names, never from free text.
    """
    segments = key.split("/")
    if len(key) > MAX_KEY_BYTES or not all(_SEGMENT.fullmatch(segment) for segment in segments):
        raise InvariantError(
            f"{ascii(key)[:80]} is no store key: segments of [A-Za-z0-9._@+=-], at most "
            f"{MAX_KEY_BYTES} bytes",
            hint="report this",
        )
    return key


def taken(url: str, key: str) -> KeyTakenError:
    """The error of a key that holds something."""
    return KeyTakenError(f"{url}, {key}: the key is taken", hint="read its object")


def absent(url: str, key: str) -> KeyAbsentError:
    """The error of a key that holds nothing."""
    return KeyAbsentError(
        f"{url}, {key}: there is no object",
        hint="check the name, and the bucket if it is in one",
    )


def too_large(url: str, key: str, max_bytes: int, found: int) -> ObjectTooLargeError:
    """The error of an object beyond the caller's cap; both in bytes."""
    problem = f"{url}, {key}: {found} bytes, more than {max_bytes}"
    return ObjectTooLargeError(problem, hint="do not use it")
