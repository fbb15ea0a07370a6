"""Refits a deployed policy on recent traffic and publishes it if it is better.

The recent prompts are split. One side fits and chooses; on the other the new policy is compared
with the deployed one and with the best static setting, prompt by prompt. It becomes a candidate if
it is faster than both by more than the interval. In place of a static setting, the best static one
becomes it where it is faster than the deployed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specctl.artifacts.manifest import Manifest
from specctl.engines.export import engine_options
from specctl.errors import UsageError
from specctl.formatting import Table
from specctl.logs.trace_set import TraceSet, domain_of
from specctl.policy import Policy, Strict, as_chain, policy_digest
from specctl.policy.families import family_of, parse_policy
from specctl.records import Record, canonical_json
from specctl.replay.config import TuneConfig
from specctl.replay.cost.files import decision_facts
from specctl.replay.facts import MARKED_BELOW, PLAIN, to_time
from specctl.replay.metrics import Measure
from specctl.replay.rounds import check_held
from specctl.replay.static import is_static
from specctl.replay.tune.candidates import STATIC
from specctl.replay.tune.tuning import Tuned, Tuning, prepare, publish
from specctl.replay.tune.verdict import TuneResult
from specctl.runtime.words import NamedPolicy, settings_of, words_of, words_of_part
from specctl.stats import Interval, resample
from specctl.train.fits import refit, write_fit

COMPARED = ("deployed", "refit", "static")


@dataclass(frozen=True)
class Recalibration:
    """The comparison on held-out recent prompts, rates in tokens/s."""

    tuned: Tuned
    deployed: str  # label of the deployed policy
    candidate: str  # label of the best policy on the training side
    static: str  # label of the best static setting
    rates: dict[str, Interval]  # by `COMPARED`
    support: dict[str, float]  # share of wanted expansions and rounds in the log, by `COMPARED`
    against_deployed: Interval  # the candidate's rate over the deployed policy's, paired by prompt
    against_static: Interval  # likewise over the best static setting's
    is_same: bool  # the candidate is the deployed policy
    is_static: bool  # the deployed policy is a static setting, so the candidate may be one
    facts: TuneResult  # of the result and of the deployed policy

    @property
    def is_better(self) -> bool:
        """Whether the candidate may replace the deployed policy."""
        return not self.is_same and not self.why_not

    @property
    def why_not(self) -> str:
        """The reason against the candidate, in words; empty if it is better."""
        if self.lacking:
            return self.lacking
        if self.is_same:
            return "the refit chose the deployed policy itself"
        result = self.tuned.result
        searched = [one.policy for one in result.policies if one.family not in (PLAIN, *STATIC)]
        if searched and not any(map(result.can_win, searched)):
            if result.without_decision_cost:
                return f"decisions of the refit are not timed: {to_time(vars(self.facts))}"
            return "the refit has seen some of the prompts that it is compared on"
        if self.candidate == self.static and not self.is_static:
            return (
                f"the best static setting, {self.static}, is fastest on the prompts that chose: "
                "specctl tune writes it"
            )
        if not self.against_deployed.low > 1:
            return "it is not faster than the deployed policy by more than its interval"
        if self.candidate != self.static and not self.against_static.low > 1:
            return "it is not faster than the best static setting by more than its interval"
        return ""

    @property
    def lacking(self) -> str:
        """The missing support of a compared policy, in words; empty if the log is sufficient."""
        labels = {"refit": self.candidate, "static": self.static}
        return next(
            (
                f"the log holds {self.support[name]:.1%} of what {label} wants on the held-out "
                f"prompts, {MARKED_BELOW:.0%} are needed: collect with a larger --depth or "
                "--children"
                for name, label in labels.items()
                if self.support[name] < MARKED_BELOW
            ),
            "",
        )

    def to_json(self) -> dict[str, Any]:
        result, facts = self.tuned.result, self.facts
        named = {"deployed": self.deployed, "refit": self.candidate, "static": self.static}
        return {
            "kind": "recalibrate",
            "is_better": self.is_better,
            "why_not": self.why_not or None,
            "deployed": self.deployed,
            "candidate": self.candidate,
            "static": self.static,
            "rates": {name: rate.to_json() for name, rate in self.rates.items()},
            "support": self.support,
            "against_deployed": self.against_deployed.to_json(),
            "against_static": self.against_static.to_json(),
            "num_prompts": result.num_prompts.model_dump(),
            "num_prompts_left_out": facts.num_prompts_left_out or 0,
            "scored_on_training_prompts": facts.scored_on_training_prompts or (),
            "without_decision_cost": facts.without_decision_cost or {},
            "cost_model": result.cost_model,
            "proviso": facts.provisos(self.candidate, self.deployed) or None,
            "marked": {name: facts.marked(label) for name, label in named.items()},
            "notes": [f"Times: {result.clock}.", *facts.footnotes()],
        }


def recalibration_parts(data: Mapping[str, Any]) -> list[Any]:
    """The verdict of `recalibration.json`, its gains, table and notes."""
    over = [Interval.of_json(data[name]) for name in ("against_deployed", "against_static")]
    static = f"× {over[1].text('.2f')} of the best static setting"
    if data["candidate"] == data["static"]:
        static = "and the best static setting itself"
    gains = f"× {over[0].text('.2f')} of the deployed policy, {static}{data['proviso'] or ''}"
    verdict = [f"Keep {data['deployed']}: {data['why_not']}.", f"The refit is {gains}."]
    if data["why_not"] is None:
        verdict = [f"Better: {data['candidate']}, {gains}."]
    rates = {name: Interval.of_json(rate).text(".0f") for name, rate in data["rates"].items()}
    rows = [(name, label, rates[name]) for name, label in data["marked"].items()]
    held_out, train = (data["num_prompts"][side] for side in ("held_out", "train"))
    title = f"{held_out} recent prompts held out of {held_out + train}"
    table = Table(title, ("", "policy", "tokens/s"), rows, left=2)
    return [*verdict, table, *data["notes"]]


def recalibrate(
    traces: TraceSet,
    named: NamedPolicy,
    label: str,
    config: TuneConfig,
    cost_model: Path,
    out: Path,
) -> Recalibration:
    """Fits or tunes a deployed policy again on recent traces, and writes a better one.

    Args:
        traces: dense.
        label: the deployed policy as the user named it.
        config: of the search; its families override those that the policy came from.
        out: a refit is written to `fit/` in it, a better policy to `policy/`.

    Raises:
        UsageError, TraceError, TraceMismatchError: see `families_to_search`, `prepare`, `compare`.
    """
    manifest = named.parts[0][1].manifest if named.artifact_digest else None
    families = config.families or families_to_search(named.policy, manifest)
    fit: Mapping[str, Any] = (manifest and manifest.fit) or {}
    if not config.families:
        again = refit(fit, traces, held_out_frac=config.held_out_frac, seed=config.seed)
        if again is not None:
            write_fit(again, out / "fit", traces)
            families = (str(out / "fit"),)
    served_by: Any = config.for_engine or fit.get("for_engine")
    searched = config.model_copy(update={"families": families, "for_engine": served_by})
    options = engine_options(searched)
    beside = [replace(named, label=label)]
    tuning = prepare(traces, searched, cost_model, beside=beside, **options)
    found = compare(tuning, as_chain(named.policy) if served_by == "vllm" else named.policy, label)
    if found.is_better:
        publish(found.tuned, out, traces.fingerprint, domain_of(traces), traces.snapshots)
    return found


def families_to_search(policy: Policy, manifest: Manifest | None) -> tuple[str, ...]:
    """The families that a deployed policy was chosen from; empty if it was fitted or is static.

    Raises:
        UsageError: the policy is lossy, which replay cannot judge, or has no settings to search.
    """
    if not isinstance(policy.acceptance, Strict):
        raise UsageError(
            f"{policy.name} cannot be recalibrated: its acceptance, {policy.acceptance.kind}, "
            "changes the text, so the log cannot be replayed",
            hint=_certifying(policy),
        )
    fit = {} if manifest is None or manifest.fit is None else manifest.fit
    if fit.get("kind") == "tune":
        return tuple(str(name) for name in fit["families"])  # type: ignore[union-attr]
    if fit or is_static(policy):
        return ()
    parts = [_without_searched(part) for part in (policy.shape, *policy.additions.values())]
    if None in parts:
        raise UsageError(
            f"{policy.name} has no settings to search and is no artifact of fit or tune",
            hint="name what to search with --family: specctl tune --show-grid lists it",
        )
    return ("+".join(map(str, parts)),)


def _without_searched(part: Record) -> str | None:
    """The words of a policy's part without its searched settings; None if it has none."""
    words = words_of_part(part)
    searched = {name for grid in family_of(part).grids.values() for name in grid}
    if words is None or not searched:
        return None
    kept = (one for one in settings_of(words) if one.partition("=")[0] not in searched)
    return ":".join([words.partition(":")[0], *kept])


