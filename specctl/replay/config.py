"""Options of `specctl replay`, `ladder` and `tune`, and how their progress is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

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


class ReplayConfig(BaseModel):
    """Policies, a load and how to score."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policies: tuple[str, ...] = Field(
        description="Names with settings, or artifact folders; an entry may hold several, "
        "separated by commas."
    )
    cost_model: Path | None = Field(
        None, description="Adds times to the counts; a load on dense traces needs it."
    )
    baseline: int = Field(1, description="Which policy the others are compared with, from 1.")
    by_category: bool = Field(False, description="Also a table for each category.")
    batch_size: int = Field(
        1,
        description="Prompts decoded together at most; above 1 the batch is simulated. An import "
        "runs in waves, each until it is empty.",
    )
    arrival_rate_per_s: float | None = Field(
        None, description="Requests per second, of dense traces; none for a closed loop."
    )
    tpot_limit_ms: float | None = Field(
        None, description="Goodput of a simulated batch: time per output token, ms."
    )
    drafters: tuple[str, ...] = Field((), description="Drafters of an import; none for all.")
    k_table: str | None = Field(
        None,
        description="Draft tokens by batch size for an import, first to last size and tokens, "
        "e.g. '[[1,4,5],[5,64,1]]'.",
    )
    seed: int = Field(0, description="Seed of the bootstrap and of the load.")
    num_threads: int = Field(
        1, description="Chunks of a log in flight; each computes with one thread."
    )

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


class LadderConfig(BaseModel):
    """How a ladder is made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    held_out_frac: float = Field(
        0.5, description="Share of prompts that are measured, not tuned on, in (0, 1)."
    )
    seed: int = Field(0, ge=0, description="Seed of the split by prompt, the fits and intervals.")
    num_kept: int = Field(63, ge=1, description="Draft nodes of a tuned tree at most.")
    num_nodes: int = Field(200_000, ge=1, description="Labelled nodes of the estimates at most.")
    num_folds: int = Field(4, ge=2, description="Folds of the oracle's cross-fitting.")


class TuneConfig(BaseModel):
    """How a search for settings is made; words are judged when it is prepared."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    families: tuple[str, ...] = Field(
        (), description="Policies whose settings are searched, or artifact folders."
    )
    grids: tuple[str, ...] = Field(
        (), description="Values of a setting, field=v1,v2, in place of the stated ones."
    )
    batch_size: int = Field(1, description="Prompts decoded together at most: slots.")
    arrival_rate_per_s: float | None = Field(
        None, description="Requests per second, Poisson; default: a closed loop, always full."
    )
    objective: str = Field("latency", description="latency, throughput or goodput.")
    tpot_limit_ms: float | None = Field(
        None, description="Time per output token of a good request, ms."
    )
    packing: str = Field(
        "ragged", description="Verification of unequal trees: ragged (back to back) or padded."
    )
    held_out_frac: float = Field(0.2, description="Share of prompts held out, in (0, 1).")
    seed: int = Field(0, ge=0, description="Seed of the split, the halving, the load, intervals.")
    factor: int = Field(3, ge=2, description="Halving: prompts grow and settings shrink by it.")
    drops_unsupported: bool = Field(
        False, description="Leaves out a family of which the log supports nothing."
    )


def check_held_out(share: float) -> None:
    """Raises `UsageError` unless the share leaves prompts on both sides."""
    if not 0 < share < 1:
        raise UsageError(
            "--held-out",
            expected="a share of prompts between 0 and 1, both excluded",
            found=str(share),
            fix="leave prompts on both sides",
        )
