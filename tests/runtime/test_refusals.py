"""Refusals of versions: which are final, and how long the others stand."""

from __future__ import annotations

import math

import pytest

from specctl.errors import (
    ArtifactError,
    LossyPolicyError,
    RegistryError,
    SpecctlError,
    StoreError,
    UsageError,
)
from specctl.runtime.watching import Refusal, refusal_of

FACTS = {"expected": "this", "found": "that", "fix": "do so"}


def artifact_error(code: str) -> ArtifactError:
    return ArtifactError(code, "field", expected="this", found="that")


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (artifact_error("E_SCHEMA"), True),
        (artifact_error("E_SELFTEST"), True),
        (artifact_error("W_DOMAIN"), True),
        (UsageError("reload", **FACTS), True),
        (LossyPolicyError("reload", **FACTS), True),
        (artifact_error("E_COST"), False),  # memory that others took
        (artifact_error("E_DIGEST"), False),  # a copy that is not finished
        (artifact_error("E_MISSING"), False),
        (artifact_error("E_SIZE"), False),
        (artifact_error("E_FILETYPE"), False),  # a hard link beside a copy that is being made
        (artifact_error("E_SIG"), False),  # a key that is believed again
        (artifact_error("E_STALE"), False),  # an entry that was renewed
        (RegistryError("E_MISSING", "blob", **FACTS), False),
        (StoreError("team", **FACTS), False),
        (SpecctlError("other", **FACTS), False),
        (OSError("full"), False),
        (MemoryError(), False),
    ],
    ids=repr,
)
def test_what_is_of_the_bytes_is_final(error: Exception, *, is_final: bool) -> None:
    refusal = refusal_of("v1", error, None, 5.0, 100.0)
    assert refusal.not_before_s == (math.inf if is_final else 105.0)
    assert refusal.stands("v1", 104.9)
    assert refusal.stands("v1", 1e9) == is_final
    assert not refusal.stands("v2", 100.0)


def test_waits_double_up_to_64_intervals_for_one_version() -> None:
    before: Refusal | None = None
    waits = []
    for _ in range(9):
        before = refusal_of("v1", OSError(), before, 5.0, 100.0)
        waits.append(before.not_before_s - 100.0)
    assert waits == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 320.0, 320.0]
    assert refusal_of("v2", OSError(), before, 5.0, 100.0).not_before_s == 105.0
