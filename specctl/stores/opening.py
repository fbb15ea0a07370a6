"""Stores by URL."""

from __future__ import annotations

from pathlib import Path

from specctl.errors import UsageError
from specctl.stores.interface import ObjectStore
from specctl.stores.local import LocalStore
from specctl.stores.s3 import S3Store
from specctl.stores.urls import canonical_store, is_store_url


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
        UsageError: another kind of URL (see `canonical_store`), or a package that it needs is
            missing.
    """
    _refuse_unwritable(str(place))
    url = canonical_store(str(place))
    return S3Store(url) if is_store_url(url) else LocalStore(url)
