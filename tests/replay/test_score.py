"""Figures against sums taken by hand, intervals against theory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specctl.logs.tree_log import DenseLog
from specctl.policy import Chain, Policy, RootOnly, StaticTree
from specctl.replay.metrics import join_sums
from specctl.replay.rounds import Clock, Rounds, replay
from specctl.replay.score import PolicyScores, score, sums_to_score
from tests.replay.logs import log_fixtures, random_traces

POLICIES = {
    "ar": Policy(shape=RootOnly()),
    "chain": Policy(shape=Chain(num_draft_tokens=3)),
    "tree": Policy(shape=StaticTree(depth=4, top_k=3, num_tokens=9)),
}

traces, log = log_fixtures(num_prompts=6, depth=5, top_k=3)


@pytest.fixture(scope="module")
def runs(log: DenseLog) -> list[Rounds]:
    return replay(log, list(POLICIES.values()))


def scores(labels: list[str], runs: list[Rounds], clock: Clock | None = None) -> list[PolicyScores]:
    policies = [run.policy or POLICIES["ar"] for run in runs]
    return score(labels, policies, [sums_to_score(run, clock) for run in runs])


@pytest.fixture(scope="module")
def scored(runs: list[Rounds]) -> list[PolicyScores]:
    return scores(list(POLICIES), runs, clock=lambda run: 100.0 + run.outcomes.verified)


def test_pooled_figures_are_sums_of_rounds(runs: list[Rounds], scored: list[PolicyScores]) -> None:
    for run, found in zip(runs, scored, strict=True):
        o, pooled = run.outcomes, found.pooled
        calls, accepted = len(run.request), int(o.accepted.sum())
        assert pooled.calls == calls
        assert pooled.num_tokens == 6 * 128 == int(run.emitted.sum())
        assert pooled.num_accepted == accepted
        assert pooled.verified_tokens == int(o.verified.sum())
        assert pooled.ratios["mean_acceptance_length"].value == 1 + accepted / calls
        assert pooled.time_us == 100 * calls + pooled.verified_tokens
        assert pooled.ratios["tokens_per_s"].value == pytest.approx(
            1e6 * pooled.num_tokens / pooled.time_us
        )
        assert sum(pooled.histogram) == calls
        assert sum(k * n for k, n in enumerate(pooled.histogram)) == accepted
        assert pooled.expansion_support == 1.0
        assert not pooled.is_marked
        assert pooled.bounds["calls"].low == pooled.bounds["calls"].high == calls


def test_scores_do_not_depend_on_how_rounds_are_grouped(log: DenseLog) -> None:
    """Bit for bit, times included: a prompt at a time, or all together."""
    names, policies = [f"p{number:06d}" for number in range(6)], list(POLICIES.values())

    def scored_by(size: int) -> list[PolicyScores]:
        parts = [replay(log.only(names[at : at + size]), policies) for at in range(0, 6, size)]
        sums = [
            join_sums(sums_to_score(run, lambda run: run.context_tokens / 3) for run in of)
            for of in zip(*parts, strict=True)
        ]
        return score(list(POLICIES), policies, sums, baseline=1)

    single, whole = scored_by(1), scored_by(6)
    assert [one.model_dump_json() for one in single] == [one.model_dump_json() for one in whole]
    assert single[0].pooled.num_requests == single[0].pooled.num_prompts == 6


def test_categories_add_up(scored: list[PolicyScores]) -> None:
    for found in scored:
        assert [figures.group for figures in found.by_category] == ["arithmetic", "code", "prose"]
        for name in ("calls", "verified_tokens", "num_accepted", "num_tokens", "num_prompts"):
            total = sum(getattr(figures, name) for figures in found.by_category)
            assert total == getattr(found.pooled, name)


def test_the_baseline_against_itself_is_exactly_one(scored: list[PolicyScores]) -> None:
    """Its interval is n/a, like all others over six prompts."""
    for interval in scored[0].pooled.against.values():
        assert interval.text(".1f") == "1.0 [n/a]"
    calls = scored[2].pooled.against["calls"]
    assert calls.value == scored[2].pooled.calls / scored[0].pooled.calls


def test_unsupported_policies_are_marked(tmp_path: Path) -> None:
    from specctl.logs.trace_set import TraceSet

    random_traces(tmp_path / "traces", depth=3, top_k=3)
    log = DenseLog.open(TraceSet.open(tmp_path / "traces"))
    deep = Policy(shape=StaticTree(depth=5, top_k=3, num_tokens=12))
    [found] = scores(["deep"], replay(log, [deep]))
    assert found.pooled.is_marked
    assert 0 < found.pooled.censored_share < 1
    bounds = found.pooled.bounds["calls"]
    assert bounds.low < found.pooled.calls <= bounds.high


def test_an_undefined_figure_has_no_interval(scored: list[PolicyScores]) -> None:
    use = scored[0].pooled.ratios["draft_utilisation"]  # plain decoding drafts nothing
    assert np.isnan([use.value, use.low, use.high]).all()
