"""S3 and compatible stores through obstore; exclusive creation is `If-None-Match: *`.

Credentials, region and endpoint come from the environment, as for every S3 tool:
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL and so on. obstore's own
retries are off: a repeated put whose first try succeeded would look like a lost race, so the
outcome of each try must be seen (`create`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specctl.errors import StoreError, UsageError
from specctl.stores.creating import retried
from specctl.stores.interface import (
    MAX_REQUEST_S,
    KeyAbsentError,
    StoredObject,
    TransientError,
    UnknownOutcomeError,
    UnreadableError,
    absent,
    taken,
    too_large,
)
from specctl.stores.keys import check_key
from specctl.stores.s3_settings import check_settings

CONNECT_TIMEOUT = timedelta(seconds=5)
TIMEOUT = timedelta(seconds=MAX_REQUEST_S) - CONNECT_TIMEOUT
"""Of one request, transfer included; a segment of a trace may have tens of MiB."""
_METADATA = "169.254.169.254"
_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run where a role gives them"


class S3Store:
    """Objects of a bucket under a prefix.

    Args:
        url: `s3://bucket/prefix`.
        options: settings of obstore's `S3Store`, e.g. `endpoint`; they go before the environment.

    Raises:
        UsageError: obstore is not installed, the URL names no bucket, or the environment no such
            endpoint or region.
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

        with _store_errors(self.url, key, writes=True), _knowing_conditions(self.url, key):
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
        """See `ObjectStore`.

        What some tools put to show an empty folder, `log/`, is not below it.
        """
        import obstore

        folder = check_key(prefix.rstrip("/")) if prefix else None

        def once() -> list[StoredObject]:
            with _store_errors(self.url, prefix, writes=False):
                return [
                    StoredObject(one["path"], one["size"], one["last_modified"].timestamp())
                    for page in obstore.list(self._store, prefix=folder)
                    for one in page
                    if one["path"] != (folder or "")
                ]

        yield from sorted(retried(once), key=lambda one: one.key)

    def children(self, prefix: str) -> list[str]:
        """See `ObjectStore`."""
        import obstore

        folder = check_key(prefix) if prefix else None

        def once() -> list[str]:
            with _store_errors(self.url, prefix, writes=False):
                found = obstore.list_with_delimiter(self._store, prefix=folder)
                return [*found["common_prefixes"], *(one["path"] for one in found["objects"])]

        return sorted({path.rpartition("/")[2] for path in retried(once) if path != folder} - {""})

    def delete(self, key: str) -> None:
        """See `ObjectStore`."""
        import obstore

        check_key(key)

        def once() -> None:
            with suppress(KeyAbsentError), _store_errors(self.url, key, writes=False):
                obstore.delete(self._store, key)

        retried(once)


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
    check_settings(options)
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

    try:
        yield
    except (their.AlreadyExistsError, their.PreconditionError) as error:
        raise taken(url, key) from error
    except (FileNotFoundError, their.NotFoundError) as error:
        raise (_no_bucket(url, error) or absent(url, key)) from error
    except their.InvalidPathError as error:
        raise _odd_key(url, key, error) from error
    except (their.PermissionDeniedError, their.UnauthenticatedError) as error:
        raise _refused(url, key, error) from error
    except their.BaseError as error:
        if "AccessDenied" in str(error):  # how a refusal comes back out of a bulk deletion
            raise _refused(url, key, error) from error
        raise (_no_bucket(url, error) or _unclear(url, key, error, writes=writes)) from error


@contextmanager
def _knowing_conditions(url: str, key: str) -> Iterator[None]:
    """Around a conditional put: 501 is how a store says that it does not know the condition."""
    from obstore.exceptions import BaseError

    try:
        yield
    except BaseError as error:
        if "501 Not Implemented" not in _first_line(error):
            raise
        raise StoreError(
            f"{url}, {key}",
            expected="a store that refuses to create an existing key (If-None-Match: *)",
            found="the store does not know conditional puts (If-None-Match)",
            fix="use a store with conditional writes; nothing was stored",
        ) from error


def _no_bucket(url: str, error: Exception) -> StoreError | None:
    """The refusal of a store that says that the bucket is not there; else None."""
    if "<Code>NoSuchBucket</Code>" not in str(error):
        return None
    bucket = urlsplit(url).netloc
    return StoreError(
        url,
        expected="a bucket that exists",
        found=f"bucket {bucket!r} does not exist",
        fix="check the name and AWS_ENDPOINT_URL, or create it; specctl creates no buckets",
    )


def _odd_key(url: str, prefix: str, error: Exception) -> UnreadableError:
    """A listing with a key that the client takes for none: an empty segment, `..`, a control."""
    return UnreadableError(
        f"{url}, {prefix}",
        expected="keys without empty segments, . and .., and control characters",
        found=_first_line(error),
        fix="find out who made that object, and delete it by the store's own tools",
    )


def _refused(url: str, key: str, error: Exception) -> StoreError:
    return StoreError(
        f"{url}, {key}",
        expected="settings and a role that the store accepts",
        found=_first_line(error),
        fix=_CREDENTIALS
        if _lacks_credentials(error)
        else "check AWS_* variables and the role's policy (docs/operators.md)",
    )


def _unclear(url: str, key: str, error: Exception, *, writes: bool) -> StoreError:
    """A failure that may pass: also one of the metadata address, which a machine's role needs."""
    kind = UnknownOutcomeError if writes else TransientError
    found, fix = _first_line(error), "check the network and AWS_ENDPOINT_URL, then try again"
    if _lacks_credentials(error):
        found = f"none in the environment, and none from the machine's role: {found}"
        return kind(f"{url}, {key}", expected="credentials", found=found, fix=_CREDENTIALS)
    if "error sending request" in found:
        found = f"the store does not answer: {found}"
    return kind(f"{url}, {key}", expected="an answer of the store", found=found, fix=fix)


def _lacks_credentials(error: Exception) -> bool:
    """Without any in the environment, obstore asks the metadata service of a cloud's machine."""
    text = _first_line(error)
    return any(sign in text for sign in (_METADATA, "Missing SecretAccessKey", "Missing AccessKey"))


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
