"""What `specctl replay` is asked, and how its progress is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from specctl.errors import UsageError

Tick = Callable[..., None]
"""Called with how much was done, by default 1."""
ShowProgress = Callable[[str, int], AbstractContextManager[Tick]]
"""From what is counted and how many there are; `console.progress` is one."""


@contextmanager
def no_progress(label: str, total: int) -> Iterator[Tick]:
    """Shows nothing."""
    del label, total
    yield lambda _=1: None


@dataclass(frozen=True)
class ReplayConfig:
    """Policies, a load and how to score.

    Attributes:
        policies: names with settings, or artifact folders; an entry may hold several, separated
            by commas.
        cost_model: adds times to the counts; a load on dense traces needs it.
        baseline: 1-based number of the policy that the others are compared with.
        by_category: also a table for each category.
        batch_size: requests decoded together at most.
        arrival_rate_per_s, tpot_limit_ms: of a load on dense traces; None for a closed loop and
            no goodput.
        drafters: of imported traces; none for all.
        k_table: of imported traces, draft tokens by batch size, `[[1, 4, 5], [5, 64, 1]]`.
        seed: of the bootstrap and of the load.
        num_threads: chunks of a log in flight; each computes with one thread.
    """

    policies: tuple[str, ...]
    cost_model: Path | None = None
    baseline: int = 1
    by_category: bool = False
    batch_size: int = 1
    arrival_rate_per_s: float | None = None
    tpot_limit_ms: float | None = None
    drafters: tuple[str, ...] = ()
    k_table: str | None = None
    seed: int = 0
    num_threads: int = 1

    @property
    def specs(self) -> list[str]:
        """One entry a policy."""
        return [word.strip() for entry in self.policies for word in entry.split(",")]

    @property
    def has_load(self) -> bool:
        """Whether requests meet, so that a batch is to be simulated."""
        return self.batch_size > 1 or self.arrival_rate_per_s is not None

    def check_baseline(self) -> None:
        """Raises `UsageError` unless the baseline is one of the policies."""
        if not 1 <= self.baseline <= len(self.specs):
            raise UsageError(
                "--baseline",
                expected=f"1 to {len(self.specs)}, the policies given",
                found=str(self.baseline),
                fix="count the --policy options from 1",
            )


def refuse_ignored(given: dict[str, bool], *, expected: str, found: str) -> None:
    """Refuses an option that would be ignored.

    Args:
        given: by option, whether it was given. expected, found: what it takes, and what is there.

    Raises:
        UsageError: naming the first of them.
    """
    for flag, is_given in given.items():
        if is_given:
            raise UsageError(flag, expected=expected, found=found, fix=f"leave {flag} out")


def check_held_out(share: float) -> None:
    """Raises `UsageError` unless the share leaves prompts on both sides."""
    if not 0 < share < 1:
        raise UsageError(
            "--held-out",
            expected="a share of prompts between 0 and 1, both excluded",
            found=str(share),
            fix="leave prompts on both sides",
        )
