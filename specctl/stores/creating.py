"""Exclusive creation with a known outcome, and the probe of a store that it is supported.

After a timeout or a server error a put may have happened. A blind retry would mistake its own
success for another writer's (delta-rs #2279, #268). So the key is read and its bytes are compared:
equal bytes are this writer's, since created objects hold a nonce or are named by their digest;
other bytes are another writer's; an absent key is tried again.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from specctl.errors import StoreError
from specctl.stores.interface import (
    KeyAbsentError,
    KeyTakenError,
    ObjectStore,
    ObjectTooLargeError,
    TransientError,
    UnknownOutcomeError,
    taken,
)

MAX_TRIES = 6
FIRST_WAIT_S, MAX_WAIT_S = 0.05, 2.0
"""Waits double, and are drawn between half and the whole: 0.05 to 1.6 s, about 3 s in all."""
PROBE_KEY, PROBE_BYTES = "probe/put-if-absent", 16
T = TypeVar("T")


def create(store: ObjectStore, key: str, content: bytes | Path) -> None:
    """Stores bytes or a file under a free key; succeeds if the key holds equal bytes.

    Args:
        content: holds a nonce, or its digest is in `key`, so equal bytes are this writer's.

    Raises:
        KeyTakenError: the key holds other bytes.
        UnknownOutcomeError: still unknown after `MAX_TRIES`; repeating is safe.
        StoreError: refused; nothing was stored.
    """
    for attempt in range(MAX_TRIES):
        try:
            if isinstance(content, Path):
                return store.put_file(key, content)
            return store.put_new(key, content)
        except (KeyTakenError, UnknownOutcomeError) as error:
            if _holds(store, key, content):
                return None
            if attempt == MAX_TRIES - 1:
                raise UnknownOutcomeError(error.message, hint=error.hint) from error
            _wait(attempt)
    return None


def ensure(store: ObjectStore, key: str, data: bytes) -> None:
    """Stores a content-addressed object unless it exists.

    Raises:
        StoreError: the key holds other bytes: damage, or an attack.
    """
    try:
        create(store, key, data)
    except KeyTakenError as error:
        raise StoreError(
            f"{store.url}, {key}: its bytes do not match the digest in its name",
            hint=f"check the rest with `specctl registry verify --registry {store.url}` or "
            f"`specctl traces verify {store.url}`, remove that object, then do this again",
        ) from error


def read(store: ObjectStore, key: str, *, max_bytes: int) -> bytes:
    """`store.get`, retried after transient failures.

    Raises:
        StoreError: see `ObjectStore.get`.
    """
    return retried(lambda: store.get(key, max_bytes=max_bytes))


def retried(call: Callable[[], T]) -> T:
    """The result of an idempotent call, retried after transient failures."""
    for attempt in range(MAX_TRIES - 1):
        try:
            return call()
        except TransientError:
            _wait(attempt)
    return call()


def probe(store: ObjectStore) -> None:
    """Refuses a store that ignores the condition of a put, which would silently lose commits.

    Two different objects are put under one key; the second must be refused, and the first kept.
    The object stays, so no right to delete is needed; later probes find the key taken.

    Raises:
        StoreError: conditional puts do not work, or the store cannot be written.
    """
    first: bytes | None = None
    for _ in range(2):
        data, is_taken = _put_probe(store)
        if is_taken:
            break
        first = data
    else:
        raise _unfit(store, "it overwrote the key")
    # Some stores refuse every put.
    try:
        standing = read(store, PROBE_KEY, max_bytes=PROBE_BYTES)
    except KeyAbsentError:
        raise _unfit(store, "it refused to create a free key") from None
    if standing == data or first not in (None, standing):
        raise _unfit(store, "it overwrote the key, although it reported a refusal")


def _put_probe(store: ObjectStore) -> tuple[bytes, bool]:
    """Puts new bytes; returns them, and whether the key was taken.

    After an unknown outcome other bytes are put, since the key may hold the first ones.
    """
    for attempt in range(MAX_TRIES):
        data = secrets.token_bytes(PROBE_BYTES)
        try:
            store.put_new(PROBE_KEY, data)
        except KeyTakenError:
            return data, True
        except UnknownOutcomeError:
            if attempt == MAX_TRIES - 1:
                raise
        else:
            return data, False
    raise AssertionError("the last try returns or raises")


def _unfit(store: ObjectStore, found: str) -> StoreError:
    return StoreError(
        f"{store.url}: the store does not support conditional puts (If-None-Match: *): {found}",
        hint="use a store that does; here a concurrent write would be lost",
    )


def _holds(store: ObjectStore, key: str, content: bytes | Path) -> bool:
    """Whether the key holds these bytes; False if it is absent or unreadable.

    Raises:
        KeyTakenError: it holds other bytes.
    """
    data = content.read_bytes() if isinstance(content, Path) else content
    try:
        found = read(store, key, max_bytes=len(data))
    except (KeyAbsentError, TransientError):
        return False
    except ObjectTooLargeError:
        found = b""
    if found != data:
        raise taken(store.url, key)
    return True


def _wait(attempt: int) -> None:
    longest = min(FIRST_WAIT_S * 2**attempt, MAX_WAIT_S)
    time.sleep(random.uniform(longest / 2, longest))
