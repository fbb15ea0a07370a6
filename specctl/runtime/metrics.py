"""Counters of decoding, per request and pooled, and the stopwatch that splits a round."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from specctl.runtime.observe import RoundTimes

if TYPE_CHECKING:  # the command line starts without it
    import torch

PHASES = ("draft", "verify", "policy", "other")


class Stopwatch:
    """Splits a round into phases: `lap(phase)` ends one.

    On a CUDA device a lap ends at an event on the stream, so times are the device's own, and
    nothing waits until they are read.

    Args:
        device: whose work is timed; None times the host.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._on_cuda = device is not None and device.type == "cuda"
        self._phases: list[str] = []
        self._marks: list[Any] = []
        self._mark()

    def lap(self, phase: str) -> None:
        """Books the time since the last lap under `phase`."""
        self._phases.append(phase)
        self._mark()

    def laps(self) -> dict[str, list[float]]:
        """Microseconds of every lap, in order, by phase; waits for the last of them."""
        if self._on_cuda:
            self._marks[-1].synchronize()
        found: dict[str, list[float]] = {}
        for phase, (start, end) in zip(self._phases, pairwise(self._marks), strict=True):
            us = 1e3 * start.elapsed_time(end) if self._on_cuda else 1e6 * (end - start)
            found.setdefault(phase, []).append(us)
        return found

    def times(self) -> RoundTimes:
        """Sums by phase; a commit is the drafter's reading, so it is drafting."""
        sums = {phase: sum(times) for phase, times in self.laps().items()}
        draft_us = sums.get("draft", 0.0) + sums.get("commit", 0.0)
        return RoundTimes(draft_us, *(sums.get(phase, 0.0) for phase in PHASES[1:]))

    def _mark(self) -> None:
        if not self._on_cuda:
            self._marks.append(time.perf_counter())
            return
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)


@dataclass
class Metrics:
    """Counts and times that add up: pooled metrics are sums of requests' metrics.

    Attributes:
        num_requests: requests counted.
        num_tokens: tokens emitted, the one that prefill gives included.
        calls: target verification forwards that the requests took part in. A batched forward
            counts once per request, so that the number does not depend on the batch.
        verified_tokens: tokens the target processed in verification, roots included.
        num_accepted: draft tokens accepted and emitted.
        drafted_levels: levels drafted for the requests.
        fallback_calls: of the calls, those whose tree a static plan chose because the policy
            failed.
        draft_us, verify_us, policy_us, other_us: wall time of rounds, shared equally by the
            requests of a batch.
        prefill_us: wall time of reading prompts, target and drafter together.
    """

    num_requests: int = 0
    num_tokens: int = 0
    calls: int = 0
    verified_tokens: int = 0
    num_accepted: int = 0
    drafted_levels: int = 0
    fallback_calls: int = 0
    draft_us: float = 0.0
    verify_us: float = 0.0
    policy_us: float = 0.0
    other_us: float = 0.0
    prefill_us: float = 0.0
    accepted_lengths: list[int] = field(default_factory=list)

    @property
    def mean_acceptance_length(self) -> float:
        """τ = 1 + accepted draft tokens per call, pooled; NaN without a call."""
        return 1 + self.num_accepted / self.calls if self.calls else float("nan")

    @property
    def wall_us(self) -> float:
        """Prefill and rounds together."""
        return self.draft_us + self.verify_us + self.policy_us + self.other_us + self.prefill_us

    @property
    def tokens_per_s(self) -> float:
        """Tokens emitted over wall time, prompts' reading included: Σ tokens / Σ time."""
        return 1e6 * self.num_tokens / self.wall_us if self.wall_us else float("nan")

    def add_round(
        self,
        *,
        verified: int,
        accepted: int,
        emitted: int,
        levels: int,
        is_fallback: bool = False,
    ) -> None:
        """Books one round of one request."""
        self.calls += 1
        self.verified_tokens += verified
        self.num_accepted += accepted
        self.num_tokens += emitted
        self.drafted_levels += levels
        self.fallback_calls += is_fallback
        self.accepted_lengths.append(accepted)

    def add_times(self, times: RoundTimes, share: int) -> None:
        """Books a round's time, which `share` requests split."""
        for phase in PHASES:
            key = f"{phase}_us"
            setattr(self, key, getattr(self, key) + getattr(times, key) / share)

    def summary(self) -> dict[str, float | int]:
        """Plain values for JSON, derived ones included."""
        plain = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name != "accepted_lengths"
        }
        return {
            **plain,
            "wall_us": self.wall_us,
            "mean_acceptance_length": self.mean_acceptance_length,
            "tokens_per_s": self.tokens_per_s,
        }


def pooled(parts: Iterable[Metrics]) -> Metrics:
    """The sum over requests."""
    total = Metrics()
    for part in parts:
        for item in fields(Metrics):
            setattr(total, item.name, getattr(total, item.name) + getattr(part, item.name))
    return total
