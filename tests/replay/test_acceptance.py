"""Figures of the report: by hand on a log of five positions, and against replay on random ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.logs.tree_log import DenseLog
from specctl.policy import Policy
from specctl.replay.acceptance import TraceFigures, reference_tree, trace_figures
from specctl.replay.rounds import replay
from specctl.replay.score import score, sums_to_score
from tests.replay.logs import random_traces
from tests.replay.reports import Prompt, close, live_traces, write_log


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> TraceFigures:
    return trace_figures(write_log(tmp_path_factory.mktemp("log") / "traces"))


def test_acceptance_by_depth_leaves_out_what_the_text_did_not_tell(evidence: TraceFigures) -> None:
    # Depth 2 is asked of a's three positions; at p3 the text ended, so two are at risk.
    first, second = evidence.depths
    for depth, at_risk, accepted, censored in ((first, 5, 3, 0), (second, 2, 1, 1)):
        counted = depth.num_at_risk, depth.num_accepted, depth.num_censored
        assert counted == (at_risk, accepted, censored)
        assert close(depth.conditional_prob.value, accepted / at_risk)
    assert close(second.marginal_prob.value, 3 / 5 * 1 / 2)


def test_marginal_acceptance_is_the_plain_share_where_nothing_is_censored(tmp_path: Path) -> None:
    # The last positions take nothing and no path runs to the end of a text.
    positions = [(1, 3), (1,), (), (), ()]
    evidence = trace_figures(write_log(tmp_path / "log", [Prompt("a", "", positions)]))
    assert [depth.num_censored for depth in evidence.depths] == [0, 0]
    assert close(evidence.depths[1].marginal_prob.value, 1 / 5)


def test_reference_rounds_and_tau_by_hand(evidence: TraceFigures) -> None:
    # The whole tree is submitted: a needs one round, which ends at n4; b needs two.
    assert evidence.tree == "eagle2:2x2/7"
    assert (evidence.num_reference, evidence.num_unsupported) == (3, 0)
    assert close(evidence.tau.value, 1 + 2 / 3)
    by_name = {category.name: category.tau.value for category in evidence.categories}
    assert by_name == {"maths": 3.0, "prose": 1.0}
    assert [category.num_rounds for category in evidence.categories] == [1, 2]


def test_live_rounds_with_a_draft_are_their_own_reference(tmp_path: Path) -> None:
    found = trace_figures(live_traces(tmp_path / "live", offered_depth=1))
    assert (found.kind, found.tree, found.support) == ("live", None, None)
    assert (found.num_reference, found.tau.value) == (2, 2.0)


def test_reference_rounds_equal_replay(tmp_path: Path) -> None:
    traces = random_traces(tmp_path / "log", num_prompts=4, depth=5, top_k=4, nested=False)
    log, found = DenseLog.open(traces), trace_figures(traces)
    policies = [Policy(shape=reference_tree(log.support))]
    runs = replay(log, policies)
    [scored] = score(["-"], policies, [sums_to_score(run) for run in runs])
    assert found.num_reference == scored.pooled.calls
    assert found.num_unsupported == int((runs[0].outcomes.missing > 0).sum())
    assert close(found.tau.value, scored.pooled.tau.value)
    taus = {figures.group: figures.tau.value for figures in scored.by_category}
    assert {one.name: one.tau.value for one in found.categories} == pytest.approx(taus)
