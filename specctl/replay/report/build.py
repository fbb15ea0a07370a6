"""From evidence and results to a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specctl.errors import TraceMismatchError, UsageError
from specctl.replay.cost.files import check_expiry
from specctl.replay.cost.records import LinearCost
from specctl.replay.report.acceptance_sections import category_section, depth_section
from specctl.replay.report.confidence_sections import confidence_section
from specctl.replay.report.evidence import Evidence
from specctl.replay.report.given import NAMES, Given
from specctl.replay.report.heterogeneity_sections import phi_section, tcr_section
from specctl.replay.report.page import Page, Section
from specctl.replay.report.result_sections import ladder_section, policies_section
from specctl.replay.report.static_sections import pareto_section
from specctl.replay.report.verdict_sections import FEW_PROMPTS, caveats, recommendation
from specctl.replay.report.words import count

FIXTURE = (
    "These traces come from the embedded pair, a fixture for people and tests: no figure here says "
    "anything about large models."
)


def build_page(evidence: Evidence | None, given: Given) -> Page:
    """The report.

    Args:
        evidence: of traces; None where only results are told.

    Raises:
        UsageError: neither traces nor results. TraceMismatchError: results of another pair.
    """
    if evidence is None and not given.results:
        raise UsageError(
            "report",
            expected="traces, or results of replay, the ladder or tuning",
            found="neither",
            fix="name a trace folder, or give --results, --ladder or --tune",
        )
    _check_pair(evidence, given)
    return Page(
        title=f"Speculative decoding report: {_pair_words(evidence, given)}",
        facts=tuple(_facts(evidence, given)),
        warnings=tuple(_warnings(evidence, given)),
        sections=tuple(_sections(evidence, given)),
    )


def _check_pair(evidence: Evidence | None, given: Given) -> None:
    """Refuses figures of one pair beside those of another."""
    sources: list[Any] = [*given.results] if evidence is None else [evidence.header, *given.results]
    first, *others = sources
    for other in others:
        for role in ("target_digest", "drafter_digest"):
            theirs, ours = getattr(other, role), getattr(first, role)
            if theirs != ours:
                raise TraceMismatchError(
                    f"{NAMES[type(other)]}, {role}",
                    expected=f"{ours}, as in what was given before it",
                    found=f"{theirs}",
                    fix="report on traces and results of one pair",
                )


def _sections(evidence: Evidence | None, given: Given) -> Iterator[Section]:
    yield recommendation(given)
    yield policies_section(given.replay)
    yield ladder_section(given.ladder)
    if evidence is not None:
        yield pareto_section(evidence, given.replay)
        yield depth_section(evidence)
        yield category_section(evidence)
        yield tcr_section(evidence)
        yield phi_section(evidence)
        yield confidence_section(evidence)
    yield caveats(evidence, given)


def _pair_words(evidence: Evidence | None, given: Given) -> str:
    if evidence is not None:
        collected = evidence.header.collect
        return f"{collected.get('target', 'unnamed')} + {collected.get('drafter', 'unnamed')}"
    first = given.results[0]
    return f"{first.target} + {first.drafter}"


def _facts(evidence: Evidence | None, given: Given) -> Iterator[tuple[str, str]]:
    from specctl import __version__

    if evidence is not None:
        yield from _trace_facts(evidence)
    record = None if given.cost_model is None else given.cost_model.record
    if record is None:
        timed = any(results.cost_model for results in given.results)
        yield "hardware", "that of the results' cost model, not given" if timed else "nothing timed"
    elif isinstance(record, LinearCost):
        yield "hardware", f"linear cost form by {record.source}"
    else:
        machine = record.machine
        yield "hardware", f"{machine.device}, {machine.dtype}, {machine.num_threads} threads"
    yield "specctl", __version__


def _trace_facts(evidence: Evidence) -> Iterator[tuple[str, str]]:
    header = evidence.header
    yield "target", f"{header.collect.get('target', 'unnamed')}  {_short(header.target_digest)}"
    yield "drafter", f"{header.collect.get('drafter', 'unnamed')}  {_short(header.drafter_digest)}"
    yield "sampling", _law(header.sampling)
    yield "traces", f"{evidence.kind}, {_short(evidence.digest)}"
    yield "prompts", f"{evidence.num_prompts:,}"
    yield "positions" if evidence.kind == "dense" else "rounds", f"{evidence.num_rows:,}"
    yield "drafted nodes", f"{evidence.num_nodes:,}"
    if evidence.support is not None:
        s = evidence.support
        nested = ", nested" if s.nested else ""
        yield "support", f"top_k {s.top_k}, width {s.width}, depth {s.depth}{nested}"


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:19]


def _law(sampling: dict[str, Any]) -> str:
    if not sampling["temperature"]:
        return "greedy"
    return ", ".join(f"{name} {sampling[name]}" for name in ("temperature", "top_k", "top_p"))


def _warnings(evidence: Evidence | None, given: Given) -> Iterator[str]:
    if "embedded" in _pair_words(evidence, given):
        yield FIXTURE
    if evidence is not None and evidence.num_prompts < FEW_PROMPTS:
        yield (
            f"Only {count(evidence.num_prompts, 'prompt')}: intervals by prompt are too narrow "
            f"below about {FEW_PROMPTS}, and mean nothing for one."
        )
    if given.cost_model is not None:
        yield from check_expiry(given.cost_model)
