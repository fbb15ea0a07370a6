"""S3 and compatible stores through obstore; exclusive creation is `If-None-Match: *`.

Credentials, region and endpoint come from the environment, as for every S3 tool:
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL and so on. obstore's own
retries are off: a repeated put whose first try succeeded would look like a lost race, so the
outcome of each try must be seen (`create`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specctl.errors import StoreError, UsageError
from specctl.stores.interface import (
    MAX_REQUEST_S,
    StoredObject,
    TransientError,
    UnknownOutcomeError,
    absent,
    taken,
    too_large,
)
from specctl.stores.keys import check_key

CONNECT_TIMEOUT = timedelta(seconds=5)
TIMEOUT = timedelta(seconds=MAX_REQUEST_S) - CONNECT_TIMEOUT
"""Of one request, transfer included; a segment of a trace may have tens of MiB."""


class S3Store:
    """Objects of a bucket under a prefix.

    Args:
        url: `s3://bucket/prefix`.
        options: settings of obstore's `S3Store`, e.g. `endpoint`; they go before the environment.

    Raises:
        UsageError: obstore is not installed, or the URL names no bucket.
        StoreError: settings that obstore refuses.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url.rstrip("/")
        self._store = _connect(self.url, options)

    def put_new(self, key: str, data: bytes) -> None:
        """See `ObjectStore`."""
        self._put(key, data)

    def put_file(self, key: str, path: Path) -> None:
        """See `ObjectStore`."""
        self._put(key, path)

    def _put(self, key: str, content: bytes | Path) -> None:
        import obstore

        with _store_errors(self.url, key, writes=True):
            # One request, never multipart: the condition belongs to the request.
            obstore.put(self._store, check_key(key), content, mode="create", use_multipart=False)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `ObjectStore`."""
        import obstore

        with _store_errors(self.url, key, writes=False):
            found = obstore.get(self._store, check_key(key))
            if found.meta["size"] > max_bytes:
                raise too_large(self.url, key, max_bytes, found.meta["size"])
            return _capped(found, self.url, key, max_bytes)

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        """See `ObjectStore`."""
        import obstore

        folder = check_key(prefix.rstrip("/")) if prefix else None
        found: list[StoredObject] = []
        with _store_errors(self.url, prefix, writes=False):
            for page in obstore.list(self._store, prefix=folder):
                found += [
                    StoredObject(one["path"], one["size"], one["last_modified"].timestamp())
                    for one in page
                ]
        yield from sorted(found, key=lambda one: one.key)

    def delete(self, key: str) -> None:
        """See `ObjectStore`."""
        import obstore

        with _store_errors(self.url, key, writes=True):
            obstore.delete(self._store, check_key(key))


def _connect(url: str, options: dict[str, Any]) -> Any:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import S3Store as Client
    except ImportError as error:
        raise UsageError(
            url, expected="obstore", found="no such package", fix="pip install 'specctl[s3]'"
        ) from error
    parts = urlsplit(url)
    if not parts.netloc:
        raise UsageError(url, expected="s3://bucket/prefix", found="no bucket", fix="name one")
    try:
        return Client(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            client_options={
                "allow_http": True,
                "timeout": TIMEOUT,
                "connect_timeout": CONNECT_TIMEOUT,
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
            **options,
        )
    except BaseError as error:
        raise _refused(url, "", error) from error


def _capped(found: Any, url: str, key: str, max_bytes: int) -> bytes:
    """Reads a stream up to the cap: what a store declares is not what it has to send."""
    data = bytearray()
    for chunk in found.stream(min_chunk_size=1 << 20):
        data += bytes(chunk)
        if len(data) > max_bytes:
            raise too_large(url, key, max_bytes, len(data))
    return bytes(data)


@contextmanager
def _store_errors(url: str, key: str, *, writes: bool) -> Iterator[None]:
    from obstore import exceptions as their

    place = f"{url}, {key}"
    try:
        yield
    except (their.AlreadyExistsError, their.PreconditionError) as error:
        raise taken(url, key) from error
    except (FileNotFoundError, their.NotFoundError) as error:
        raise absent(url, key) from error
    except (their.PermissionDeniedError, their.UnauthenticatedError) as error:
        raise _refused(url, key, error) from error
    except their.BaseError as error:
        if "AccessDenied" in str(error):  # how a refusal comes back out of a bulk deletion
            raise _refused(url, key, error) from error
        raise _unclear(place, error, writes=writes) from error


def _refused(url: str, key: str, error: Exception) -> StoreError:
    return StoreError(
        f"{url}, {key}",
        expected="settings and a role that the store accepts",
        found=_first_line(error),
        fix="check AWS_* variables and the role's policy (docs/operators.md)",
    )


def _unclear(place: str, error: Exception, *, writes: bool) -> StoreError:
    kind = UnknownOutcomeError if writes else TransientError
    return kind(
        place,
        expected="an answer of the store",
        found=_first_line(error),
        fix="check the network and AWS_ENDPOINT_URL, then try again",
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
