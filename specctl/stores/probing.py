"""Refuses a store that ignores the condition of a put: it would lose commits in silence."""

from __future__ import annotations

import secrets
from contextlib import suppress

from specctl.errors import StoreError
from specctl.stores.creating import MAX_TRIES, create, read
from specctl.stores.interface import (
    KeyAbsentError,
    KeyTakenError,
    ObjectStore,
    UnknownOutcomeError,
)

PROBES, NUM_BYTES = "probe", 16
PROBE_KEY = f"{PROBES}/put-if-absent"
CLOCK_KEYS = f"{PROBES}/clock-*"
"""What a store's time is learned from, and taken away again."""


def probe(store: ObjectStore) -> None:
    """Puts two different objects under one key; the second must be refused, and the first stand.

    The key stays: later probes find it taken both times, so no right to delete is needed.

    Raises:
        StoreError: the second put was accepted, or what was refused was not there, or the store
            cannot be written.
    """
    first: bytes | None = None
    for _ in range(2):
        data, is_taken = _put(store)
        if not is_taken:
            first = data
            continue
        _check_standing(store, first, data)
        return
    raise _unfit(store, "one that overwrote it")


def _check_standing(store: ObjectStore, first: bytes | None, refused: bytes) -> None:
    """Refusing is not enough: some stores answer every put like that, and keep nothing."""
    try:
        standing = read(store, PROBE_KEY, max_bytes=NUM_BYTES)
    except KeyAbsentError:
        raise _unfit(store, "one that refuses to create a free key") from None
    if standing == refused or first not in (None, standing):
        raise _unfit(store, "one that overwrote it, and said that it did not")


def _unfit(store: ObjectStore, found: str) -> StoreError:
    return StoreError(
        f"{store.url}",
        expected="a store that refuses to create an existing key (If-None-Match: *)",
        found=found,
        fix="use a store with conditional writes; here a concurrent writer would be lost",
    )


def _put(store: ObjectStore) -> tuple[bytes, bool]:
    """Puts new bytes; returns them, and whether the key was taken.

    Those of an unknown outcome may stand there now: they are no others', so new ones are put.
    """
    for _ in range(MAX_TRIES - 1):
        with suppress(UnknownOutcomeError):
            return _put_once(store)
    return _put_once(store)


def _put_once(store: ObjectStore) -> tuple[bytes, bool]:
    data = secrets.token_bytes(NUM_BYTES)
    try:
        store.put_new(PROBE_KEY, data)
    except KeyTakenError:
        return data, True
    return data, False


def now_s(store: ObjectStore) -> float:
    """Seconds since the epoch by the clock that dates the store's objects, and no other.

    Raises:
        StoreError: the store cannot be written, or does not list what was just stored.
    """
    key = f"{PROBES}/clock-{secrets.token_hex(16)}"
    create(store, key, key.encode())
    try:
        for found in store.objects(PROBES):
            if found.key == key:
                return found.modified_s
    finally:
        store.delete(key)
    raise StoreError(
        f"{store.url}, {key}",
        expected="a listing with what was just stored",
        found="one without it",
        fix="use a store whose listings are up to date",
    )
