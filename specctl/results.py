"""Result records: figures that a verb writes as JSON and that `report` reads back.

`replay.json`, `ladder.json` and `tune.json` are one record each; `TraceFigures` are the figures of
a report on traces. NaN stands for a figure that is not defined, and is null in JSON.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from specctl.formatting import count
from specctl.stats import Interval, Number

MARKED_BELOW = 0.99
"""A figure whose support is under this share is marked, and given with bounds where possible."""


class ResultRecord(BaseModel):
    """Frozen and strict: a field that is unknown, missing or of another type is refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    omitted: ClassVar[tuple[str, ...]] = ()
    """Fields that are not written where they are None."""

    @model_serializer(mode="wrap")
    def _without_omitted(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = write(self)
        return {k: v for k, v in found.items() if v is not None or k not in self.omitted}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return self.model_dump(mode="json")


class PairFacts(ResultRecord):
    """The pair and the traces that figures hold for; `sampling`: temperature, top_k, top_p."""

    traces_digest: str
    target: str
    drafter: str
    target_digest: str
    drafter_digest: str | None
    sampling: dict[str, Any]


class TraceFacts(PairFacts):
    """The pair and the dense traces that figures hold for.

    Attributes:
        support: of the log. cost_model: digest, None where nothing was timed.
        clock: whose times these are, their error and what they are not, in words.
        time_error: relative standard error of a policy's time, which all intervals of times hold;
            None where it is not known.
        check_error: of a clock that failed its own check, by how much its speed was off.
        untimed: policies whose own decisions are not in these times, by label; with the words by
            which `profile --policy` times them.
        prompts_digest: of the ids of the prompts that were scored, see `prompts_digest`.
        num_prompts_left_out: that are not scored, because a policy was fitted on them.
        scored_on_training_prompts: labels of policies that were fitted on some of those that are.
    """

    omitted: ClassVar[tuple[str, ...]] = (
        "time_error",
        "check_error",
        "untimed",
        "prompts_digest",
        "num_prompts_left_out",
        "scored_on_training_prompts",
    )

    specctl_version: str
    support: dict[str, int | bool]
    cost_model: str | None
    clock: str | None
    time_error: float | None = None
    check_error: float | None = None
    untimed: dict[str, str] | None = None
    prompts_digest: str | None = None
    num_prompts_left_out: int | None = None
    scored_on_training_prompts: tuple[str, ...] | None = None

    def is_unseen(self, label: str) -> bool:
        """Whether a policy was fitted on none of the prompts that are scored."""
        return label not in (self.scored_on_training_prompts or ())

    def can_win(self, label: str) -> bool:
        """Whether a policy may be called the fastest."""
        return self.is_unseen(label) and label not in (self.untimed or ())

    def marks(self, label: str) -> str:
        """The marks of a policy, which `footnotes` explain."""
        return TRAINED * (not self.is_unseen(label)) + UNTIMED * (label in (self.untimed or ()))

    def marked(self, label: str) -> str:
        """The label with its marks."""
        return label + self.marks(label)

    def footnotes(self) -> Iterator[str]:
        """Sentences on the prompts that were left out, and on each mark."""
        if self.num_prompts_left_out:
            out = count(self.num_prompts_left_out, "prompt")
            yield f"{out} left out: a policy here was fitted on them (--all-prompts scores them)."
        if self.scored_on_training_prompts:
            yield f"{TRAINED} fitted on some of these prompts, which flatters it: it cannot win."
        if self.untimed:
            yield f"{UNTIMED} its own decisions cost nothing on this clock, so it cannot win; " + (
                to_time(self.untimed)
            )


TRAINED = "†"
"""Marks a policy that is scored on prompts that it was fitted on."""
UNTIMED = "‡"
"""Marks a policy whose own decisions are not in the times."""


def to_time(untimed: Mapping[str, str]) -> str:
    """The command that times the decisions of policies, by label, with the words for each."""
    options = " ".join(f"--policy {words}" for words in dict.fromkeys(untimed.values()))
    return f"time them: specctl profile {options} -o cost_model.json"


def prompts_digest(prompt_ids: Iterable[str]) -> str:
    """`sha256:<hex>` of ids in any order: figures of one digest are of the same prompts."""
    text = "\n".join(sorted(prompt_ids)).encode()
    return f"sha256:{hashlib.sha256(text).hexdigest()}"


# ------------------------------------------------------------------------------------- replay


class Bound(ResultRecord):
    """Least and most that a figure can be, whatever the log lacks."""

    low: Number
    high: Number


class PolicyFigures(ResultRecord):
    """Figures of one policy on one group of requests.

    Attributes:
        policy: its label. group: `all` or a category.
        num_tokens: emitted by rounds, so without the one that each prompt's reading gives.
        histogram: rounds by accepted draft tokens, from 0 on.
        tcr_quantiles: of rounds with an accepted token: quantile to rank.
        expansion_support: share of the wanted expansions that the log contains.
        censored_share: share of rounds whose accepted path reaches what the log lacks.
        is_marked: the log supports less than 99% of what the policy needs.
        ratios: see `replay.score.RATIOS`; times are absent without a cost model.
        bounds: of calls, verified tokens and tau.
        against: ratios to the baseline's calls, verified tokens and time, paired by prompt.
    """

    policy: str
    group: str
    num_prompts: int
    num_requests: int
    num_tokens: int
    calls: int
    verified_tokens: int
    num_accepted: int
    drafted_levels: int
    time_us: float | None
    histogram: tuple[int, ...]
    tcr_quantiles: dict[str, int]
    expansion_support: float
    censored_share: float
    is_marked: bool
    ratios: dict[str, Interval]
    bounds: dict[str, Bound]
    against: dict[str, Interval]

    @property
    def tau(self) -> Interval:
        """Mean acceptance length, tokens per call."""
        return self.ratios["mean_acceptance_length"]

    @property
    def tokens_per_s(self) -> Interval | None:
        """None without a cost model."""
        return self.ratios.get("tokens_per_s")


class PolicyScores(ResultRecord):
    """One policy: all requests pooled, and each category."""

    policy: str
    pooled: PolicyFigures
    by_category: tuple[PolicyFigures, ...]


class ReplayScores(TraceFacts):
    """`replay.json`: policies replayed one request at a time; `baseline` is one's label."""

    kind: Literal["replay"]
    baseline: str
    policies: tuple[PolicyScores, ...] = Field(min_length=1)


# ------------------------------------------------------------------------------------- ladder

RungKind = Literal[
    "plain", "chain", "tree", "policy", "features", "oracle", "clairvoyant", "ceiling"
]
RUNNABLE: tuple[RungKind, ...] = ("plain", "chain", "tree", "policy")
"""Rungs that can be run; the others are limits."""


class Rung(ResultRecord):
    """A rung of the ladder; all rungs are measured on the same resamples of prompts.

    Attributes:
        label: unique. setting: what was tuned, in words.
        time_us: machine time of all requests, see `replay.ladder.LoadClock`.
        tokens_per_s, mean_acceptance_length: pooled, sums over sums.
        against_static: tokens/s over those of the best static rung. against_plain: over those of
            plain decoding.
        gap_closed: (R - R_static) / (R_prob - R_static); None where the oracle's lead over the
            static rung is not above 0 at both ends of its interval.
        policy_regret: R_feat - R, tokens/s; None of a limit.
        support: share of the wanted expansions and rounds that the log contains.
        is_estimate: it rests on a fitted model, and is no bound in itself.
    """

    kind: RungKind
    label: str
    setting: str
    num_tokens: int
    calls: int
    verified_tokens: int
    num_accepted: int
    drafted_levels: int
    time_us: float
    tokens_per_s: Interval
    mean_acceptance_length: Interval
    against_static: Interval
    against_plain: Interval
    gap_closed: Interval | None
    policy_regret: Interval | None
    support: float
    is_marked: bool
    is_estimate: bool


class LossSplit(ResultRecord):
    """Where the rate between the best static rung and the clairvoyant is lost, tokens/s.

    Attributes:
        irreducible: R_clair - R_prob, known from the outcome alone.
        drafter: R_prob - R_feat, known to the target and not to the drafter's features.
        headroom: R_prob / R_static - 1, a share: the most that any policy can gain.
    """

    irreducible: Interval
    drafter: Interval
    headroom: Interval


class ProbabilityQuality(ResultRecord):
    """Quality of acceptance probabilities on nodes that they were not fitted on.

    Attributes:
        log_loss: nats a node. calibration_error: ECE over equal-mass bins; chance alone keeps it
            above 0. base_rate: share accepted.
    """

    num_nodes: int
    log_loss: float
    calibration_error: float
    base_rate: float


class SideSizes(ResultRecord):
    """Prompts on each side of a split."""

    train: int
    held_out: int


class Ladder(ResultRecord):
    """All rungs of one log at one load.

    Attributes:
        rungs: from plain decoding to the ceiling. best_static: label of the faster static rung.
        calibration: by estimate, on held-out prompts.
        oracle_features: used by the estimate of R_prob.
        is_sampled: texts were sampled, so R_prob uses the target's distribution at depth 1.
    """

    rungs: tuple[Rung, ...] = Field(min_length=1)
    best_static: str
    split: LossSplit
    calibration: dict[str, ProbabilityQuality]
    oracle_features: tuple[str, ...]
    num_prompts: SideSizes
    batch_size: int
    is_sampled: bool
    config: dict[str, Any]

    def rung(self, label: str) -> Rung:
        """One rung by its label."""
        return next(rung for rung in self.rungs if rung.label == label)


class LadderResult(Ladder, TraceFacts):
    """`ladder.json`."""

    kind: Literal["ladder"]

    @property
    def fastest(self) -> Rung:
        """The fastest rung that can be run, of those that can win."""
        found = [r for r in self.rungs if r.kind in RUNNABLE and self.can_win(r.label)]
        return max(found, key=lambda rung: rung.tokens_per_s.value)


# --------------------------------------------------------------------------------------- tune


class TunedLoad(ResultRecord):
    """Requests decoded together at most, and requests per second where they arrive by the clock."""

    batch_size: int
    arrival_rate_per_s: float | None


class TunedObjective(ResultRecord):
    """The rate that was maximised; `meaning` in words."""

    kind: Literal["latency", "throughput", "goodput"]
    tpot_limit_us: float | None
    meaning: str


class FitOutcome(ResultRecord):
    """One fit of `fit auto`: an artifact, or the reason why there is none."""

    fit: str
    artifact_digest: str | None
    refusal: str | None

    def sentence(self) -> str:
        """The outcome in words."""
        return f"fit {self.fit}: {self.refusal or f'artifact {self.artifact_digest}'}"


class HalvingRung(ResultRecord):
    """One rung of the successive halving."""

    num_prompts: int
    num_settings: int


class FamilySearch(ResultRecord):
    """The outcome of searching the grid of one family.

    Attributes:
        num_settings: scored. num_contradictory: points of the grid that are no policy.
        num_beyond: left out, deeper or wider than the log.
        num_unsupported: scored, and left out because the log lacks over 1% of the expansions.
        num_not_run: left out, as the engine that is tuned for does not run them; None without one.
    """

    omitted: ClassVar[tuple[str, ...]] = ("num_not_run",)

    family: str
    num_settings: int
    num_contradictory: int
    num_beyond: int
    num_unsupported: int
    num_not_run: int | None = None


class TrainStanding(ResultRecord):
    """A finalist on the training prompts, where it was picked: no evidence. Rates in tokens/s."""

    rate: Number
    against: Number
    num_rounds: int
    support: float


class HeldOutStanding(ResultRecord):
    """A finalist on held-out prompts.

    Attributes:
        rate: of the objective, tokens/s. against: over the baseline's, paired; against_plain: over
            plain decoding's. lead: rate less the baseline's, tokens/s, paired.
        good_share: of tokens, within the limit on TPOT; None without a limit.
    """

    omitted: ClassVar[tuple[str, ...]] = ("good_share",)

    rate: Interval
    against: Interval
    against_plain: Interval
    lead: Interval
    tokens_per_s: Interval
    tpot_us: Interval
    mean_acceptance_length: Interval
    verified_per_call: Interval
    levels_per_call: Interval
    good_share: Interval | None = None
    num_rounds: int
    support: float

    @property
    def is_supported(self) -> bool:
        """The log holds enough of the wanted expansions to score it."""
        return self.support >= MARKED_BELOW

    @property
    def pays(self) -> bool:
        """Faster than plain decoding by more than its interval, or plain decoding keeps no request
        within the limit."""
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


PLAIN = "ar"
"""Label of plain decoding."""


class TuneVerdict(ResultRecord):
    """The outcome of a search, judged on held-out prompts.

    Attributes:
        chosen: label of the policy that is written: the winner if it is ahead on held-out prompts,
            else the baseline, the best static setting; plain decoding where neither beats that.
        rungs: of the halving. num_runs: orders of requests behind a finalist's figures.
        left_out: families of which the log supports nothing.
        policies: the baseline first, then the best of each family, and plain decoding where it is
            not the baseline.
    """

    objective: TunedObjective
    chosen: str
    beats_static: bool
    baseline: str
    winner_on_train: str
    num_settings: int
    num_prompts: SideSizes
    num_runs: int
    rungs: tuple[HalvingRung, ...]
    families: tuple[FamilySearch, ...]
    left_out: tuple[str, ...]
    policies: tuple[Standing, ...] = Field(min_length=1)

    def standing(self, policy: str) -> Standing:
        """One finalist by its label."""
        return next(found for found in self.policies if found.policy == policy)

    def sentence(self, *, all_can_win: bool = True) -> str:
        """The verdict in words: beside the best static setting, and beside plain decoding."""
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
        """The chosen setting beside plain decoding, or the reason why that is chosen."""
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
    """`tune.json`.

    Attributes:
        cost_device: of the times; None where they are stated.
        config: of the search. approximations: how times came about, in words.
        for_engine: whose policies alone were searched; None: our own loop.
        fits: of `fit auto`.
    """

    omitted: ClassVar[tuple[str, ...]] = ("fits", "for_engine", *TraceFacts.omitted)

    kind: Literal["tune"]
    cost_device: str | None
    load: TunedLoad
    config: dict[str, Any]
    is_simulated: bool
    approximations: str
    for_engine: str | None = None
    fits: tuple[FitOutcome, ...] | None = None

    def sentence(self, *, all_can_win: bool = True) -> str:
        """The verdict with the clock that it holds on."""
        all_can_win = all_can_win and all(self.can_win(one.policy) for one in self.policies)
        return f"On {self.clock}: {super().sentence(all_can_win=all_can_win)}"


# ------------------------------------------------------------------------------ measured runs


class RunPaired(ResultRecord):
    """A policy beside plain decoding, prompt by prompt; see `runtime.compare.Paired`."""

    speedup: Interval
    num_turns: int
    p_value: float
    verdict: str


class RunPolicy(ResultRecord):
    """One policy of `results.json`, as measured: the figures that a page shows."""

    model_config = ConfigDict(extra="ignore")

    policy: str
    num_tokens: int
    calls: int
    verified_tokens: int
    mean_acceptance_length: float
    tokens_per_s: float
    equal_to_ar: bool | None
    artifact_digest: str | None
    paired: RunPaired | None


class RunPair(ResultRecord):
    """The pair that was run."""

    model_config = ConfigDict(extra="ignore")

    target: str
    drafter: str
    target_digest: str
    drafter_digest: str


class RunFacts(ResultRecord):
    """`run.json`: the conditions of the runs beside it."""

    model_config = ConfigDict(extra="ignore")

    pair: RunPair
    num_prompts: int
    device: str
    dtype: str
    num_threads: int
    batch_size: int
    max_new_tokens: int
    waiting_frac: float | None
    verdict: str


class RunScores(ResultRecord):
    """`results.json` of `specctl run`, with the `run.json` beside it."""

    policies: tuple[RunPolicy, ...] = Field(min_length=1)
    facts: RunFacts


# ------------------------------------------------------------------------------ drift


class DriftPair(RunPair):
    """The pair that served."""


class DriftPrompt(ResultRecord):
    """A unit of the watch: its place from 0, its first prompt, and when that was finished, UTC."""

    index: int
    prompt_id: str
    finished: str | None


class DriftSignal(ResultRecord):
    """A signal before the likeliest start of its change and since; `most_wealth`: its evidence."""

    group: str
    signal: str
    moved: bool
    wealth: Number
    most_wealth: Number
    since: DriftPrompt
    before: Interval
    after: Interval


class DriftEvidence(ResultRecord):
    """Logarithms to base 10 of the evidence at some units, by group; `all` together."""

    index: tuple[int, ...]
    log10: dict[str, tuple[Number, ...]]


class DriftScores(ResultRecord):
    """`drift.json` of `specctl drift`.

    Attributes:
        alpha: bound on the probability of a false alarm.
        unit: that ranks are of. num_reference, num_units: of them; num_prompts: in the watch.
        price: what the change costs, `words` of it for people; None where it was not asked for.
    """

    kind: Literal["drift"]
    pair: DriftPair
    policy: str
    traces: tuple[str, ...]
    reference: tuple[str, ...] | None
    alarm: bool
    alpha: float
    unit: str
    num_reference: int
    num_units: int
    num_prompts: int
    wealth: Number
    most_wealth: Number
    alarm_at: DriftPrompt | None
    evidence: DriftEvidence
    signals: tuple[DriftSignal, ...]
    price: dict[str, Any] | None


# ------------------------------------------------------------------------------ cost and traces


class CostFacts(ResultRecord):
    """A cost model in the words of a report.

    Attributes:
        hardware, provenance: in words. warnings: e.g. that it has expired.
    """

    digest: str
    hardware: str
    provenance: str
    warnings: tuple[str, ...]


class DepthAcceptance(ResultRecord):
    """Acceptance at depth d of one group of rounds.

    Attributes:
        num_at_risk, num_accepted: rounds. num_censored: rounds that reached d - 1 and were not
            seen at d, because the text ended or the tree did.
        conditional_prob: accepted at d, given accepted at d - 1. marginal_prob: accepted at d.
    """

    depth: int
    num_at_risk: int
    num_accepted: int
    num_censored: int
    conditional_prob: Interval
    marginal_prob: Interval


class CategoryFigures(ResultRecord):
    """One category of prompts.

    Attributes:
        num_rounds: of the reference rounds. tau: tokens.
        depths: acceptance of drafts in its rounds (dense: at its positions).
    """

    name: str
    num_prompts: int
    num_rounds: int
    tau: Interval
    depths: tuple[DepthAcceptance, ...]


class TraceFigures(PairFacts):
    """The figures of a report on one trace set.

    Attributes:
        num_rows: rounds, or positions of dense traces. num_nodes: drafted, roots excluded.
        support, tree: of dense traces; None of live ones. `tree` is the static tree, as on the
            command line, that was replayed for the reference rounds.
        num_reference, num_unsupported: reference rounds, and those of which the log lacks an
            expansion.
    """

    kind: Literal["dense", "live"]
    num_prompts: int
    num_rows: int
    num_nodes: int
    support: dict[str, int | bool] | None
    tree: str | None
    num_reference: int
    num_unsupported: int
    tau: Interval
    depths: tuple[DepthAcceptance, ...]
    categories: tuple[CategoryFigures, ...]
