"""One request at a time: exact replay, timed round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specctl.logs.positions import Floats
from specctl.logs.tree_log import DenseLog
from specctl.policy import Policy
from specctl.replay.ladder.tally import SUMS as TALLIED
from specctl.replay.ladder.tally import LoadClock, Tally, tally, tally_rounds
from specctl.replay.rounds import Rounds, replay
from specctl.replay.tune.evaluation import Evaluation, by_prompt, is_static
from specctl.replay.tune.objective import Objective
from specctl.replay.tune.statics import StaticDecision, static_decisions
from specctl.replay.walk import walk

POLICIES_A_PASS = 32
"""Policies replayed in one pass over the log: their rounds are in memory together."""


@dataclass(frozen=True)
class SequentialEvaluator:
    """Batch size 1, the next request waiting; times are of rounds, as `specctl replay` gives them.

    Attributes:
        clock: of batch size 1.
        on_setting: called as each policy is scored.
    """

    log: DenseLog
    clock: LoadClock
    objective: Objective
    num_threads: int = 1
    on_setting: Callable[[], None] = lambda: None

    def __call__(
        self, policies: Sequence[Policy], prompts: Sequence[str], num_runs: int = 1
    ) -> list[Evaluation]:
        assert num_runs == 1, "every run would be the same"
        part = self.log.only(prompts)
        found: dict[int, Evaluation] = {}
        static = [i for i, policy in enumerate(policies) if is_static(policy)]
        for one in static_decisions(part, [policies[i] for i in static], self.num_threads):
            found[static[one.index]] = self._static(one, prompts)
        others = [i for i in range(len(policies)) if i not in found]
        for first in range(0, len(others), POLICIES_A_PASS):
            group = others[first : first + POLICIES_A_PASS]
            of = [policies[i] for i in group]
            runs = replay(part, of, with_bounds=False, num_threads=self.num_threads)
            for index, run in zip(group, runs, strict=True):
                found[index] = self._replayed(run, prompts)
        return [found[index] for index in range(len(policies))]

    def _static(self, one: StaticDecision, prompts: Sequence[str]) -> Evaluation:
        positions = one.summary.positions
        visited = walk(positions, one.decided.accepted + 1)
        counted = self._sums(tally(positions, one.decided, self.clock))
        sums = by_prompt(positions.prompt_ids, positions.prompt, counted, prompts)
        self.on_setting()
        return Evaluation(sums, 1 - float(one.missing[visited].mean()))

    def _replayed(self, run: Rounds, prompts: Sequence[str]) -> Evaluation:
        asked, missing = run.outcomes.asked.sum(), run.outcomes.missing.sum()
        told = 1 - float(missing) / max(1.0, float(asked))
        support = min(told, 1 - float(run.outcomes.open.mean()))
        counted = self._sums(tally_rounds(run, self.clock))
        sums = by_prompt(run.prompt_ids, run.prompt, counted, prompts)
        self.on_setting()
        return Evaluation(sums, support)

    def _sums(self, tallied: Tally) -> Floats:
        """`[Q, S]`; alone on the machine, a request waits for its own rounds and nothing else."""
        named = dict(zip(TALLIED, tallied.sums.T, strict=True))
        tokens, time_us = named["tokens"], named["time_us"]
        good = tokens * self.objective.is_good(tokens, time_us)
        counts = [named[name] for name in ("calls", "tokens", "accepted", "verified")]
        return np.stack([*counts, time_us, time_us, time_us, good], 1)
