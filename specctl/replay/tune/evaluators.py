"""What tuning maximises, and scores of settings on some prompts: one request at a time, exactly, or
in simulated batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from specctl.errors import UsageError
from specctl.logs.positions import Floats, Ints, Positions
from specctl.logs.tree_log import DenseLog
from specctl.policy import Policy
from specctl.replay.batch_simulation import Load, Packing, Simulation, simulate_runs
from specctl.replay.cost.model import CostModel
from specctl.replay.facts import MARKED_BELOW
from specctl.replay.ladder.static import is_static, static_parts, static_submissions, tally_static
from specctl.replay.ladder.tally import (
    SUMS,
    LoadClock,
    RunningSums,
    column,
    tally_rounds,
    tokens_per_us,
)
from specctl.replay.outcomes import Outcomes
from specctl.replay.rounds import replay_parts
from specctl.replay.submissions import Submissions, shares, submissions_of
from specctl.stats import sums_by

Kind = Literal["latency", "throughput", "goodput"]
RATIOS: dict[Kind, tuple[str, str, str]] = {
    "latency": ("tokens", "request_us", "tokens/s that a request sees, 1 / TPOT"),
    "throughput": ("tokens", "time_us", "tokens/s of the machine while it works"),
    "goodput": ("good_tokens", "wall_us", "tokens/s of requests within the TPOT limit"),
}
"""Numerator, denominator and meaning; tokens per second, so more is better in all three."""
FIGURES: dict[str, Callable[[Floats], Floats]] = {
    "tokens_per_s": lambda s: 1e6 * tokens_per_us(s),
    "tpot_us": lambda s: column(s, "request_us") / column(s, "tokens"),
    "mean_acceptance_length": lambda s: 1 + column(s, "accepted") / column(s, "calls"),
    "verified_per_call": lambda s: column(s, "verified") / column(s, "calls"),
    "levels_per_call": lambda s: column(s, "levels") / column(s, "calls"),
    "good_share": lambda s: column(s, "good_tokens") / column(s, "tokens"),
}
"""Reported besides the rate; all of them ratios of sums."""
T = TypeVar("T")
POLICIES_A_PASS = 32
"""Policies or shapes decided in one pass over the log. Under a load 28 bytes a position each are in
memory together; a shape whose trees a budget looks at takes 24 bytes a node and has a pass of its
own."""


@dataclass(frozen=True)
class Objective:
    """A rate to maximise.

    Attributes:
        tpot_limit_us: time per output token after the first, of a whole request; goodput only.
    """

    kind: Kind = "latency"
    tpot_limit_us: float | None = None

    def rate(self, sums: Floats) -> Floats:
        """Tokens per second `[...]` of sums `[..., S]`."""
        above, below, _ = RATIOS[self.kind]
        return 1e6 * column(sums, above) / column(sums, below)

    def is_good(self, tokens: Floats, request_us: Floats) -> Floats:
        """`[Q]` 1.0 where a request is within the limit; 0.0 for all where there is none."""
        if self.tpot_limit_us is None:
            return np.zeros(len(tokens))
        return (request_us <= self.tpot_limit_us * tokens).astype(np.float64)

    def to_json(self) -> dict[str, Any]:
        """The fields of `results.TunedObjective`."""
        return {**vars(self), "meaning": RATIOS[self.kind][-1]}


def make_objective(kind: Kind, tpot_limit_ms: float | None) -> Objective:
    """The objective that a user named."""
    if (kind == "goodput") != (tpot_limit_ms is not None):
        found = "none" if tpot_limit_ms is None else f"one with --objective {kind}"
        raise refused(
            "--tpot-limit-ms", f"expected a limit with goodput alone, found {found}", "correct that"
        )
    if tpot_limit_ms is not None and not 0 < tpot_limit_ms < float("inf"):
        raise refused(
            "--tpot-limit-ms", f"expected milliseconds above 0, found {tpot_limit_ms}", "raise it"
        )
    return Objective(kind, None if tpot_limit_ms is None else 1e3 * tpot_limit_ms)


def refused(what: str, problem: str, fix: str) -> UsageError:
    """A refusal of what was typed."""
    return UsageError(f"{what}: {problem}", hint=fix)


# ------------------------------------------------------------------------------- evaluations


@dataclass(frozen=True)
class Evaluation:
    """One policy on P prompts, U times.

    Attributes:
        sums: `[U * P, S]`, columns `ladder.tally.SUMS`; run after run, prompts in the order in
            which they were given.
        support: share of the wanted expansions and rounds that the log contains.
    """

    sums: Floats
    support: float

    @property
    def is_supported(self) -> bool:
        """Whether the log holds enough to score it."""
        return self.support >= MARKED_BELOW

    @property
    def pooled(self) -> Evaluation:
        """The same with the sums of all prompts and runs in one row."""
        return replace(self, sums=self.sums.sum(0)[None])

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


def by_prompt(positions: Positions, codes: Ints, sums: Floats, prompts: Sequence[str]) -> Floats:
    """`[P, S]` from sums `[M, S]` of requests.

    Args:
        codes: `[M]`, the prompt of each request, into `positions.prompt_ids`.
    """
    place = {prompt: index for index, prompt in enumerate(prompts)}
    rows = np.array([place.get(name, -1) for name in positions.prompt_ids])[codes]
    return sums_by(rows, len(prompts), sums)


# -------------------------------------------------------------------------------- on a log

Scored = tuple[int, Positions, Ints, Floats, float]
"""Place of a policy, positions, prompt of each request, `[M, S]` sums of requests, support."""


@dataclass(frozen=True)
class LogEvaluator:
    """Scores by replay.

    Without a load, requests run one after another, and times are of rounds, as `specctl replay`
    gives them. Under a load, batches are simulated, from the first request to the last: all
    settings meet the same requests in the same order, so sums are paired by prompt and run, and a
    step's time, prompts read in it included, is shared equally by the requests in it.

    Attributes:
        packing: how a batch of unequal trees is verified, see `Packing`.
        seed: of the order of requests and of their arrivals.
        on_setting: called as each run of a policy is scored.
    """

    log: DenseLog
    model: CostModel
    objective: Objective
    load: Load | None = None
    packing: Packing = "ragged"
    seed: int = 0
    num_threads: int = 1
    on_setting: Callable[[], None] = lambda: None

    def __call__(
        self, policies: Sequence[Policy], prompts: Sequence[str], num_runs: int = 1
    ) -> list[Evaluation]:
        assert num_runs == 1 or self.load, "every run would be the same"
        log = self.log.only(prompts)
        if not self.load:
            return self._alone(policies, log, prompts)
        found: list[list[Evaluation]] = [[] for _ in policies]
        for index, positions, codes, sums, support in self._in_batches(policies, log, num_runs):
            found[index].append(Evaluation(by_prompt(positions, codes, sums, prompts), support))
        return [
            Evaluation(np.concatenate([run.sums for run in runs]), min(run.support for run in runs))
            for runs in found
        ]

    def _alone(
        self, policies: Sequence[Policy], log: DenseLog, prompts: Sequence[str]
    ) -> list[Evaluation]:
        """A request waits for its own rounds and nothing else. Only sums by prompt are kept."""
        place = {prompt: index for index, prompt in enumerate(prompts)}
        found = [RunningSums(len(prompts), len(SUMS)) for _ in policies]

        def add(index: int, positions: Positions, sums: Floats, rounds: Outcomes) -> None:
            tokens, time_us = column(sums, "tokens"), column(sums, "time_us")
            good = tokens * self.objective.is_good(tokens, time_us)
            groups = np.array([place.get(name, -1) for name in positions.prompt_ids])
            whole = np.column_stack([sums, time_us, time_us, good])
            found[index].add(groups[positions.prompt], whole, rounds)

        clock, threads = LoadClock(self.model), self.num_threads
        for index, of in static_parts(log, policies, threads):
            add(index, of.positions, *tally_static(of, clock))
        for _ in filter(is_static, policies):
            self.on_setting()
        others = [index for index, policy in enumerate(policies) if not is_static(policy)]
        for group in _passes(others):
            wanted = [policies[index] for index in group]
            for runs in replay_parts(log, wanted, with_bounds=False, num_threads=threads):
                for index, run in zip(group, runs, strict=True):
                    add(index, run.positions, tally_rounds(run, clock), run.outcomes)
            for _ in group:
                self.on_setting()
        return [Evaluation(one.sums, one.support) for one in found]

    def _in_batches(
        self, policies: Sequence[Policy], log: DenseLog, num_runs: int
    ) -> Iterator[Scored]:
        assert self.load is not None
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
                    on_run=self.on_setting,
                )
                for run in runs:
                    sums, codes = request_sums(run, self.objective), of.positions.prompt[run.logged]
                    support = run.outcomes.support
                    yield index, of.positions, codes, sums, support

    def _submitted(
        self, policies: Sequence[Policy], log: DenseLog
    ) -> Iterator[tuple[list[int], Submissions]]:
        """Places of policies of one shape, with the submissions of that shape."""
        others = dict(enumerate(policies))
        for index, of in static_submissions(log, policies, self.num_threads):
            del others[index]
            yield [index], of
        alone: dict[str, list[int]] = {}
        shared: dict[str, list[int]] = {}
        for index, policy in others.items():
            groups = shared if shares(policy) else alone
            drafts = policy.shape.model_dump_json()
            groups.setdefault(drafts, []).append(index)
        for together in (*_passes(list(alone.values())), *([group] for group in shared.values())):
            firsts = [policies[group[0]] for group in together]
            found = submissions_of(log, firsts, num_threads=self.num_threads)
            yield from zip(together, found, strict=True)


def _passes(items: list[T]) -> Iterator[list[T]]:
    return (items[at : at + POLICIES_A_PASS] for at in range(0, len(items), POLICIES_A_PASS))


def request_sums(run: Simulation, objective: Objective) -> Floats:
    """`[M, S]`, columns `ladder.tally.SUMS`, of the M requests of a run."""
    rounds, times = run.rounds, run.timeline
    share_us = (times.end_us - times.start_us) / rounds.scheduled
    levels, row_us = run.outcomes.levels, share_us[rounds.step]
    counts = (np.ones(len(rounds.row)), run.emitted, rounds.accepted, rounds.verified, levels)
    sums = sums_by(rounds.serial, len(run.logged), np.column_stack([*counts, row_us]))
    # Of vLLM, whose requests share the forward that reads their prompts and decode after it.
    read_us = np.where(rounds.prompt_tokens > 0, share_us, 0.0)
    sums[:, -1] += np.repeat(read_us, rounds.num_joined)
    tokens, time_us = column(sums, "tokens"), column(sums, "time_us")
    request_us = times.finish_us - times.first_token_us
    duration_us = float(times.end_us[-1] - times.start_us[0])
    wall_us = time_us if run.load.is_closed else np.full_like(time_us, duration_us / len(time_us))
    good = tokens * objective.is_good(tokens, request_us)
    return np.column_stack([sums, request_us, wall_us, good])
