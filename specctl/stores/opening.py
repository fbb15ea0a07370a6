"""Stores by URL."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from specctl.errors import UsageError
from specctl.stores.interface import ObjectStore
from specctl.stores.local import LocalStore
from specctl.stores.s3 import S3Store


def is_store_url(place: str) -> bool:
    """Whether a place is named by a URL and not by a path."""
    return "://" in place


def refuse_secrets(place: str) -> None:
    """Refuses a URL with a user or a password: a URL is printed, kept and compared.

    Raises:
        UsageError: it repeats nothing of the URL.
    """
    host = place.partition("://")[2] if is_store_url(place) else ""
    for end in "/?#":
        host = host.partition(end)[0]
    if "@" in host:
        raise UsageError(
            "URL of a store",
            expected="no user and no password in it",
            found="some before the '@' of its host",
            fix="take them out and change them: credentials come from the environment (AWS_*), or "
            "from `docker login`",
        )


def _refuse_unwritable(path: str) -> None:
    """Refuses a path that cannot stand in messages, notes and JSON."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"folder {path!a}",
            expected="a path in UTF-8",
            found="other bytes",
            fix="rename the folder",
        ) from None


def open_store(place: str | Path) -> ObjectStore:
    """The store of a folder, `file:///folder` or `s3://bucket/prefix`; nothing is read yet.

    Raises:
        UsageError: another kind of URL, one with a secret in it, or a package that it needs is
            missing.
    """
    text = str(place)
    refuse_secrets(text)
    _refuse_unwritable(text)
    if not is_store_url(text):
        return LocalStore(text)
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return LocalStore(unquote(parts.path))
    if parts.scheme == "s3":
        return S3Store(text)
    raise UsageError(
        f"store {text!r}"[:200],
        expected="a folder, file:///folder or s3://bucket/prefix",
        found=f"scheme {parts.scheme!r}",
        fix="correct the URL",
    )
