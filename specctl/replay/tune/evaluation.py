"""What a setting did on some prompts, and who finds out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specctl.logs.positions import Floats, Ints
from specctl.policy import Policy
from specctl.policy.records import Chain, PerRequest, StaticTree
from specctl.replay.tune.objective import column
from specctl.results import MARKED_BELOW
from specctl.stats import sums_by


@dataclass(frozen=True)
class Evaluation:
    """One policy on P prompts, U times.

    Attributes:
        sums: `[U * P, S]`, columns `objective.SUMS`; run after run, prompts in the order in which
            they were given.
        support: share of what it asked that the log contains, as `Figures.is_marked` takes it.
    """

    sums: Floats
    support: float

    @property
    def is_supported(self) -> bool:
        """Whether the log tells enough to score it."""
        return self.support >= MARKED_BELOW

    @property
    def num_rounds(self) -> int:
        """Decoding rounds of all prompts and runs."""
        return int(column(self.sums, "calls").sum())


class Evaluator(Protocol):
    """Scores policies on some prompts of a log; it never reads any other."""

    def __call__(
        self, policies: Sequence[Policy], prompts: Sequence[str], num_runs: int = 1
    ) -> list[Evaluation]:
        """One evaluation a policy, in order. Equal arguments give equal results.

        Args:
            num_runs: U, in different orders of requests; 1 where the order changes nothing.
        """
        ...


def is_static(policy: Policy) -> bool:
    """Whether a summary of the log tells all about it."""
    return isinstance(policy.shape, Chain | StaticTree) and isinstance(policy.budget, PerRequest)


def by_prompt(
    prompt_ids: Sequence[str], codes: Ints, sums: Floats, prompts: Sequence[str]
) -> Floats:
    """`[P, S]` from sums `[M, S]` of requests.

    Args:
        codes: `[M]`, the prompt of each request, into `prompt_ids`.
    """
    place = {prompt: index for index, prompt in enumerate(prompts)}
    rows = np.array([place.get(name, -1) for name in prompt_ids])[codes]
    return sums_by(rows, len(prompts), sums)
