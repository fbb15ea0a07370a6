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


def open_store(place: str | Path) -> ObjectStore:
    """The store of a folder, `file:///folder` or `s3://bucket/prefix`; nothing is read yet.

    Raises:
        UsageError: another kind of URL, or a package that it needs is missing.
    """
    text = str(place)
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
