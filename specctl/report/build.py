"""Builds a page from figures of traces and results of other verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from specctl.errors import TraceMismatchError, UsageError
from specctl.formatting import count, is_fixture, listed
from specctl.replay.acceptance import TraceFigures
from specctl.replay.cost.files import doubts
from specctl.replay.cost.rates import LinearCost
from specctl.report.answer import recommendation
from specctl.report.given import Given
from specctl.report.page import Page, Section, portable
from specctl.report.result_sections import (
    drift_section,
    ladder_section,
    policies_section,
    runs_section,
)
from specctl.report.trace_sections import category_section, depth_section
from specctl.stats import MIN_PROMPTS

FEW_PROMPTS = 30
"""Below this, bootstrap percentile intervals are markedly too narrow."""
FIXTURE = (
    "These traces come from the embedded pair, a fixture for people and tests: no figure here says "
    "anything about large models."
)


def build_page(figures: TraceFigures | None, given: Given) -> Page:
    """Builds the report.

    Args:
        figures: of traces; None for results alone.

    Raises:
        UsageError: neither traces nor results are given.
        TraceMismatchError: the sources are of different pairs.
    """
    sources: dict[str, Any] = {} if figures is None else {"traces": figures}
    sources |= given.results
    sources |= {} if given.run is None else {"run.json": given.run.facts.pair}
    sources |= {} if given.drift is None else {"drift.json": given.drift.pair}
    if not sources:
        raise UsageError(
            "a report needs traces, or results of replay, the ladder, tuning, a run or a watch",
            hint="name a trace folder, or give --results, --ladder, --tune, --run or --drift",
        )
    first, *others = sources.values()
    for name, other in zip([*sources][1:], others, strict=True):
        for role in ("target_digest", "drafter_digest"):
            theirs, ours = getattr(other, role), getattr(first, role)
            if theirs != ours:
                raise TraceMismatchError(
                    f"{name} is of another pair: its {role} is {theirs}, not {ours}",
                    hint="report on traces and results of one pair",
                )
    warnings = [] if given.cost is None else doubts(given.cost)
    off = {r.check_error for r in given.results.values() if r.check_error is not None}
    warnings += [
        f"Times here are of a clock that was off by {error:+.0%} in its own check: its verdicts "
        "were forced."
        for error in sorted(off)
    ]
    if figures is not None and figures.num_prompts < FEW_PROMPTS:
        warnings.insert(
            0,
            f"Only {count(figures.num_prompts, 'prompt')}: intervals by prompt are too narrow "
            f"below about {FEW_PROMPTS}, and n/a below {MIN_PROMPTS}.",
        )
    if is_fixture(first.target) or is_fixture(first.drafter):
        warnings.insert(0, FIXTURE)
    facts = dict(_facts(figures, given))
    byline = [count(figures.num_prompts, "prompt"), facts["sampling"]] if figures else []
    byline += [f"times of {given.cost.hardware}"] if given.cost else []
    page = Page(
        title=f"Speculative decoding report: {first.target} + {first.drafter}",
        byline=", ".join([*byline, f"specctl {facts['specctl']}"]),
        facts=tuple(facts.items()),
        warnings=tuple(warnings),
        sections=tuple(_sections(figures, given)),
    )
    found: Page = portable(page, (first.target, first.drafter))
    return found


def _sections(figures: TraceFigures | None, given: Given) -> Iterator[Section]:
    """The answer, sections with data, sections without, and the caveats."""
    yield recommendation(given, figures)
    sources: dict[str, tuple[Any, Callable[[Any], Section], str]] = {
        "policies": (given.replay, policies_section, "--results replay.json of specctl replay"),
        "runs": (given.run, runs_section, "--run results.json of specctl run --compare"),
        "ladder": (given.ladder, ladder_section, "--ladder ladder.json of specctl ladder"),
        "drift": (given.drift, drift_section, "--drift drift.json of specctl drift"),
    }
    found = [
        Section(key, missing=f"(no data supplied: give {option})") if of is None else section(of)
        for key, (of, section, option) in sources.items()
    ]
    if figures is None:
        found.append(Section("traces", missing="(no data supplied: give trace folders)"))
    else:
        found += [depth_section(figures), category_section(figures)]
    yield from sorted(found, key=lambda section: bool(section.missing))
    lines = [*_trace_caveats(figures), *_result_caveats(figures, given)]
    yield Section("caveats", notes=lines, data={"lines": lines})


def _facts(figures: TraceFigures | None, given: Given) -> Iterator[tuple[str, str]]:
    from specctl.version import __version__

    if figures is not None:
        settings = figures.sampling
        sampling = ", ".join(f"{n} {settings[n]}" for n in ("temperature", "top_k", "top_p"))
        yield "target", f"{figures.target}  {figures.target_digest[:19]}"
        yield "drafter", f"{figures.drafter}  {(figures.drafter_digest or 'none')[:19]}"
        yield "sampling", sampling if settings["temperature"] else "greedy"
        yield "traces", f"{figures.kind}, {figures.traces_digest[:19]}"
        yield "prompts", f"{figures.num_prompts:,}"
        yield "positions" if figures.kind == "dense" else "rounds", f"{figures.num_rows:,}"
        yield "drafted nodes", f"{figures.num_nodes:,}"
        if (s := figures.support) is not None:
            nested = ", nested" if s["nested"] else ""
            yield "support", f"top_k {s['top_k']}, width {s['width']}, depth {s['depth']}{nested}"
    if given.run is not None:
        yield "hardware of the runs", given.run.facts.device
    if given.cost is not None:
        yield "hardware of the times", given.cost.hardware
    else:
        timed = any(results.cost_model for results in given.results.values())
        yield "hardware of the times", "in the cost model, not given here" if timed else "none"
    yield "specctl", __version__


def _trace_caveats(figures: TraceFigures | None) -> Iterator[str]:
    if figures is None:
        yield "Without traces there is no acceptance by depth and category."
        return
    yield "Intervals are 95% percentile bootstrap by prompt; tokens of one text are dependent."
    known = figures.hardware
    where = f"Traces were collected on {listed(known)}" if known else "Traces name no hardware"
    yield (
        f"{where}. Counts (calls, verified tokens, τ) do not depend on it, apart from rounding "
        "that flips a near tie; times do."
    )
    if (support := figures.support) is None:
        yield (
            "Live traces: every figure is of the policy that collected them. Nodes that it did not "
            "draft or submit are censored, and other policies cannot be scored. Collect with "
            "--dense."
        )
        return
    nested = (
        "smaller static trees are contained exactly"
        if support["nested"]
        else "not nested: smaller trees may need expansions that it lacks"
    )
    yield (
        f"The log holds the {support['top_k']} likeliest children of {support['width']} nodes a "
        f"level, {support['depth']} levels deep; {nested}. It holds nothing outside of that."
    )
    if not figures.sampling["temperature"]:
        yield "Greedy text: replay is exact for lossless policies."
    else:
        yield "Sampled text: replay is exact by coupling, for the texts that were drawn."


def _result_caveats(figures: TraceFigures | None, given: Given) -> Iterator[str]:
    errors = {r.time_error for r in given.results.values() if r.time_error}
    if errors:
        texts = listed(f"{error:.1%}" for error in sorted(errors))
        yield (
            f"Intervals of times hold the clock's error, too: {texts} of a policy's time, drawn "
            "for each policy by itself."
        )
    for name, results in given.results.items():
        if figures is not None and results.traces_digest != figures.traces_digest:
            yield f"{name} was made from other traces, {results.traces_digest[:19]}."
        if given.cost is not None and results.cost_model != given.cost.digest:
            yield f"{name} was not made with the cost model named above."
    if isinstance(cost := given.cost, LinearCost):
        yield f"Times come from a linear form by {cost.source}, not from a measurement here."
        return
    if cost is not None:
        yield (
            f"Times come from a cost model of {cost.hardware}, measured {cost.measured}, valid to "
            f"{cost.expires}; held-out error: {cost.held_out_text}."
        )
        return
    digests = {results.cost_model for results in given.results.values()} - {None}
    for digest in sorted(map(str, digests)):
        yield f"Times are predictions of cost model {digest[:19]}, not measured runs."
    if given.run is not None:
        yield "Measured runs are of one machine at one time; their intervals are over prompts."
    elif not digests:
        yield "No cost model: nothing here is a time."
