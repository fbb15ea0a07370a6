"""`tune.json`: the outcome of a search, judged on held-out prompts; its table and its sentences."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from specctl.formatting import Detail, Table, count, listed, pair_title
from specctl.replay.facts import MARKED_BELOW, PLAIN, ResultRecord, TraceFacts, why_plain
from specctl.replay.ladder.result import SideSizes
from specctl.replay.tune.contexts import LoadLengths, context_table
from specctl.replay.tune.evaluators import Objective
from specctl.stats import Interval, Number, intervals_over

RESULT_NAME, POLICY_FOLDER = "tune.json", "policy"
"""In the folder that a search writes."""
LONGEST_LABEL = 20
"""Characters of a policy in a table of 80 columns."""


def _short_name(family: str) -> str:
    """`c2t+echo` of `fits/c2t/+echo:max_tokens=8`."""
    return "+".join(
        part.strip("/").rpartition("/")[2].partition(":")[0] for part in family.split("+")
    )


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
    time_error: float | None = None  # see `TraceFacts`
    # the baseline, the best of each family, and plain decoding unless it is the baseline
    policies: tuple[Standing, ...] = Field(min_length=1)

    def standing(self, policy: str) -> Standing:
        """One finalist by its label."""
        return next(found for found in self.policies if found.policy == policy)

    @property
    def names(self) -> dict[str, str]:
        """Short names of the finalists: a long label becomes the family and `:…`, with a number
        where several finalists would have that name."""
        names: dict[str, str] = {}
        for one in self.policies:
            name = one.policy
            if len(name) > LONGEST_LABEL:
                name = f"{_short_name(one.family)}:…"
                alike = sum(known.startswith(name) for known in names.values())
                name += f" #{alike + 1}" if alike else ""
            names[one.policy] = name
        return names

    def sentence(self) -> str:
        """The written setting, against the best static setting and against plain decoding."""
        if self.chosen == PLAIN:
            return f"Plain decoding is kept. {self.why_plain()}"
        held_out, name = self.standing(self.chosen).held_out, self.names[self.chosen]
        plain, parts = held_out.against_plain, [f"Best: {name}"]
        if self.chosen != self.baseline:
            parts.append(f"× {held_out.against.text('.3f')} of the best static")
            parts += [f"× {plain.value:.2f} of plain"] if plain.known else []
        elif plain.known:
            parts.append(f"× {plain.text('.2f')} of plain decoding")
        else:  # of goodput
            parts.append("and plain decoding keeps no request within the limit")
        return f"{', '.join(parts)}."

    def why_plain(self) -> str:
        """The reason for plain decoding, where it is chosen."""
        takes_part = self.beats_static or self.baseline == PLAIN
        drafts = self.winner_on_train if takes_part else self.baseline
        if drafts == PLAIN:
            return "No setting is faster, even on training prompts."
        gains = {p.policy: p.held_out.against_plain for p in self.policies if p.policy != PLAIN}
        return why_plain(self.names[drafts], gains[drafts], gains.values(), self.time_error)

    def why_static(self, *, all_can_win: bool) -> str:
        """The reason for the best static setting, where policies were searched beside it."""
        if self.winner_on_train == self.baseline:
            which = "policy" if all_can_win else "policy that can win"
            return f"No {which} beats {self.baseline} even on training prompts."
        gain = self.standing(self.winner_on_train).held_out.against.text(".3f")
        return (
            f"{self.names[self.winner_on_train]}, the best on training prompts, is × {gain} of "
            f"{self.baseline}, the best static setting: no gain beyond the interval."
        )

    def untested(self, may_win: Callable[[str], bool]) -> str:
        """A sentence on finalists that are ahead and were not tested, as another was the best on
        training prompts; empty without one."""
        tested = (self.winner_on_train, self.baseline, PLAIN)
        ahead = [
            p for p in self.policies if p.is_ahead and p.policy not in tested and may_win(p.policy)
        ]
        if not ahead:
            return ""
        options = " ".join(f"--family {shlex.quote(p.family)}" for p in ahead)
        return (
            f"{listed(self.names[p.policy] for p in ahead)}: above 1, but looked at afterwards, "
            f"among {len(self.policies)} rows, which is no test. Test on fresh prompts: `specctl "
            f"tune FRESH_TRACES {options} --cost-model COST_MODEL -o again`."
        )


class TuneResult(TuneVerdict, TraceFacts):
    """`tune.json`."""

    omitted: ClassVar[tuple[str, ...]] = ("fits", "for_engine", *TraceFacts.omitted)

    kind: Literal["tune"]
    cost_device: str | None  # of the times; None for stated rates
    load: TunedLoad
    config: dict[str, Any]  # of the search
    is_simulated: bool
    approximations: str  # source of the times, in words
    by_context: tuple[LoadLengths, ...]  # empty where all texts are alike
    for_engine: str | None = None  # engine of the searched policies; None for our own loop
    fits: tuple[FitOutcome, ...] | None = None  # of `fit auto`

    def sentence(self) -> str:
        """The verdict with what it takes for granted, and the error of a clock that failed its own
        check."""
        free = self.provisos(self.chosen).replace(self.chosen, self.names[self.chosen])
        said = f"{super().sentence().removesuffix('.')}{free}."
        if self.check_error is None:
            return said
        return f"{said} The clock was off by {self.check_error:+.0%} in its own check."

    def reasons(self) -> Iterator[str]:
        """The verdict's reasons, and the source of its times."""
        searched = any(one.policy not in (self.baseline, PLAIN) for one in self.policies)
        if searched and not self.beats_static and self.baseline != PLAIN:
            yield self.why_static(all_can_win=all(self.can_win(p.policy) for p in self.policies))
            if untested := self.untested(self.can_win):
                yield untested
        if self.clock is not None:
            yield f"Times: {self.clock}."


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
    arrivals, num_held_out = result.load.arrival_rate_per_s, result.num_prompts.held_out
    offered = f"{arrivals:g} requests/s, " if arrivals else ""
    of = "" if result.for_engine is None else f"for {result.for_engine}: "
    title = (
        f"{pair_title(result.target, result.drafter)}\n{of}"
        f"{result.objective.kind}, {offered}batch size {result.load.batch_size}; "
        f"{num_held_out} held-out prompts, {intervals_over(num_held_out)}"
    )
    rows = [finalist_cells(result, one) for one in result.policies]
    legend = "; ".join(f"{name}: {label}" for label, name in result.names.items() if name != label)
    return Table(title, COLUMNS, rows, legend, wide=("train", "verified", "TPOT ms", "support"))


