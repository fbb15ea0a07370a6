"""The first and the last section: what to run, and what stands in the way of believing it."""

from __future__ import annotations

from collections.abc import Iterator

from specctl.replay.cost.records import LinearCost
from specctl.replay.report.evidence import Evidence
from specctl.replay.report.given import (
    NAMES,
    Given,
    LadderResults,
    PolicyFigures,
    ReplayResults,
    TuneResults,
)
from specctl.replay.report.page import Section, Table
from specctl.replay.report.result_sections import best_policy
from specctl.replay.report.words import BY_PROMPT, count, listed, span

FEW_PROMPTS = 30
"""Below this, percentile intervals of a bootstrap are markedly too narrow."""
TITLE = "Recommended setting"
SAME_PROMPTS = "It was chosen on the prompts that it is shown for, which flatters it."
NOT_TUNED = "specctl tune chooses on training prompts and reports on held-out ones."
NOT_ELSEWHERE = "This holds for prompts like these; another workload needs its own traces."
UNTIMED = (
    "Time was not judged: without a cost model, fewer calls and fewer verified tokens cannot be "
    "weighed against each other. Run specctl profile, then specctl tune."
)


def recommendation(given: Given) -> Section:
    """From the strongest evidence that was given."""
    if given.tune is not None:
        return _from_tune(given.tune)
    if given.ladder is not None:
        return _from_ladder(given.ladder)
    if given.replay is not None and _timed(given.replay):
        return _from_replay(given.replay)
    return Section("recommendation", TITLE, missing=f"None is made. {UNTIMED}")


def _from_tune(tune: TuneResults) -> Section:
    standing = {found.policy: found for found in tune.policies}
    chosen, picked = standing[tune.chosen], standing[tune.winner_on_train]
    gain = span(picked.held_out.against.interval, ".3f")
    if tune.beats_static:
        reading = f"Run {tune.chosen}: {gain} times the best static setting, {tune.baseline}."
    elif tune.winner_on_train == tune.baseline:
        reading = f"Run {tune.chosen}, the best static setting: no family beat it."
    else:
        reading = (
            f"Run {tune.chosen}, the best static setting. {tune.winner_on_train} was best on "
            f"training prompts and came out at {gain} times its rate on held-out ones: "
            "no gain beyond the interval."
        )
    train, held_out = tune.num_prompts["train"], tune.num_prompts["held_out"]
    basis = (
        f"Chosen among {count(tune.num_settings, 'setting')} on {count(train, 'prompt')}; n = "
        f"{count(held_out, 'held-out prompt')}, which the choice never saw; {BY_PROMPT}. "
        f"Objective: {tune.objective.kind}, {tune.objective.meaning}."
    )
    return Section(
        "recommendation",
        TITLE,
        reading=f"{reading} {tune.objective.kind.capitalize()}: "
        f"{span(chosen.held_out.rate.interval, '.0f')} tokens/s.",
        basis=basis,
        tables=[_standings(tune)],
        notes=[f"{_load(tune)} {tune.approximations}", NOT_ELSEWHERE],
        data=tune.model_dump(mode="json"),
    )


def _load(tune: TuneResults) -> str:
    rate = tune.load.arrival_rate_per_s
    arrivals = "a closed loop" if rate is None else f"{rate:g} requests/s"
    return (
        f"Rates are the cost model's, for {arrivals} at batch size {tune.load.batch_size}; other "
        "loads may want another setting."
    )


def _standings(tune: TuneResults) -> Table:
    rows = [
        (
            found.policy,
            found.family,
            span(found.held_out.rate.interval, ".0f"),
            span(found.held_out.against.interval, ".3f"),
        )
        for found in tune.policies
    ]
    head = ("setting", "family", "tokens/s, held out", "× best static")
    return Table("The best static setting, and the best of each family", head, rows)


def _from_ladder(ladder: LadderResults) -> Section:
    best = best_policy(ladder)
    gain = best.against_static.interval
    setting = f" ({best.setting})" if best.setting else ""
    words = f"{span(gain)} times the rate of the best static setting, {ladder.best_static}"
    if best.label != ladder.best_static and gain.low <= 1:
        static = next(rung for rung in ladder.rungs if rung.label == ladder.best_static)
        setting = f" ({static.setting})" if static.setting else ""
        reading = (
            f"Run {static.label}{setting}, the best static setting. {best.label} came out at "
            f"{words}: no gain beyond the interval."
        )
    elif best.label == ladder.best_static:
        reading = f"Run {best.label}{setting}: no policy of the ladder beats it."
    else:
        reading = f"Run {best.label}{setting}: {words}."
    notes = [
        f"Static settings were tuned on {count(ladder.num_prompts.get('train', 0), 'prompt')} and "
        f"all measured on {ladder.num_prompts.get('held_out', 0):,} others, under a cost model at "
        f"batch size {ladder.batch_size}; other loads may want another setting.",
        f"The fastest of the policies was picked on the prompts it is shown for. {NOT_TUNED}",
        NOT_ELSEWHERE,
    ]
    return Section("recommendation", TITLE, reading=reading, notes=notes)


