"""What the environment says of an S3 store, checked before obstore sees it: it panics on some."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from specctl.errors import UsageError

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ENDPOINT = re.compile(
    r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(:([0-9]{1,5}))?(/[\w./~-]*)?", re.A
)
_REGION = re.compile(r"[A-Za-z0-9_-]+")


def check_settings(options: Mapping[str, object]) -> None:
    """Refuses addresses that are none; empty variables are taken away, as they mean nothing.

    Args:
        options: those that go before the environment, e.g. `endpoint`.

    Raises:
        UsageError: it names the variable.
    """
    for name in (*ENDPOINTS, *REGIONS):
        if os.environ.get(name) == "":  # which obstore would take for an address
            del os.environ[name]
    found = {**os.environ, **{name: str(value) for name, value in options.items()}}
    for name in found.keys() & {*ENDPOINTS, "endpoint"}:
        _check_endpoint(name, found[name])
    for name in found.keys() & {*REGIONS, "region"}:
        if not _REGION.fullmatch(found[name]):
            raise _refused(name, "a region, e.g. us-east-1", found[name])


def _check_endpoint(name: str, endpoint: str) -> None:
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or int(match[3] or 0) > 65535:
        raise _refused(name, "http://host[:port] or https://host[:port]", endpoint)


def _refused(name: str, expected: str, value: str) -> UsageError:
    # An address with an @ holds a user, maybe a password.
    found = "text with an @, not repeated here" if "@" in value else repr(value)
    return UsageError(name, expected=expected, found=found, fix="correct it, or unset it")
