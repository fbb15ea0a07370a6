"""Exclusive creation that knows how it ended: retries, and the nonce rule for unknown outcomes.

After a timeout or a server error a put may have happened. Repeating it blindly turns one's own
success into a lost race (delta-rs #2279, #268). So: read the key and compare the bytes. Equal is
ours, because what is created holds a nonce or is named by its digest; other bytes are somebody
else's; absent means that it may be tried again under the same key.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from specctl.errors import StoreError
from specctl.stores.interface import (
    MAX_REQUEST_S,
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
"""Waits double and are drawn between half and all of it: 0.05 to 1.6 s, some 3 s in all."""
LAST_TRY_S = 240.0
"""No put is begun later than this after the first."""
MAX_CREATE_S = LAST_TRY_S + MAX_REQUEST_S
"""After this, nothing that `create` sent takes effect any more."""
T = TypeVar("T")


def elapsed_s() -> float:
    """Seconds since some fixed moment, time in which the machine was suspended included."""
    boottime: int | None = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


def create(store: ObjectStore, key: str, data: bytes) -> None:
    """Stores bytes under a free key; equal bytes already there are a success.

    Args:
        data: holds a nonce, or `key` is its digest: equal bytes can only be this write.

    Raises:
        KeyTakenError: the key holds other bytes.
        UnknownOutcomeError: it could not be told in `MAX_TRIES` or `LAST_TRY_S`; doing it again
            is safe.
        StoreError: refused; nothing was stored.
    """
    _create(lambda: store.put_new(key, data), lambda: _holds(store, key, data))


def create_file(store: ObjectStore, key: str, path: Path) -> None:
    """Stores a file under a free key; equal bytes already there are a success.

    Args:
        path: `key` is named by the digest of its bytes.

    Raises:
        As `create`.
    """
    _create(
        lambda: store.put_file(key, path),
        lambda: _holds(store, key, path.read_bytes()),
    )


def _create(put: Callable[[], None], is_held: Callable[[], bool]) -> None:
    latest_s = elapsed_s() + LAST_TRY_S
    for attempt in range(MAX_TRIES):
        try:
            put()
        except (KeyTakenError, UnknownOutcomeError) as error:
            if is_held():
                return
            if attempt == MAX_TRIES - 1 or elapsed_s() + MAX_WAIT_S > latest_s:
                raise UnknownOutcomeError(
                    error.what, expected=error.expected, found=error.found, fix=error.fix
                ) from error
            _wait(attempt)
        else:
            return


def _holds(store: ObjectStore, key: str, data: bytes) -> bool:
    """Whether the key holds these bytes; false where it holds none, or none can be read."""
    try:
        found = read(store, key, max_bytes=len(data))
    except (KeyAbsentError, TransientError):
        return False
    except ObjectTooLargeError:
        found = b""
    if found != data:
        raise taken(store.url, key)
    return True


def read(store: ObjectStore, key: str, *, max_bytes: int) -> bytes:
    """`store.get` with retries of what may pass.

    Raises:
        StoreError: see `ObjectStore.get`.
    """
    return retried(lambda: store.get(key, max_bytes=max_bytes))


def retried(call: Callable[[], T]) -> T:
    """The result of a call that may be made twice, made again where its failure may pass."""
    for attempt in range(MAX_TRIES - 1):
        try:
            return call()
        except TransientError:
            _wait(attempt)
    return call()


def _wait(attempt: int) -> None:
    longest = min(FIRST_WAIT_S * 2**attempt, MAX_WAIT_S)
    time.sleep(random.uniform(longest / 2, longest))


def ensure(store: ObjectStore, key: str, data: bytes) -> None:
    """Stores a content-addressed object; one that is there already is the same.

    Raises:
        StoreError: the key holds other bytes than its digest says: damage, or an attack.
    """
    try:
        create(store, key, data)
    except KeyTakenError as error:
        raise StoreError(
            f"{store.url}, {key}",
            expected="the bytes that its name is the digest of",
            found="other bytes",
            fix="check the rest with `specctl registry verify` or `specctl traces verify`, remove "
            "that object, then do this again",
        ) from error
