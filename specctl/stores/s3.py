"""S3 and compatible stores through obstore; exclusive creation is `If-None-Match: *`.

Credentials, region and endpoint come from the environment, as for every S3 tool:
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL and so on. obstore's own
retries are off, since `create` needs the outcome of each try: a repeated put whose first try
succeeded would look like another writer's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specctl.errors import StoreError, UsageError
from specctl.stores.creating import retried
from specctl.stores.interface import (
    StoredObject,
    TransientError,
    UnknownOutcomeError,
    UnreadableError,
    absent,
    check_key,
    taken,
    too_large,
)

CONNECT_TIMEOUT, TIMEOUT = timedelta(seconds=5), timedelta(seconds=60)
"""For one request, transfer included; a segment of a trace may have tens of MiB."""
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ENDPOINT = re.compile(
    r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(:([0-9]{1,5}))?(/[\w./~-]*)?", re.A
)
_REGION = re.compile(r"[A-Za-z0-9_-]+")
_METADATA = "169.254.169.254"
_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run where a role gives them"


class S3Store:
    """Objects of a bucket under a prefix.

    Args:
        url: `s3://bucket/prefix`.
        options: settings of obstore's `S3Store`, e.g. `endpoint`; they override the environment.

    Raises:
        UsageError: obstore is not installed, the URL has no bucket, or the endpoint or region is
            invalid.
        StoreError: obstore refuses the settings.
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
            # One request, never multipart: the condition holds for one request.
            obstore.put(self._store, check_key(key), content, mode="create", use_multipart=False)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `ObjectStore`."""
        import obstore

        with _store_errors(self.url, key, writes=False):
            found = obstore.get(self._store, check_key(key))
            if found.meta["size"] > max_bytes:
                raise too_large(self.url, key, max_bytes, found.meta["size"])
            data = bytearray()
            # The store may send more than it declared.
            for chunk in found.stream(min_chunk_size=1 << 20):
                data += bytes(chunk)
                if len(data) > max_bytes:
                    raise too_large(self.url, key, max_bytes, len(data))
            return bytes(data)

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        """See `ObjectStore`.

        Marker objects that some tools put for empty folders, e.g. `log/`, are left out.
        """
        import obstore

        folder = check_key(prefix.rstrip("/")) if prefix else None

        def once() -> list[StoredObject]:
            with _store_errors(self.url, prefix, writes=False):
                return [
                    StoredObject(one["path"], one["size"])
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

        paths = (path for path in retried(once) if path != folder)
        return sorted({path.rpartition("/")[2] for path in paths} - {""})


def _connect(url: str, options: dict[str, Any]) -> Any:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import S3Store as Client
    except ImportError as error:
        fix = "pip install obstore"
        raise UsageError(f"{url} needs the package obstore", hint=fix) from error
    parts = urlsplit(url)
    if not parts.netloc:
        raise UsageError(f"{url} names no bucket: s3://bucket/prefix")
    _check_settings(options)
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
        raise _refused(url, error) from error


def _check_settings(options: Mapping[str, object]) -> None:
    """Refuses endpoints and regions that obstore panics on.

    Empty variables are removed: obstore would take one for an address.
    """
    for name in (*ENDPOINTS, *REGIONS):
        if os.environ.get(name) == "":
            del os.environ[name]
    found = {**os.environ, **{name: str(value) for name, value in options.items()}}
    for name in found.keys() & {*ENDPOINTS, "endpoint", *REGIONS, "region"}:
        value, form = found[name], "a region, e.g. us-east-1"
        if name in (*REGIONS, "region"):
            is_good = _REGION.fullmatch(value) is not None
        else:
            form = "http://host[:port] or https://host[:port]"
            match = _ENDPOINT.fullmatch(value)
            is_good = match is not None and int(match[3] or 0) <= 65535
        if not is_good:
            # An address with an @ holds a user, maybe a password.
            shown = "text with an @, not repeated here" if "@" in value else repr(value)
            raise UsageError(f"{name} is {shown}, not {form}", hint="correct it, or unset it")


@contextmanager
def _store_errors(url: str, key: str, *, writes: bool) -> Iterator[None]:
    """Turns obstore's errors into those of the interface."""
    from obstore import exceptions as their

    place = f"{url}, {key}"
    try:
        yield
    except (their.AlreadyExistsError, their.PreconditionError) as error:
        raise taken(url, key) from error
    except (their.PermissionDeniedError, their.UnauthenticatedError) as error:
        raise _refused(place, error) from error
    except their.InvalidPathError as error:
        raise UnreadableError(
            f"{place}: a key has empty segments, . or .., or control characters: "
            f"{_first_line(error)}",
            hint="find out who made that object, and delete it with the store's own tools",
        ) from error
    except (FileNotFoundError, their.BaseError) as error:
        if "<Code>NoSuchBucket</Code>" in str(error):
            raise StoreError(
                f"{url}: bucket {urlsplit(url).netloc!r} does not exist",
                hint="check the name and AWS_ENDPOINT_URL, or create it; specctl creates none",
            ) from error
        if isinstance(error, FileNotFoundError | their.NotFoundError):
            raise absent(url, key) from error
        if writes and "501 Not Implemented" in _first_line(error):
            raise StoreError(
                f"{place}: the store does not support conditional puts (If-None-Match: *)",
                hint="use a store that does; nothing was stored",
            ) from error
        raise _unclear(place, error, writes=writes) from error


def _refused(place: str, error: Exception) -> StoreError:
    fix = "check AWS_* variables and the role's policy (docs/operators.md)"
    return StoreError(
        f"{place}: the store refuses these settings or this role: {_first_line(error)}",
        hint=_CREDENTIALS if _lacks_credentials(error) else fix,
    )


def _unclear(place: str, error: Exception, *, writes: bool) -> StoreError:
    """A failure that may pass, also of the metadata service that provides a role."""
    kind = UnknownOutcomeError if writes else TransientError
    if _lacks_credentials(error):
        return kind(
            f"{place}: no credentials in the environment, and none from the machine's role",
            hint=_CREDENTIALS,
        )
    return kind(
        f"{place}: the store does not answer: {_first_line(error)}",
        hint="check the network and AWS_ENDPOINT_URL, then try again",
    )


def _lacks_credentials(error: Exception) -> bool:
    """Without credentials in the environment, obstore queries the cloud's metadata service."""
    text = _first_line(error)
    return any(sign in text for sign in (_METADATA, "Missing SecretAccessKey", "Missing AccessKey"))


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
