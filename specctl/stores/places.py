"""A store by its folder or URL, and the canonical form of a place, for records kept by URL."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from specctl.errors import UsageError
from specctl.stores.interface import ObjectStore
from specctl.stores.local import LocalStore
from specctl.stores.s3 import S3Store

_USERINFO = re.compile(r"://[^/?#@]*@(?!sha256:)")
"""Before the host; `s3://bucket@sha256:...` is a snapshot of traces in a bucket."""
_BUCKET = re.compile(r"[A-Za-z0-9._-]+")


def open_store(place: str | Path) -> ObjectStore:
    """The store of a folder, `file:///folder` or `s3://bucket/prefix`; nothing is read.

    Raises:
        UsageError: see `canonical_store`; also a path that is not UTF-8, or a missing package.
    """
    text = str(place)
    try:
        text.encode()
    except UnicodeEncodeError:  # messages and JSON could not hold it
        raise UsageError(f"folder {text!a}: its name is not UTF-8; rename it") from None
    url = canonical_store(text)
    return S3Store(url) if is_store_url(url) else LocalStore(url)


def is_store_url(place: str) -> bool:
    """Whether a place is a URL, not a path."""
    return "://" in place


def check_no_secret(text: str) -> None:
    """Refuses a URL with a user or a password, which would appear in messages and shared files.

    Raises:
        UsageError: it has one; the message does not repeat it.
    """
    if _USERINFO.search(text):
        raise UsageError(
            "the URL of a store or registry holds a user or a password, not repeated here",
            hint="take it out; credentials come from AWS_* variables",
        )


def canonical_store(place: str) -> str:
    """The absolute folder, or `s3://bucket[/prefix]`, of a text; nothing is opened.

    Links in a folder's path are kept, so a registry that moved and left a link keeps its place.

    Raises:
        UsageError: another kind of URL, a user or password in it, or ambiguous parts.
    """
    scheme, colon, _ = place.partition(":")
    if not is_store_url(place):
        if colon and scheme.lower() in ("file", "s3"):
            fix = f"write {scheme.lower()}://, or ./{place} for a folder"
            raise _refused(place, "no // behind the colon", fix)
        return _absolute(place)
    check_no_secret(place)
    try:
        parts = urlsplit(place)
    except ValueError as error:
        raise _refused(place, str(error)) from None
    if "?" in place or "#" in place:
        raise _refused(place, "a query or a fragment", "leave it out")
    is_dotted = any(segment in (".", "..") for segment in parts.path.split("/"))
    if is_dotted or "//" in parts.path or not place.isprintable():
        raise _refused(place, "an empty or dotted part, or no plain text")
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return _absolute(unquote(parts.path, errors="surrogateescape"))
    if parts.scheme != "s3":
        raise _refused(place, f"scheme {parts.scheme!r}")
    if not _BUCKET.fullmatch(parts.netloc):
        found = f"bucket {parts.netloc!r}" if parts.netloc else "no bucket"
        raise _refused(place, found, "name one that exists")
    return f"s3://{parts.netloc}{parts.path.removesuffix('/')}"


def _absolute(text: str) -> str:
    path = Path(text).absolute()
    if ".." in path.parts:  # a link's parent may differ from the written one
        depth = len(path.parts) - path.parts[::-1].index("..")
        path = Path(os.path.realpath(Path(*path.parts[:depth])), *path.parts[depth:])
    return "/" + str(path).lstrip("/")


def _refused(url: str, found: str, fix: str = "correct the URL") -> UsageError:
    forms = "a folder, file:///folder or s3://bucket/prefix"
    return UsageError(f"store {url.partition('?')[0]!r} is not {forms}: {found}", hint=fix)
