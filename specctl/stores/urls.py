"""The one form of a store's place: what is kept by URL must not depend on how it was typed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from specctl.errors import UsageError

_USERINFO = re.compile(r"://[^/?#@]*@(?!sha256:)")
"""Before the host; `s3://bucket@sha256:...` is a snapshot of traces in a bucket."""
_BUCKET = re.compile(r"[A-Za-z0-9._-]+")


def is_store_url(place: str) -> bool:
    """Whether a place is named by a URL and not by a path."""
    return "://" in place


def check_no_secret(text: str) -> None:
    """Refuses a URL with a user or a password, without repeating it.

    Raises:
        UsageError: it has one: it would be in every message, and in files that are shared.
    """
    if _USERINFO.search(text):
        raise UsageError(
            "the URL of a store or registry",
            expected="no user and no password in it",
            found="text before an @, not repeated here",
            fix="take it out; credentials come from AWS_* variables",
        )


def canonical_store(place: str) -> str:
    """The absolute folder, or `s3://bucket[/prefix]`, that a text stands for; nothing is opened.

    A link in a folder's path is kept: who moves a registry and leaves a link has not made another.

    Raises:
        UsageError: another kind of URL, a user or password in it, or parts that would be dropped.
    """
    if not is_store_url(place):
        scheme = place.partition(":")[0].lower()
        if scheme in ("file", "s3") and ":" in place:
            raise _refused(place, "no // behind the colon", f"write {scheme}://, or ./{place}")
        return _folder(place)
    check_no_secret(place)
    scheme, host, path = _parts(place)
    if scheme == "file" and host in ("", "localhost"):
        return _folder(unquote(path, errors="surrogateescape"))
    if scheme != "s3":
        raise _refused(place, f"scheme {scheme!r}", "correct the URL")
    if not _BUCKET.fullmatch(host):
        raise _refused(place, f"bucket {host!r}" if host else "no bucket", "name one that exists")
    return f"s3://{host}{path.removesuffix('/')}"


def _folder(text: str) -> str:
    path = Path(text).absolute()
    if ".." in path.parts:  # what is above a link is not what is written before it
        depth = len(path.parts) - path.parts[::-1].index("..")
        path = Path(os.path.realpath(Path(*path.parts[:depth])), *path.parts[depth:])
    return "/" + str(path).lstrip("/")


def _parts(url: str) -> tuple[str, str, str]:
    """Scheme, host and path; what two clients could read in two ways, or drop, is refused."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise _refused(url, str(error), "correct the URL") from None
    if "?" in url or "#" in url:
        raise _refused(url, "a query or a fragment", "leave it out")
    is_dotted = any(segment in (".", "..") for segment in parts.path.split("/"))
    if is_dotted or "//" in parts.path or not url.isprintable():
        raise _refused(url, "an empty or dotted part, or no plain text", "write its path once")
    return parts.scheme, parts.netloc, parts.path


def _refused(url: str, found: str, fix: str) -> UsageError:
    return UsageError(
        f"store {url.partition('?')[0]!r}",  # a query may hold a token
        expected="a folder, file:///folder or s3://bucket/prefix",
        found=found,
        fix=fix,
    )