def finalist_cells(result: TuneResult, standing: Standing) -> tuple[str, ...]:
    """Cells of `COLUMNS`; rates in tokens/s, intervals of 95% by prompt."""
    held_out, label = standing.held_out, standing.policy
    return (
        result.names[label] + result.marks(label) + ("" if held_out.is_supported else "*"),
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
    """The verdict's reasons, what was searched, and what its figures leave out."""
    yield from result.reasons()
    too_large = sum(family.num_out_of_range for family in result.families)
    lacking = sum(family.num_unsupported for family in result.families)
    not_run = sum(family.num_not_run or 0 for family in result.families)
    left_out = {
        "are larger than the log's trees": too_large,
        "need expansions that the log lacks": lacking,
        "of the grid are of other engines": not_run,
    }
    others = [f"{number:,} {why}" for why, number in left_out.items() if number]
    yield "; ".join([f"Tried {count(result.num_settings, 'setting')}", *others]) + "."
    if result.for_engine == "vllm" and result.rungs:  # rules take part, not fixed settings alone
        yield (
            "The time that a rule itself takes inside the engine is not counted "
            "(docs/vllm.md, What it costs)."
        )
    yield Detail(f"On held-out prompts: {result.objective.meaning}; × is paired by prompt.")
    if result.rungs:
        rungs = (f"{r.num_settings} on {r.num_prompts} prompts" for r in result.rungs)
        yield Detail(f"Successive halving: {', '.join(rungs)}.")
    yield Detail(result.approximations)
    if not all(standing.held_out.is_supported for standing in result.policies):
        yield "* the log lacks over 1% of the expansions that it needs on held-out prompts."
    yield from result.footnotes()
    if result.left_out:
        yield f"Left out, as the log holds none of their settings: {listed(result.left_out)}."
    for fit in result.fits or ():
        yield fit.sentence() if fit.refusal else Detail(fit.sentence())


def tune_parts(result: TuneResult) -> list[Any]:
    """The result for a terminal, the verdict first."""
    by_context = [context_table(result.by_context)] if result.by_context else []
    return [result.sentence(), result_table(result), *by_context, *tune_notes(result)]
