"""Figures of the report: by hand on a log of five positions, and against replay on random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.logs.tree_log import DenseLog, Support
from specctl.policy import Policy, StaticTree
from specctl.replay import trace_figures as figures
from specctl.replay.rounds import replay
from specctl.replay.score import score
from specctl.report.trace_sections import SHOWN_WIDTH, densities
from specctl.results import TraceFigures
from specctl.stats import Resamples
from tests.replay.logs import random_traces
from tests.replay.reports import TWO_PROMPTS, Position, Prompt, close, live_traces, write_log

Probs = list[float]
OFF_BOUNDS = st.integers(1, 996).map(lambda numerator: numerator / 997)
"""Probabilities that no rounding moves across the bound of a bin."""
PROBS = st.lists(OFF_BOUNDS, min_size=1, max_size=30)


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> TraceFigures:
    return figures.trace_figures(write_log(tmp_path_factory.mktemp("log") / "traces"))


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
    positions = [Position((1, 3), 1.0), Position((1,), 1.0), *[Position((), 1.0)] * 3]
    evidence = figures.trace_figures(write_log(tmp_path / "log", [Prompt("a", "", positions)]))
    assert [depth.num_censored for depth in evidence.depths] == [0, 0]
    assert close(evidence.depths[1].marginal_prob.value, 1 / 5)


def fates(depths: Any) -> list[tuple[int, int, int]]:
    return [(depth.num_accepted, depth.num_rejected, depth.num_unknown) for depth in depths]


def test_confidence_by_hand(evidence: TraceFigures) -> None:
    # Depth 1, accepted .6 .25 .6; rejected .6 three times, .25 four times; 21 pairs, ties half:
    # each .6 wins 4 + 3/2, the .25 ties 4/2.
    nodes, layers = evidence.confidence.nodes, evidence.confidence.layers
    assert close(nodes[0].auc.value, (2 * 5.5 + 2) / 21)
    # Depth 2: n4 of p1 is accepted, both children of n1 at p3 unknown, the other 17 rejected.
    assert fates(nodes) == [(3, 7, 0), (1, 17, 2)]
    assert fates(layers) == [(3, 2, 0), (1, 3, 1)], "one row a round and depth"
    assert close(layers[0].auc.value, 0.5)  # the best node has .6 everywhere: it tells nothing


def test_reference_rounds_tcr_and_tau_by_hand(evidence: TraceFigures) -> None:
    # The whole tree is submitted: a needs one round, which ends at n4, fifth of six; b needs two.
    assert evidence.tree == "eagle2:depth=2:top_k=2:num_tokens=7"
    assert evidence.num_reference == 3
    assert close(evidence.tau.value, 1 + 2 / 3)
    found = evidence.ranks
    assert found is not None
    assert (found.whole.num_rounds, found.num_empty, found.num_cut) == (1, 2, 0)
    assert found.whole.counts == (0, 0, 0, 0, 1, 0)
    assert found.whole.quantiles == {"p50": 5, "p90": 5, "p99": 5}
    assert [share.value for share in found.top_shares.values()] == [0, 0, 0]
    by_name = {category.name: category.tau.value for category in evidence.categories}
    assert by_name == {"maths": 3.0, "prose": 1.0}


def test_phi_sums_the_entropies_of_the_likeliest_path(evidence: TraceFigures) -> None:
    # Two distributions of 0.5, 1 and 1.5 nats each: Φ 1, 2, 3 for accepted 2, 0, 0.
    found = evidence.phi
    assert found is not None
    assert (found.depth, found.num_rounds, found.num_left_out) == (2, 3, 0)
    assert [round(b.mean_phi, 5) for b in found.bins] == [1.0, 2.0, 3.0]
    assert [b.tau.value for b in found.bins] == [3.0, 1.0, 1.0]
    assert found.spearman is not None
    assert close(found.spearman, -np.sqrt(3) / 2)


def test_static_settings_by_hand(evidence: TraceFigures) -> None:
    points = {(p.top_k, p.depth, p.num_tokens): p for p in evidence.statics}
    assert set(points) == set(figures.settings_of(Support(2, 2, 2, nested=True)))
    # The chain of 1 takes n1 at p1 and p3 of a, nothing of b; root and five best nodes hold n4.
    assert [points[key].calls for key in ((1, 1, 2), (2, 2, 6))] == [4, 3]
    front = {key for key, point in points.items() if point.on_front}
    assert front == {(1, 1, 2), (2, 2, 6)}


def test_static_settings_and_reference_equal_replay(tmp_path: Path) -> None:
    traces = random_traces(tmp_path / "log", num_prompts=4, depth=5, top_k=4)
    log, found = DenseLog.open(traces), figures.trace_figures(traces)
    assert found.tree is not None
    points = [found.statics[i] for i in range(0, len(found.statics), 5)]
    shapes = [StaticTree(depth=p.depth, top_k=p.top_k, num_tokens=p.num_tokens) for p in points]
    tree = figures.reference_tree(log.support)
    assert found.tree.startswith(f"eagle2:depth={tree.depth}:")
    policies = [Policy(shape=shape) for shape in (*shapes, tree)]
    *scored, reference = score(["-"] * len(policies), replay(log, policies))
    for point, other in zip(points, scored, strict=True):
        ratios = other.pooled.ratios
        assert point.calls == other.pooled.calls
        assert close(point.tau.value, ratios["mean_acceptance_length"].value)
        assert close(point.verified_per_token.value, ratios["verified_per_token"].value)
    assert found.num_reference == reference.pooled.calls
    assert close(found.tau.value, reference.pooled.ratios["mean_acceptance_length"].value)


def test_unsupported_settings_are_kept_off_the_front(tmp_path: Path) -> None:
    # Without nesting, narrow trees ask for nodes that the log's own frontier passed over.
    traces = random_traces(tmp_path / "log", depth=5, top_k=4, nested=False)
    points = figures.trace_figures(traces).statics
    lacking = [point for point in points if not point.is_supported]
    assert lacking
    assert not any(point.on_front for point in lacking)


@pytest.mark.parametrize("block_rows", [1, 5, 7, 20])
def test_confidence_does_not_depend_on_the_size_of_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evidence: TraceFigures, block_rows: int
) -> None:
    monkeypatch.setattr("specctl.logs.tree_log.CHUNK_NODES", block_rows)
    assert figures.trace_figures(write_log(tmp_path / "log")).confidence == evidence.confidence


@settings(max_examples=50)
@given(PROBS, PROBS)
def test_auc_is_that_of_all_pairs_within_its_resolution(accepted: Probs, rejected: Probs) -> None:
    probs = np.array([*accepted, *rejected])
    num = len(probs)
    counts = figures.ConfidenceCounts(1, 1)
    fate = np.array([1] * len(accepted) + [0] * len(rejected), np.int8)
    counts.add(np.zeros(num, np.int32), np.ones(num, np.int64), np.log(probs), fate)
    [found] = counts.separations(Resamples.draw(1))
    wins = [(a > r) + 0.5 * (a == r) for a in accepted for r in rejected]
    assert abs(found.auc.value - np.mean(wins)) <= found.auc_resolution + 1e-9


def test_densities_integrate_to_one() -> None:
    counts = tuple(np.random.default_rng(0).integers(0, 9, figures.NUM_BINS).tolist())
    assert close(float(densities(counts, figures.EDGES).sum()) * SHOWN_WIDTH, 1.0)
    assert densities((0,) * figures.NUM_BINS, figures.EDGES).sum() == 0


def test_live_fate_follows_the_targets_choices(tmp_path: Path) -> None:
    """Unverified nodes are known where their parent was verified, and unknown only below.

    root ┬ 1 no ─ 4 (unseen: off the path)
         └ 2 yes ┬ 5 yes, not submitted ─ 9 unknown
                 └ 6 no
    """
    columns = {"parent": (-1, 0, 0, 1, 2, 2, 5), "index": (0, 1, 2, 4, 5, 6, 9)}
    columns |= {"depth": (0, 1, 1, 2, 2, 2, 3)}
    match = [None, False, True, None, True, False, None]
    traces = live_traces(tmp_path / "live", **columns, match=match, offered_depth=3)
    assert fates(figures.trace_figures(traces).confidence.nodes) == [
        (2, 2, 0),
        (2, 4, 0),
        (0, 0, 2),
    ]


def test_reference_tree_stays_within_the_log() -> None:
    small = StaticTree(depth=2, top_k=3, num_tokens=13)
    assert figures.reference_tree(Support(3, 3, 2, nested=True)) == small
    assert figures.reference_tree(Support(10, 10, 11, nested=True)) == StaticTree()


def test_one_prompt_has_no_interval(tmp_path: Path) -> None:
    evidence = figures.trace_figures(write_log(tmp_path / "log", TWO_PROMPTS[:1]))
    assert evidence.tau.text(".1f") == f"{evidence.tau.value:.1f} [n/a]"
