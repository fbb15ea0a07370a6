"""The one form of a registry's URL, and references behind it.

Floors, cached references and the scope of roots go by that form, so two ways to write one place are
one registry. What would be dropped or could be read in two ways is refused.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from specctl.errors import RegistryError, UsageError
from specctl.registry.layout import MARKER
from specctl.registry.names import Reference, parse_reference
from specctl.stores import canonical_store, check_no_secret, is_store_url

SCHEMES = ("file", "s3", "oci")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?")
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(/{_PART})*")
"""As the OCI distribution specification has it: lower case, no empty parts."""
_OCI = "oci://host/repository?log=<folder or s3://bucket/prefix>"


@dataclass(frozen=True)
class RegistryPlace:
    """Where a registry is.

    Attributes:
        url: in its one form, which opens it again.
        store: of its logs, as `canonical_store` has it.
        oci: `oci://host/repository` of its content; None where that is in the store.
    """

    url: str
    store: str
    oci: str | None = None


def parse_place(place: str | Path) -> RegistryPlace:
    """What a text says of where a registry is; nothing is opened.

    Raises:
        UsageError: a URL of another kind, a mistyped one, or one that holds a password.
    """
    text = str(place)
    check_no_secret(text)
    scheme = _scheme(text)
    if scheme == "oci":
        return _oci_place(text)
    store = canonical_store(text)
    return RegistryPlace(store, store)


def registry_url(place: str | Path) -> str:
    """The URL that a registry's floors, cached references and roots go by.

    Raises:
        UsageError: see `parse_place`.
    """
    return parse_place(place).url


def split_reference(text: str) -> tuple[str, Reference] | None:
    """A registry's place and a reference in it, from `PLACE/REFERENCE`; None for other text.

    The last segment is the reference; the part before it is a URL, or a folder with a
    `registry.json`. Of OCI, `oci://host/repo/REFERENCE?log=STORE` says the same as
    `oci://host/repo?log=STORE/REFERENCE`.

    Raises:
        UsageError: a URL that holds a password.
    """
    check_no_secret(text)
    head, mark, query = text.partition("?") if is_oci(text) else (text, "", "")
    if _names_policy(query) and not _names_policy(head):
        place, slash, last = text.rpartition("/")
    else:
        place, slash, last = head.rpartition("/")
        place += mark + query
    if not slash or not (is_store_url(place) or os.path.exists(f"{place}/{MARKER}")):
        return None
    try:
        return place, parse_reference(last)
    except RegistryError:
        return None


def is_oci(text: str) -> bool:
    """Whether a text is a registry's URL whose content is in an OCI registry."""
    return text[:6].lower() == "oci://"


def _names_policy(path: str) -> bool:
    """Whether the last segment can only be a reference: no repository has a plus or an @."""
    return bool({"+", "@"} & set(path.rpartition("/")[2]))


def _scheme(place: str) -> str | None:
    """The scheme of a URL, None for a folder; what no registry has is refused."""
    found = _SCHEME.match(place)
    scheme = found[1].lower() if found else ""
    if is_store_url(place) and scheme not in SCHEMES:
        raise _refused(place, f"scheme {scheme!r}", "correct the URL")
    if scheme in SCHEMES and not is_store_url(place):
        slashes = "///" if scheme == "file" else "//"
        meant = f"{scheme}:{slashes}{place.partition(':')[2].lstrip('/')}"
        fix = f"write {meant}, or a folder as ./{place}"
        raise _refused(place, "no // behind the colon", fix)
    return scheme if is_store_url(place) else None


def _oci_place(text: str) -> RegistryPlace:
    head, _, query = text.partition("?")
    host, _, repository = head[len("oci://") :].partition("/")
    repository = repository.removesuffix("/")
    if not _HOST.fullmatch(host) or not _REPOSITORY.fullmatch(repository):
        raise _bad_oci(text, "no such host or repository", "name both, the second in lower case")
    url, store = f"oci://{host.lower()}/{repository}", canonical_store(_log_of(text, query))
    log = quote(store, safe="/:@+=,", errors="surrogateescape")
    return RegistryPlace(f"{url}?log={log}", store, url)


def _log_of(text: str, query: str) -> str:
    """The store that a query names; %XX is a byte of it, and + is a plus."""
    name, _, log = query.partition("=")
    if name != "log" or not log:
        fix = "name one store for the logs: OCI tags move, so aliases cannot live there"
        raise _bad_oci(text, "no log" if not query else "another query", fix)
    if {"&", "?", "#"} & set(log):
        raise _bad_oci(text, "more than one log", "write %26, %3F and %23 for &, ? and # in a path")
    return unquote(log, errors="surrogateescape")


def _bad_oci(text: str, found: str, fix: str) -> UsageError:
    return UsageError(_named(text), expected=_OCI, found=found, fix=fix)


def _refused(place: str, found: str, fix: str) -> UsageError:
    return UsageError(
        _named(place),
        expected="a folder, file:///folder, s3://bucket/prefix or oci://host/repository?log=STORE",
        found=found,
        fix=fix,
    )


def _named(text: str) -> str:
    """For a message: without a query, which may hold a token."""
    return f"registry {text.partition('?')[0]!r}"
