"""The objective of tuning, and the sums of settings on some prompts: exact for one request at a
time, or of simulated batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from specctl.errors import UsageError
from specctl.logs.positions import Floats
from specctl.logs.tree_log import DenseLog
from specctl.policy import Policy
from specctl.progress import advance
from specctl.replay.batch_simulation import Load, Packing, Simulation, simulate_runs
from specctl.replay.cost.model import CostModel
from specctl.replay.facts import ResultRecord
from specctl.replay.metrics import Columns, LoadClock, Sums, Totals, by_prompt, ratio, replayed_sums
from specctl.replay.static import static_submissions
from specctl.replay.submissions import Submissions, shares, submissions_of
from specctl.stats import sums_by

Kind = Literal["latency", "throughput", "goodput"]
RATES: dict[Kind, tuple[str, str]] = {
    "latency": ("request_tokens_per_s", "tokens/s that a request sees, 1 / TPOT"),
    "throughput": ("tokens_per_s", "tokens/s of the machine while it works"),
    "goodput": ("good_tokens_per_s", "tokens/s of requests within the TPOT limit"),
}
"""The maximised figure, of `metrics.RATIOS`, and its meaning."""
FIGURES = (
    *("tokens_per_s", "tpot_us", "mean_acceptance_length", "verified_per_call", "levels_per_call"),
    "good_share",
)
"""Reported besides the rate."""


class Objective(ResultRecord):
    """A rate to maximise."""

    kind: Kind
    # time per output token after the first, of a whole request; of goodput alone
    tpot_limit_us: float | None
    meaning: str  # in words

    def rate(self, totals: Totals) -> Floats:
        """Tokens per second."""
        return ratio(RATES[self.kind][0], totals)

    def complete(
        self, columns: Columns, request_us: Floats | None = None, wall_us: Floats | None = None
    ) -> Columns:
        """Sums of requests with the columns of objectives: `decoded`, `request_us`, `wall_us` and
        `good_tokens`, 0 without a limit.

        Args:
            request_us: `[M]` from first to last token. wall_us: `[M]` shares of the run's duration.
                None: the time of its rounds, for requests that run one after another.
        """
        tokens, time_us = columns["tokens"], columns["time_us"]
        waited = time_us if request_us is None else request_us
        limit = np.nan if self.tpot_limit_us is None else self.tpot_limit_us
        return columns | {
            "decoded": tokens,
            "request_us": waited,
            "wall_us": time_us if wall_us is None else wall_us,
            "good_tokens": np.where(waited <= limit * tokens, tokens, 0.0),
        }


def make_objective(kind: Kind = "latency", tpot_limit_ms: float | None = None) -> Objective:
    """The objective that a user named."""
    if kind == "goodput" and tpot_limit_ms is None:
        raise UsageError("--objective goodput needs a limit: --tpot-limit-ms")
    if kind != "goodput" and tpot_limit_ms is not None:
        raise UsageError(f"--tpot-limit-ms goes with goodput alone, not with --objective {kind}")
    if tpot_limit_ms is not None and not 0 < tpot_limit_ms < float("inf"):
        raise UsageError(f"--tpot-limit-ms must be above 0, not {tpot_limit_ms}")
    limit_us = None if tpot_limit_ms is None else 1e3 * tpot_limit_ms
    return Objective(kind=kind, tpot_limit_us=limit_us, meaning=RATES[kind][1])


# ------------------------------------------------------------------------------- evaluations

Evaluator = Callable[..., list[Sums]]
"""From policies, prompts and a number of runs to sums, see `LogEvaluator.__call__`."""


@dataclass(frozen=True)
class LogEvaluator:
    """Scores settings by replay.

    Without a load, requests run one after another, and times are of rounds, as in `specctl replay`.
    Under a load, batches are simulated from the first request to the last. All settings serve the
    same requests in the same order, so sums are paired by prompt and run. A step's time, the
    reading of prompts included, is shared equally by its requests.
    """

    log: DenseLog
    model: CostModel
    objective: Objective
    load: Load | None = None
    packing: Packing = "ragged"
    seed: int = 0  # of the order of requests and of their arrivals

    def __call__(
        self, policies: Sequence[Policy], prompts: Sequence[str], num_runs: int = 1
    ) -> list[Sums]:
        """Sums of every policy on some prompts; `settings` progress.

        Args:
            num_runs: U, in different orders of requests; 1 without a load.

        Returns:
            `U * P` rows: run after run, prompts in the given order.
        """
        log = self.log.only(prompts)
        if self.load is None:
            assert num_runs == 1, "every run would be the same"
            alone = replayed_sums(log, policies, LoadClock(self.model), self.objective.complete)
            return [sums.select(prompts) for sums in alone]
        found: dict[int, Sums] = {}
        for indices, of in self._submitted(policies, log):
            for index in indices:
                runs = simulate_runs(
                    of,
                    self.load,
                    self.model,
                    num_runs=num_runs,
                    seed=self.seed,
                    budget=policies[index].budget,
                    packing=self.packing,
                )
                each = []
                for run in runs:
                    columns = simulated_sums(run, self.objective)
                    each.append(by_prompt(of.positions, columns, run.logged).select(prompts))
                    advance("settings")
                rows, groups = tuple(prompts) * num_runs, each[0].groups * num_runs
                table = np.concatenate([one.table for one in each])
                found[index] = Sums(rows, groups, each[0].names, table)
        return [found[index] for index in range(len(policies))]

    def _submitted(
        self, policies: Sequence[Policy], log: DenseLog
    ) -> Iterator[tuple[list[int], Submissions]]:
        """Indices of the policies of one shape, and the submissions of that shape.

        They take 24 bytes a position for each shape; a shape under a budget also takes 24 bytes a
        node, and is in memory alone."""
        others = dict(enumerate(policies))
        for index, of in static_submissions(log, policies):
            del others[index]
            yield [index], of
        alone: dict[str, list[int]] = {}
        shared: dict[str, list[int]] = {}
        for index, policy in others.items():
            groups = shared if shares(policy) else alone
            groups.setdefault(policy.shape.model_dump_json(), []).append(index)
        for together in (list(alone.values()), *([group] for group in shared.values())):
            firsts = [policies[group[0]] for group in together]
            yield from zip(together, submissions_of(log, firsts) if firsts else (), strict=True)


def simulated_sums(run: Simulation, objective: Objective) -> Columns:
    """`[M]` sums of the requests of a run."""
    rounds, times, outcomes = run.rounds, run.timeline, run.outcomes
    share_us = (times.end_us - times.start_us) / rounds.scheduled
    of_round: dict[str, Any] = {
        "calls": np.ones(len(rounds.row)),
        "tokens": run.emitted,
        "accepted": rounds.accepted,
        "verified": rounds.verified,
        "levels": outcomes.levels,
        "wanted": outcomes.wanted,
        "missing": outcomes.missing,
        "censored": outcomes.censored,
        "time_us": share_us[rounds.step],
    }
    sums = sums_by(rounds.serial, len(run.logged), [*of_round.values()])
    columns = dict(zip(of_round, sums.T, strict=True))
    # vLLM reads prompts in a shared forward; their requests decode after it.
    read_us = np.where(rounds.prompt_tokens > 0, share_us, 0.0)
    columns["time_us"] = columns["time_us"] + np.repeat(read_us, rounds.num_joined)
    request_us = times.finish_us - times.first_token_us
    duration_us = float(times.end_us[-1] - times.start_us[0])
    is_closed = run.load.arrival_rate_per_s is None
    share = None if is_closed else np.full(len(request_us), duration_us / len(request_us))
    return objective.complete(columns, request_us, share)