def _certifying(policy: Policy) -> str:
    """The command that judges a lossy policy, by running it."""
    verb = {"mars": "mars", "adasd_accept": "adasd"}.get(policy.acceptance.kind)
    if verb is None:
        return f"measure it: specctl run RECENT.jsonl --compare ar,chain,{policy.name}"
    shape = words_of(Policy(shape=policy.shape)) or "SHAPE"
    command = f"specctl fit {verb} RECENT.jsonl --shape {shape} -o again"
    return f"certify it on recent prompts with answers: {command}; then specctl registry push again"


def compare(tuning: Tuning, deployed: Policy, label: str) -> Recalibration:
    """Searches, then compares on the held-out prompts.

    Args:
        tuning: a search over the refitted family and static settings.
        label: of the deployed policy.

    Raises:
        TraceMismatchError: the log lacks support for the deployed policy, see `check_held`.
    """
    search, prompts = tuning.search, tuning.search.split.held_out
    known = tuning.evaluator([deployed], prompts, search.num_runs)
    check_held(tuning.evaluator.log, deployed, known[0].support, f"replay of {label}")
    tuned = tuning.run()
    result = tuned.result
    chosen, static = (
        next(one for one in result.policies if one.policy == name)
        for name in (result.winner_on_train, result.baseline)
    )
    others = [parse_policy(canonical_json(one.record)) for one in (chosen, static)]
    policies = [deployed, *others]
    found = [*known, *tuning.evaluator(others, prompts, search.num_runs)]
    resamples = resample(len(prompts), search.num_runs, search.seed)
    measure = Measure(resamples, search.time_error, search.seed)
    drawn = [measure.drawn(s, policy_digest(p)) for p, s in zip(policies, found, strict=True)]
    rates = [search.objective.rate(totals) for totals in drawn]
    ratios = [measure.against(rates[1], rates[place]) for place in (0, 2)]
    trained = [label] if label in search.barred else []
    decisions = decision_facts(tuning.clock, {label: (deployed, label)})
    return Recalibration(
        tuned=tuned,
        deployed=label,
        candidate=chosen.policy,
        static=static.policy,
        rates=dict(zip(COMPARED, map(resamples.read, rates), strict=True)),
        support={name: one.support for name, one in zip(COMPARED, found, strict=True)},
        against_deployed=ratios[0],
        against_static=ratios[1],
        is_same=policy_digest(policies[1]) == policy_digest(deployed),
        is_static=is_static(deployed),
        facts=result.model_copy(
            update={
                "scored_on_training_prompts": (
                    *(result.scored_on_training_prompts or ()),
                    *trained,
                ),
                "without_decision_cost": {
                    **(result.without_decision_cost or {}),
                    **(decisions["without_decision_cost"] or {}),
                },
                "with_decision_cost": result.with_decision_cost or decisions["with_decision_cost"],
                "free_decisions": (
                    *(result.free_decisions or ()),
                    *(decisions["free_decisions"] or ()),
                ),
            }
        ),
    )
