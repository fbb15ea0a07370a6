"""What users ask of a registry's verbs, in their words and units, checked before all else."""

from __future__ import annotations

import os

from specctl.artifacts.signing.records import is_glob
from specctl.errors import RegistryError, UsageError
from specctl.registry.garbage import MIN_GRACES
from specctl.registry.names import parse_digest
from specctl.registry.resolving import version_digest
from specctl.registry.room import Registry


def asked_version(registry: Registry, name: str, version: str) -> str:
    """`version_digest`; where a folder was meant, the refusal says how to name it.

    Raises:
        RegistryError: E_UNKNOWN_ALIAS, E_MISSING, E_NAME.
        ArtifactError: a folder that must not be loaded.
    """
    try:
        return version_digest(registry, name, version)
    except RegistryError as error:
        if error.code not in ("E_UNKNOWN_ALIAS", "E_NAME") or not os.path.isdir(version):
            raise
        raise RegistryError(
            error.code,
            f"{name}@{version}",
            expected="sha256:<hex>, an alias of the name, or a folder as ./FOLDER",
            found=error.found,
            fix=f"write ./{version} for the folder of that name",
        ) from None


def expected_digest(text: str | None) -> str | None:
    """What `--expect` says that an alias points to; None is nothing.

    Raises:
        UsageError: no digest. An alias might have moved, too, so it says nothing sure.
    """
    if text is None:
        return None
    try:
        return parse_digest(text)
    except RegistryError as error:
        raise UsageError(
            "--expect",
            expected="the digest that the alias points to, sha256:<64 lower-case hex digits>",
            found=error.found,
            fix="take it from `specctl registry show NAME --json`",
        ) from None


def check_name_pattern(text: str) -> str:
    """A pattern of names.

    Raises:
        UsageError: one that covers no name.
    """
    if is_glob(text):
        return text
    raise UsageError(
        "--names",
        expected="names, * for any text, of [a-z0-9._+@:-] and *, at most 256 characters",
        found=ascii(text)[:80],
        fix="correct it",
    )


def garbage_times_s(
    registry: Registry, grace_hours: float, retention_days: float, *, is_sweeping: bool
) -> tuple[float, float]:
    """Grace and retention in seconds.

    Raises:
        UsageError: a time below zero or none at all (nan); before a sweep, a grace that a
            publication could outlast.
    """
    for option, time in (("--grace", grace_hours), ("--retention-days", retention_days)):
        if not time >= 0:
            raise UsageError(
                option, expected="a time of 0 or more", found=f"{time:g}", fix="correct it"
            )
    least_s = MIN_GRACES * registry.marker.publish_limit_s
    if is_sweeping and grace_hours * 3600 < least_s:
        raise UsageError(
            "--grace",
            expected=f"at least {least_s / 3600:g} hours, {MIN_GRACES} times the longest "
            "publication here",
            found=f"{grace_hours:g} hours",
            fix="wait longer: a publication may be using what was marked",
        )
    return grace_hours * 3600, retention_days * 24 * 3600
