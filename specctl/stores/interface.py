"""What is asked of a store: creation that fails where the key is taken, reading, listing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from specctl.errors import StoreError

MAX_REQUEST_S = 65.0
"""The longest that one request to a store may take, connecting included. A folder on a file server
that hangs has no such bound."""


class KeyTakenError(StoreError):
    """Exclusive creation lost: the key holds something already."""


class KeyAbsentError(StoreError):
    """Nothing is stored under the key."""


class ObjectTooLargeError(StoreError):
    """More bytes than the caller takes; they were not read."""


class UnreadableError(StoreError):
    """Something that no store of ours has put there, or that nobody but its owner may read."""


class UnknownOutcomeError(StoreError):
    """A write that may or may not have happened: timeout, dropped connection, server error."""


class TransientError(StoreError):
    """A read or a deletion that may succeed when tried again."""


@dataclass(frozen=True)
class StoredObject:
    """A key found by listing.

    Attributes:
        modified_s: seconds since the epoch, by the store's clock.
    """

    key: str
    size_bytes: int
    modified_s: float


class ObjectStore(Protocol):
    """Immutable objects under slash-separated keys `[A-Za-z0-9._@+=-]`, each written once.

    Listings may be stale and are never what decides: exclusive creation is.
    """

    url: str

    def put_new(self, key: str, data: bytes) -> None:
        """Stores bytes under a key that must be free; durable when this returns.

        Raises:
            KeyTakenError: the key is taken; what it holds was not touched.
            UnknownOutcomeError: whether the bytes were stored cannot be told.
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
            UnreadableError: this one object cannot be read, whatever happens to the others.
            TransientError: a failure that may pass.
            StoreError: any other.
        """

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        """Objects whose key starts with `prefix` (whole path segments), in the order of keys.

        Listing and deleting may be done twice, so what may pass is tried again before it is raised.

        Raises:
            UnreadableError: a key that this store takes and that nobody can name here, or a link.
            TransientError, StoreError: as `get`.
        """

    def children(self, prefix: str) -> list[str]:
        """Names directly below a prefix ("" is the top) of objects and of folders that hold any.

        Sorted. Nothing further below is read, so nothing there is in the way. Errors are those of
        `objects`.
        """

    def delete(self, key: str) -> None:
        """Removes an object; one that is gone already is fine. Errors are those of `objects`."""


def taken(url: str, key: str) -> KeyTakenError:
    """The error of a key that holds something."""
    return KeyTakenError(
        f"{url}, {key}", expected="a free key", found="a taken one", fix="read what it holds"
    )


def absent(url: str, key: str) -> KeyAbsentError:
    """The error of a key that holds nothing."""
    return KeyAbsentError(
        f"{url}, {key}",
        expected="an object",
        found="none",
        fix="check the name, and the bucket where it is one",
    )


def too_large(url: str, key: str, max_bytes: int, found: int) -> ObjectTooLargeError:
    """The error of an object beyond the caller's cap; both in bytes."""
    return ObjectTooLargeError(
        f"{url}, {key}",
        expected=f"at most {max_bytes} bytes",
        found=f"{found} bytes",
        fix="do not use it",
    )