def _timed(results: ReplayResults) -> list[PolicyFigures]:
    figures = [policy.pooled for policy in results.policies]
    return [f for f in figures if f.tokens_per_s is not None]


def _from_replay(results: ReplayResults) -> Section:
    rate = {f.policy: f.tokens_per_s.value for f in _timed(results) if f.tokens_per_s is not None}
    best = next(f for f in _timed(results) if f.policy == max(rate, key=lambda name: rate[name]))
    words = "" if best.tokens_per_s is None else span(best.tokens_per_s, ".0f")
    reading = f"Of the policies replayed, {best.policy} is fastest: {words} tokens/s."
    ratio = best.against.get("time_us")
    if ratio is not None and best.policy != results.baseline:
        sure = "" if ratio.interval.high < 1 else ", so it may be no faster"
        reading += f" Its time is {span(ratio.interval)} times that of {results.baseline}{sure}."
    return Section(
        "recommendation",
        TITLE,
        reading=reading,
        notes=[f"{SAME_PROMPTS} {NOT_TUNED}", NOT_ELSEWHERE],
    )


def caveats(evidence: Evidence | None, given: Given) -> Section:
    """What limits the figures of this page."""
    lines = [*_of_traces(evidence), *_of_results(given, evidence), *_of_cost(given)]
    return Section(
        "caveats",
        "Support and caveats",
        reading=f"{count(len(lines), 'thing')} to know before these figures travel.",
        notes=lines,
        data={"lines": lines},
    )


def _of_traces(evidence: Evidence | None) -> Iterator[str]:
    if evidence is None:
        yield "No traces were given: nothing is said of acceptance, TCR, Φ or confidence."
        return
    yield "Intervals are 95% percentile bootstrap by prompt; tokens of one text are dependent."
    yield (
        "Traces name no hardware. Counts (calls, verified tokens, τ, ranks) do not depend on it, "
        "apart from rounding that flips a near tie; times do."
    )
    if evidence.support is None:
        yield (
            "Live traces: every figure is of the policy that collected them. What it did not draft "
            "or submit is censored, and other policies cannot be scored. Collect with --dense."
        )
        return
    support = evidence.support
    nested = (
        "smaller static trees are contained exactly"
        if support.nested
        else ("not nested: smaller trees may ask for expansions that it lacks")
    )
    yield (
        f"The log holds the {support.top_k} likeliest children of {support.width} nodes a level, "
        f"{support.depth} levels deep; {nested}. Beyond that nothing is known."
    )
    if not evidence.header.sampling["temperature"]:
        yield "Greedy text: replay is exact for lossless policies."
    else:
        yield "Sampled text: replay is exact by coupling, for the texts that were drawn."


def _of_results(given: Given, evidence: Evidence | None) -> Iterator[str]:
    if given.replay is not None:
        marked = [p.policy for p in given.replay.policies if p.pooled.is_marked]
        if marked:
            yield f"Support under 99%, bounds given: {listed(marked)}."
    for results in given.results:
        name = NAMES[type(results)]
        if evidence is not None and results.traces_digest != evidence.digest:
            yield f"{name} was made from other traces, {results.traces_digest[:19]}."
        if given.cost_model is not None and results.cost_model != given.cost_model.digest:
            yield f"{name} was not made with the cost model named above."


def _of_cost(given: Given) -> Iterator[str]:
    if given.cost_model is None:
        digests = {results.cost_model for results in given.results if results.cost_model}
        if not digests:
            yield "No cost model: nothing here is a time."
        for digest in sorted(digests):
            yield f"Times are predictions of cost model {digest[:19]}, not measured runs."
        return
    record = given.cost_model.record
    if isinstance(record, LinearCost):
        yield f"Times come from a linear form by {record.source}, not from a measurement here."
        return
    errors = ", ".join(f"{name} {part.mape:.1%}" for name, part in record.held_out.items())
    yield (
        f"Times come from a cost model measured on {record.machine.device} "
        f"({record.machine.dtype}), {record.measured}, valid to {record.expires}; held-out error: "
        f"{errors}."
    )
