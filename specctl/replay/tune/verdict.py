"""`tune.json`: the outcome of a search, judged on held-out prompts; its table and its sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from specctl.formatting import Table, fixture_note
from specctl.replay.facts import MARKED_BELOW, PLAIN, ResultRecord, TraceFacts
from specctl.replay.ladder.result import SideSizes
from specctl.replay.tune.contexts import ContextLength
from specctl.replay.tune.evaluators import Objective
from specctl.stats import Interval, Number, intervals_over

RESULT_NAME, POLICY_FOLDER = "tune.json", "policy"
"""In the folder that a search writes."""


class TunedLoad(ResultRecord):
    """Requests decoded together at most, and requests per second; None for a closed loop."""

    batch_size: int
    arrival_rate_per_s: float | None


class FitOutcome(ResultRecord):
    """One fit of `fit auto`: its artifact, or the reason for none."""

    fit: str
    artifact_digest: str | None
    refusal: str | None

    def sentence(self) -> str:
        return f"fit {self.fit}: {self.refusal or f'artifact {self.artifact_digest}'}"


class HalvingRung(ResultRecord):
    """One rung of the successive halving."""

    num_prompts: int
    num_settings: int


class FamilySearch(ResultRecord):
    """The outcome of searching the grid of one family."""

    omitted: ClassVar[tuple[str, ...]] = ("num_not_run",)

    family: str
    num_settings: int  # scored
    num_out_of_range: int  # left out, deeper or wider than the log
    num_unsupported: int  # scored and left out, as the log lacks over 1% of the expansions
    num_not_run: int | None = None  # left out, as the engine does not run them; None without one


class TrainStanding(ResultRecord):
    """A finalist on the training prompts that chose it; no evidence. Rates in tokens/s."""

    rate: Number
    against: Number
    num_rounds: int
    support: float


class HeldOutStanding(ResultRecord):
    """A finalist on held-out prompts."""

    omitted: ClassVar[tuple[str, ...]] = ("good_share",)

    rate: Interval  # of the objective, tokens/s
    against: Interval  # over the baseline's, paired
    against_plain: Interval  # over plain decoding's
    lead: Interval  # rate less the baseline's, tokens/s, paired
    tokens_per_s: Interval
    tpot_us: Interval
    mean_acceptance_length: Interval
    verified_per_call: Interval
    levels_per_call: Interval
    good_share: Interval | None = None  # of tokens, within the limit on TPOT; None without a limit
    num_rounds: int
    support: float

    @property
    def is_supported(self) -> bool:
        """Whether the log supports its figures."""
        return self.support >= MARKED_BELOW

    @property
    def pays(self) -> bool:
        """Whether it beats plain decoding by more than its interval, or plain decoding keeps no
        request within the limit."""
        return not self.against_plain.known or self.against_plain.low > 1


class Standing(ResultRecord):
    """A finalist. `record` is the policy; `is_ahead`: faster than the baseline by more than its
    interval."""

    policy: str
    family: str
    record: dict[str, Any]
    is_ahead: bool
    train: TrainStanding
    held_out: HeldOutStanding


class TuneVerdict(ResultRecord):
    """The outcome of a search, judged on held-out prompts."""

    objective: Objective
    # label of the written policy: the winner if it is ahead on held-out prompts, else the baseline,
    # the best static setting; plain decoding if neither beats it
    chosen: str
    beats_static: bool
    baseline: str
    winner_on_train: str
    num_settings: int
    num_prompts: SideSizes
    num_runs: int  # orders of requests behind a finalist's figures
    rungs: tuple[HalvingRung, ...]  # of the halving
    families: tuple[FamilySearch, ...]
    left_out: tuple[str, ...]  # families without a supported setting
    # the baseline, the best of each family, and plain decoding unless it is the baseline
    policies: tuple[Standing, ...] = Field(min_length=1)

    def standing(self, policy: str) -> Standing:
        """One finalist by its label."""
        return next(found for found in self.policies if found.policy == policy)

    def sentence(self, *, all_can_win: bool = True) -> str:
        """The verdict in words: against the best static setting and against plain decoding."""
        return f"{self._beside_static(all_can_win)} {self.beside_plain()}"

    def _beside_static(self, all_can_win: bool) -> str:  # noqa: FBT001
        if not any(one.policy not in (self.baseline, PLAIN) for one in self.policies):
            return f"{self.baseline} is the best of {self.num_settings} static settings."
        if self.winner_on_train == self.baseline:
            none = "No family" if all_can_win else "No family that can win"
            return (
                f"{none} beats the best static setting, {self.baseline}, even on training prompts."
            )
        gain = self.standing(self.winner_on_train).held_out.against.text(".3f")
        of = f"{self.num_settings} settings" if all_can_win else "the settings that can win"
        picked = f"{self.winner_on_train}, the best of {of} on training prompts,"
        if self.beats_static:
            return (
                f"{picked} beats the best static setting, {self.baseline}, on held-out ones: "
                f"× {gain}."
            )
        return (
            f"{picked} does not beat the best static setting, {self.baseline}, by more than its "
            f"interval on held-out ones: × {gain}."
            + (" The static setting is written." if self.chosen == self.baseline != PLAIN else "")
        )

    def beside_plain(self) -> str:
        """The chosen setting against plain decoding, or the reason for plain decoding."""
        is_plain = self.chosen == PLAIN
        drafts = self.winner_on_train if self.beats_static else self.baseline
        if is_plain and drafts == PLAIN:
            return "Drafting does not pay here: plain decoding is the fastest."
        gain = self.standing(drafts if is_plain else self.chosen).held_out.against_plain
        if not gain.known:  # of goodput
            return "Plain decoding keeps no request within the limit."
        if is_plain:
            return (
                f"Drafting does not pay here: {drafts} is × {gain.text('.2f')} as fast as plain "
                "decoding, which is no gain beyond chance. Plain decoding is written."
            )
        return f"{self.chosen} is × {gain.text('.2f')} as fast as plain decoding."


class TuneResult(TuneVerdict, TraceFacts):
    """`tune.json`."""

    omitted: ClassVar[tuple[str, ...]] = ("fits", "for_engine", *TraceFacts.omitted)

    kind: Literal["tune"]
    cost_device: str | None  # of the times; None for stated rates
    load: TunedLoad
    config: dict[str, Any]  # of the search
    is_simulated: bool
    approximations: str  # source of the times, in words
    by_context: tuple[ContextLength, ...]  # empty where all texts are alike
    for_engine: str | None = None  # engine of the searched policies; None for our own loop
    fits: tuple[FitOutcome, ...] | None = None  # of `fit auto`

    def sentence(self, *, all_can_win: bool = True) -> str:
        """The verdict with its clock."""
        all_can_win = all_can_win and all(self.can_win(one.policy) for one in self.policies)
        return f"On {self.clock}: {super().sentence(all_can_win=all_can_win)}"


# ----------------------------------------------------------------------------------- in words

COLUMNS = (
    "policy",
    "train",
    "tokens/s",
    "× plain",
    "× static",
    "τ",
    "verified",
    "TPOT ms",
    "support",
)


def result_table(result: TuneResult) -> Table:
    """One row a finalist: its training rate, and its figures on held-out prompts."""
    arrivals, note = result.load.arrival_rate_per_s, fixture_note(result.target)
    offered = f"{arrivals:g} requests/s, " if arrivals else ""
    title = (
        f"{result.target} + {result.drafter}: {result.objective.kind}, {offered}batch size "
        f"{result.load.batch_size}; {result.num_prompts.train} training and "
        f"{result.num_prompts.held_out} held-out prompts; "
        + intervals_over(result.num_prompts.held_out)
        + (f" ({note})" if note else "")
    )
    wide = ("train", "verified", "TPOT ms", "support")
    return Table(
        title, COLUMNS, [finalist_cells(result, one) for one in result.policies], wide=wide
    )


def finalist_cells(result: TuneResult, standing: Standing) -> tuple[str, ...]:
    """Cells of `COLUMNS`; rates in tokens/s, intervals of 95% by prompt."""
    held_out = standing.held_out
    return (
        result.marked(standing.policy) + ("" if held_out.is_supported else "*"),
        f"{standing.train.rate:.1f}",
        held_out.rate.text(".0f" if held_out.rate.value >= 100 else ".1f"),
        held_out.against_plain.text(".2f"),
        held_out.against.text(".2f"),
        f"{held_out.mean_acceptance_length.value:.2f}",
        f"{held_out.verified_per_call.value:.1f}",
        f"{held_out.tpot_us.value / 1e3:.2f}",
        f"{held_out.support:.2%}",
    )


def tune_notes(result: TuneResult) -> Iterator[str]:
    """The search in words."""
    too_large = sum(family.num_out_of_range for family in result.families)
    lacking = sum(family.num_unsupported for family in result.families)
    not_run = sum(family.num_not_run or 0 for family in result.families)
    rungs = ", ".join(f"{r.num_settings} on {r.num_prompts} prompts" for r in result.rungs)
    yield f"On held-out prompts: {result.objective.meaning}; × is paired by prompt."
    yield (
        f"{result.num_settings} settings were scored on training prompts; "
        f"{too_large} more exceed the log's trees, {lacking} need expansions that it lacks."
    )
    if result.for_engine is not None:
        yield f"Searched for {result.for_engine}, which does not run {not_run} more settings."
        if result.rungs:  # rules take part, not fixed settings alone
            yield (
                "The time that a rule itself takes inside the engine is not counted "
                "(docs/vllm.md, What it costs)."
            )
    yield f"Halving: {rungs or 'none, static settings alone'}."
    yield result.approximations
    if not all(standing.held_out.is_supported for standing in result.policies):
        yield "* the log lacks over 1% of the expansions that it needs on held-out prompts."
    yield from result.footnotes()
    for family in result.left_out:
        yield f"{family}: left out, the log lacks over 1% of the expansions of each setting."
    for fit in result.fits or ():
        yield fit.sentence()
