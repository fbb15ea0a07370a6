"""Why a version was refused: by what its bytes are, for good, or by what may pass, for a while."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from specctl.errors import ArtifactError, SpecctlError, UsageError

MAX_BACKOFF = 6
"""Doublings of the wait before a failure that may pass is tried again: at most 64 intervals."""
PASSING = frozenset({"E_COST", "E_MISSING", "E_DIGEST", "E_SIZE", "E_FILETYPE", "E_SIG", "E_STALE"})
"""Refusals that the machine, a copy that is not finished, a key or the clock may be the reason of,
and not the artifact's bytes."""


@dataclass(frozen=True)
class Refusal:
    """Of one version.

    Attributes:
        key: of the version (`sources.Version`); None where it is not known which one there is.
        num_tries: how often in a row it was tried and failed.
        not_before_s: when it may be tried again, on the monotonic clock; infinite for never.
    """

    key: Hashable
    error: Exception
    num_tries: int
    not_before_s: float

    def stands(self, key: Hashable, now_s: float) -> bool:
        """Whether a version is not to be tried now."""
        return self.key == key and now_s < self.not_before_s


def refusal_of(
    key: Hashable, error: Exception, before: Refusal | None, interval_s: float, now_s: float
) -> Refusal:
    """What follows from a look, a load or a reload that failed: a bad version that takes long to
    refuse must not be paid for at every round.

    Args:
        before: the last refusal, of this version or of another.
        interval_s: the first wait; each further one is twice as long.
    """
    num_before = before.num_tries if before is not None and before.key == key else 0
    wait_s = interval_s * 2 ** min(num_before, MAX_BACKOFF)
    return Refusal(key, error, num_before + 1, math.inf if is_final(error) else now_s + wait_s)


def is_final(error: Exception) -> bool:
    """Whether a refusal is of the artifact's own bytes, and so will be the same again."""
    if isinstance(error, ArtifactError):
        return error.code not in PASSING
    return isinstance(error, SpecctlError) and error.exit_code == UsageError.exit_code
