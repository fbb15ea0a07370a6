"""Result records with plain values, for pages without the runs behind them."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from specctl.artifacts import PairFingerprint
from specctl.replay.ladder.estimates import ProbabilityQuality
from specctl.replay.ladder.result import LadderResult, Rung, SideSizes
from specctl.replay.results import ReplayScores
from specctl.replay.score import Bound, PolicyFigures, PolicyScores
from specctl.replay.tune.evaluators import make_objective
from specctl.replay.tune.verdict import (
    HeldOutStanding,
    Standing,
    TunedLoad,
    TuneResult,
)
from specctl.report.given import RunFacts, RunPaired, RunPolicy, RunScores
from specctl.stats import Interval
from specctl.watch.drift import DriftEvidence, DriftPrompt, DriftScores, DriftSignal
from specctl.watch.price import Price

DIGESTS = ("traces_digest", "target_digest", "drafter_digest", "cost_model")
FACTS: dict[str, Any] = {
    **dict.fromkeys(DIGESTS, "sha256:" + 64 * "0"),
    "target": "tiny",
    "drafter": "small",
    "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0},
    "support": {"top_k": 4, "width": 4, "depth": 4, "nested": True},
}

PAIR = PairFingerprint(
    target="tiny",
    drafter="small",
    **dict.fromkeys(("target_digest", "drafter_digest", "tokenizer_digest"), "sha256:" + 64 * "0"),
)
SIZES = SideSizes(train=30, held_out=31)


def example(record: Any, /, **given: Any) -> Any:
    """A record with the given fields, all others of the plainest value of their type."""

    def plain(wanted: Any) -> Any:
        origin = get_origin(wanted)
        if origin in (tuple, dict):
            return origin()
        if origin is Literal:
            return get_args(wanted)[0]
        if wanted is Interval:
            return around(1.0)
        if isinstance(wanted, type) and issubclass(wanted, BaseModel):
            return example(wanted)
        return wanted(0) if isinstance(wanted, type) else None

    rest = {n: plain(f.annotation) for n, f in record.model_fields.items() if n not in given}
    return record(**rest, **given)


def around(value: float, apart: float = 0.1) -> Interval:
    return Interval(value, value - apart, value + apart)


BOUNDED = ("calls", "verified_tokens", "mean_acceptance_length")


def replay_results(*, timed: bool = True, label: str = "eagle2") -> ReplayScores:
    policies = []
    for name, calls, rate, is_marked in (("chain", 300, 100.0, False), (label, 200, 150.0, True)):
        ratios = {"mean_acceptance_length": around(3.0), "draft_utilisation": around(0.5)}
        ratios |= {"tokens_per_s": around(rate, 5.0)} if timed else {}
        against = {"calls": around(0.9), "verified": around(2.0)} | (
            {"time_us": around(0.8)} if timed else {}
        )
        pooled = example(
            PolicyFigures,
            policy=name,
            num_prompts=40,
            calls=calls,
            verified_tokens=2 * calls,
            time_us=1e6 if timed else None,
            expansion_support=0.98 if is_marked else 1.0,
            is_marked=is_marked,
            ratios=ratios,
            bounds={n: Bound(low=calls - 3.0, high=calls + 9.0) for n in BOUNDED},
            against=against,
        )
        policies.append(PolicyScores(policy=name, pooled=pooled, by_category=()))
    return example(ReplayScores, baseline="chain", policies=tuple(policies), **FACTS)


def drift_results(**others: Any) -> DriftScores:
    """An alarm at the third prompt of four, by the mix and the tokens."""
    at = {"finished": "2026-01-31 12:00:00", "prompt_id": "p"}
    own = {"group": "tokens per call", "signal": "tokens per call", "moved": True}
    signal = example(
        DriftSignal,
        **own,
        most_wealth=45.0,
        since=DriftPrompt(index=1, **at),
        before=around(3.0),
        after=around(2.0),
    )
    curves = {"all": (0.0, 0.5, 1.4, 1.6), "tokens per call": (0.1, 0.9, 1.5, 12.0)}
    given: dict[str, Any] = {
        "pair": PAIR,
        "policy": "threshold",
        "alarm": True,
        "alpha": 0.05,
        "unit": "prompt",
        "num_units": 4,
        "alarm_at": DriftPrompt(index=2, **at),
        "evidence": DriftEvidence(index=(0, 1, 2, 3), log10=curves),
        "signals": (signal,),
        "price": Price(num_prompts=9, static="chain", static_over_deployed=around(0.8)),
    }
    return example(DriftScores, **{**given, **others})  # type: ignore[no-any-return]


def ladder_results(
    *,
    plain: float = 40.0,
    policy_gain: float = 1.2,
    label: str = "mine",
    is_marked: bool = False,
    **others: Any,
) -> LadderResult:
    """Of batch size 1; `label` is a policy's."""
    rates = {"plain ar": plain, "tree static": 100.0, f"policy {label}": 100 * policy_gain}
    rates |= {"features R_feat": 150.0, "oracle R_prob": 160.0}
    rates |= {"clairvoyant R_clair": 300.0, "ceiling R_ceil": 400.0}
    rungs = []
    for name, rate in rates.items():
        kind, own = name.split()
        told = {"tokens_per_s": around(rate, 3.0), "against_static": around(rate / 100.0)}
        told |= {"against_plain": around(rate / plain), "is_marked": is_marked and own == label}
        rungs.append(example(Rung, kind=kind, label=own, setting="as given", **told))
    told = {"rungs": tuple(rungs), "best_static": "static", "num_prompts": SIZES, "batch_size": 1}
    told |= {"calibration": {"oracle": example(ProbabilityQuality)}}
    return example(LadderResult, **told, **(FACTS | others))


def tune_results(*, beats: bool = True, load: tuple[int, float | None] = (4, 2.5)) -> TuneResult:
    """`load`: batch size and requests per second."""
    policies = []
    for name, rate, gain in (("static", 100.0, 1.0), ("fancy", 130.0, 1.3), ("ar", 50.0, 0.5)):
        held_out = example(
            HeldOutStanding,
            rate=around(rate),
            against=around(gain),
            against_plain=around(2 * gain),
        )
        policies.append(example(Standing, policy=name, family=name, held_out=held_out))
    return example(
        TuneResult,
        load=TunedLoad(batch_size=load[0], arrival_rate_per_s=load[1]),
        approximations="Batches are simulated.",
        objective=make_objective(),
        chosen="fancy" if beats else "static",
        beats_static=beats,
        baseline="static",
        winner_on_train="fancy",
        num_settings=77,
        num_prompts=SIZES,
        policies=tuple(policies),
        **FACTS,
    )


VERDICT = "Fastest: best, 1.50 [1.40, 1.60] times as fast as plain decoding."


def run_results(*, artifact_digest: str | None = None, same: bool = True) -> RunScores:
    """Plain decoding, and a policy that is 1.5 times as fast."""
    beside = example(RunPaired, speedup=around(1.5), verdict="faster")
    plain, mine = (
        example(
            RunPolicy,
            policy=name,
            tokens_per_s=rate,
            equal_to_ar=same or name == "ar",
            artifact_digest=None if name == "ar" else artifact_digest,
            paired=None if name == "ar" else beside,
        )
        for name, rate in (("ar", 40.0), ("best", 60.0))
    )
    sizes = {"num_prompts": 48, "num_prompts_given": 48}
    facts = example(RunFacts, pair=PAIR, **sizes, device="a machine", verdict=VERDICT)
    return RunScores(policies=(plain, mine), facts=facts)
