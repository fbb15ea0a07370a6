"""The interface of a store: creation of free keys, reading, listing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from specctl.errors import InvariantError, StoreError

MAX_KEY_BYTES = 900
"""S3 allows 1,024 bytes, including the prefix of the URL."""
_SEGMENT = re.compile(r"[A-Za-z0-9_@+=-][A-Za-z0-9._@+=-]{0,254}")


class KeyTakenError(StoreError):
    """Exclusive creation failed: the key holds an object."""


class KeyAbsentError(StoreError):
    """The key holds no object."""


class ObjectTooLargeError(StoreError):
    """The object has more bytes than the caller accepts."""


class UnreadableError(StoreError):
    """An object that cannot be read: a link, an invalid key, or one closed to this user."""


class UnknownOutcomeError(StoreError):
    """A write with unknown outcome: timeout, dropped connection, server error."""


class TransientError(StoreError):
    """A read that may succeed when repeated."""


@dataclass(frozen=True)
class StoredObject:
    """A key found by listing."""

    key: str
    size_bytes: int


class ObjectStore(Protocol):
    """Immutable objects under slash-separated keys, each written once.

    Listings may be stale, so decisions rest on exclusive creation alone.
    """

    url: str

    def put_new(self, key: str, data: bytes) -> None:
        """Stores bytes under a key that must be free; durable when this returns.

        Raises:
            KeyTakenError: the key is taken; its object is unchanged.
            UnknownOutcomeError: the bytes may have been stored.
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
            KeyAbsentError: the key holds no object.
            ObjectTooLargeError: more than `max_bytes`.
            UnreadableError: this one object cannot be read.
            TransientError: a failure that may pass.
            StoreError: any other failure.
        """

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        """Objects whose key starts with `prefix` (whole path segments), in the order of keys.

        Transient failures are retried first.

        Raises:
            UnreadableError: a link, or an invalid key that the store accepted.
            TransientError, StoreError: as `get`.
        """

    def children(self, prefix: str) -> list[str]:
        """Names directly below a prefix ("" is the top) of objects and non-empty folders, sorted.

        Deeper levels are not read. Errors are those of `objects`.
        """


def check_key(key: str) -> str:
    """Returns a key of plain segments `[A-Za-z0-9._@+=-]`, which all stores read alike.

    Raises:
        InvariantError: any other key. Callers build keys from checked names.
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
    return KeyTakenError(f"{url}, {key}: the key is taken", hint="read its object")


def absent(url: str, key: str) -> KeyAbsentError:
    return KeyAbsentError(
        f"{url}, {key}: there is no object",
        hint="check the name, and the bucket if there is one",
    )


def too_large(url: str, key: str, max_bytes: int, found: int) -> ObjectTooLargeError:
    problem = f"{url}, {key}: {found} bytes, more than {max_bytes}"
    return ObjectTooLargeError(problem, hint="do not use it")
