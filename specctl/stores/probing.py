"""Refuses a store that ignores the condition of a put: it would lose commits in silence."""

from __future__ import annotations

import secrets

from specctl.errors import StoreError
from specctl.stores.creating import MAX_TRIES, create
from specctl.stores.interface import KeyTakenError, ObjectStore, UnknownOutcomeError

PROBES = "probe"
PROBE_KEY = f"{PROBES}/put-if-absent"


def probe(store: ObjectStore) -> None:
    """Puts two different objects under one key; the second must be refused.

    The key stays: later probes find it taken both times, so no right to delete is needed.

    Raises:
        StoreError: the second put was accepted, or the store cannot be written.
    """
    for _ in range(2):
        if _is_refused(store):
            return
    raise StoreError(
        f"{store.url}",
        expected="a store that refuses to create an existing key (If-None-Match: *)",
        found="one that overwrote it",
        fix="use a store with conditional writes; here a concurrent writer would be lost",
    )


def _is_refused(store: ObjectStore) -> bool:
    for attempt in range(MAX_TRIES):
        try:
            store.put_new(PROBE_KEY, secrets.token_bytes(16))
        except KeyTakenError:
            return True
        except UnknownOutcomeError:
            if attempt == MAX_TRIES - 1:
                raise
        else:
            return False
    return False


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
