"""Figures of the papers: every number against a plain telling of it, node by node."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from scripts.synthetic_trace import header, tables_of
from specctl.collect.trace_writer import TraceWriter
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import FullTree, Policy
from specctl.replay.paper_figures import ENTROPY_BOUNDS, MAX_PLACES
from specctl.replay.rounds import replay
from specctl.replay.score import score
from specctl.replay.trace_figures import ReferenceRounds, _terminal_ranks, trace_figures
from specctl.results import Spread, StopThresholds, TargetMargins, TraceFigures
from specctl.runtime.policy_spec import resolve_policy
from specctl.stats import Resamples
from tests.replay.logs import PlainTree, plain_trees, static_tree
from tests.replay.reports import Position, Prompt, close, live_traces, write_log

DEPTH, TOP_K, NUM_PROMPTS = 4, 3, 6


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    """Random trees, with what the target says at every node that it sees: a few logits below 0,
    drafts of every rank."""
    folder, random = tmp_path_factory.mktemp("papers") / "traces", np.random.default_rng(3)
    policy = Policy(shape=FullTree(depth=DEPTH, top_k=TOP_K, nested=True))
    generator = torch.Generator().manual_seed(5)
    with TraceWriter.open(folder, header(policy)) as writer:
        for number in range(NUM_PROMPTS):
            tables = tables_of(number, policy, generator)
            tables["nodes"] = judged(tables["nodes"], random)
            writer.commit([f"p{number:06d}"], tables)
    return TraceSet.open(folder)


def judged(nodes: pa.Table, random: np.random.Generator) -> pa.Table:
    """With the target's columns behind nodes on the path: one distribution for all siblings."""
    size = nodes.num_rows
    rows, index, parent = (nodes[n].to_numpy() for n in ("round_idx", "node_idx", "parent_idx"))
    on_path = {
        (row, node)
        for row, node, flag in zip(rows, index, nodes["path_accepted"].to_pylist(), strict=True)
        if flag
    }
    columns = {name: [None] * size for name in JUDGED}
    drawn: dict[tuple[int, int], tuple[float, ...]] = {}
    for place in range(size):
        above = (rows[place], parent[place])
        if above not in on_path:
            continue
        if above not in drawn:
            first = random.normal(3, 2)
            drawn[above] = first, first - random.exponential(1), random.uniform(), random.random()
        best, second, prob, distance = drawn[above]
        rank = 1 + (3 * place + rows[place]) % 8
        logp = {1: math.log(prob), 2: math.log(prob) + second - best}.get(rank, -9.0)
        for name, value in zip(JUDGED, (logp, rank, best, second, distance), strict=True):
            columns[name][place] = value
    for name, values in columns.items():
        at = nodes.schema.get_field_index(name)
        field = nodes.schema.field(at)
        nodes = nodes.set_column(at, field, pa.array(values, field.type))
    return nodes


JUDGED = ("target_logp", "target_rank", "target_top1_logit", "target_top2_logit", "js_distance")


@pytest.fixture(scope="module")
def figures(traces: TraceSet) -> TraceFigures:
    return trace_figures(traces)


@pytest.fixture(scope="module")
def trees(traces: TraceSet) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Nodes of every position, as the table has them."""
    found = defaultdict(list)
    for row in traces.scan("nodes").collect().iter_rows(named=True):
        found[str(row["request_id"]), row["round_idx"]].append(row)
    return found


def test_acceptance_by_entropy_and_rank(figures: TraceFigures, trees: Any) -> None:
    cells: dict[tuple[int, int], list[tuple[float, bool]]] = defaultdict(list)
    for nodes in trees.values():
        for node in nodes[1:]:
            accepted = node["path_accepted"]
            if nodes[node["parent_idx"]]["path_accepted"] and accepted is not None:
                low = [b for b in ENTROPY_BOUNDS if b <= node["parent_entropy"]][-1]
                cell = ENTROPY_BOUNDS.index(low), node["sibling_rank"]
                cells[cell].append((math.exp(node["draft_logp"]), accepted))
    found = figures.entropy_ranks
    assert found is not None
    assert len(cells) > 10
    for row in range(len(ENTROPY_BOUNDS)):
        for rank in range(TOP_K):
            told = cells[row, rank]
            assert found.num_nodes[row][rank] == len(told)
            prob, share = found.mean_prob[row][rank], found.accepted_frac[row][rank]
            if told:
                assert prob == pytest.approx(np.mean([p for p, _ in told]), rel=1e-5)
                assert share == pytest.approx(np.mean([a for _, a in told]))
            else:
                assert math.isnan(prob)
                assert math.isnan(share)


def first_children(trees: Any) -> list[list[dict[str, Any]]]:
    found = ([node for node in nodes if node["depth"] == 1] for nodes in trees.values())
    return [nodes for nodes in found if nodes[0]["target_rank"] is not None]


def test_margins_and_ranks(figures: TraceFigures, trees: Any) -> None:
    found, told = figures.margins, first_children(trees)
    assert found is not None
    best, second = (
        np.array([n[0][f"target_top{i}_logit"] for n in told], np.float64) for i in (1, 2)
    )
    rank = np.array([n[0]["target_rank"] for n in told])
    defined = (best > 0) & (second > 0)
    with np.errstate(invalid="ignore"):
        low = defined & (second / best > 0.9)
    assert 0 < (best < 0).sum() < (~defined).sum() < len(best)
    assert (found.num_positions, found.num_negative) == (len(best), (best < 0).sum())
    assert found.num_undefined == (~defined).sum()
    assert close(found.low_margin.value, low.mean())
    for ranks, chosen in ((found.low_ranks, low), (found.other_ranks, ~low)):
        kinds = (rank == 1, rank == 2, rank > 2)
        assert ranks == tuple(int((chosen & kind).sum()) for kind in kinds)
    for counts, values in (
        (found.logit_ratios, (second / best)[defined]),
        (found.prob_ratios, np.exp(second - best)),
    ):
        places = np.minimum((values / 0.02).astype(int), 49)
        assert np.abs(np.array(counts) - np.bincount(places, minlength=50)).sum() <= 2  # on bounds
        assert sum(counts) == len(values)
    assert sum(found.logits) == len(best)


def test_probabilities_of_the_best_token_are_told_by_either_of_the_two(
    figures: TraceFigures, trees: Any
) -> None:
    """By a draft of rank 1, by one of rank 2 and the logits, or by none."""
    known = {}
    for nodes in first_children(trees):
        best, second = (nodes[0][f"target_top{i}_logit"] for i in (1, 2))
        by_rank = {n["target_rank"]: n["target_logp"] for n in nodes}
        logp = by_rank.get(1, by_rank.get(2, math.nan) + best - second)
        known[best, second] = math.exp(logp)
    assert figures.margins is not None
    shown = figures.margins.sample
    assert 0 < sum(math.isnan(prob) for *_, prob, _ in shown) < len(shown) / 2
    for first, second, prob, _ in shown:
        near = [p for (a, b), p in known.items() if abs(a - first) + abs(b - second) < 1e-5]
        assert any(p == pytest.approx(prob, rel=1e-4, nan_ok=True) for p in near)


class PlainAdaSD:
    """AdaSD's drafting rule as section 4.3 prints it, over one request, in plain Python."""

    def __init__(self, trees: list[list[dict[str, Any]]]) -> None:
        self.thresholds: list[float] = []
        self.tested: list[tuple[bool, float, float]] = []
        self.num_rounds, here, rejected = 0, 0, list[float]()
        while here < len(trees):
            threshold = float(np.mean(rejected)) if rejected else math.inf
            accepted, tested = self.round(trees[here], threshold)
            step = min(accepted + 1, len(trees) - here)
            self.thresholds += [threshold] * step
            self.tested += tested
            rejected += [entropy for ok, entropy, _ in tested if not ok]
            self.num_rounds, here = self.num_rounds + 1, here + accepted + 1

    @staticmethod
    def round(nodes: list[dict[str, Any]], threshold: float) -> Any:
        place, accepted, tested = 0, 0, []
        for _ in range(DEPTH):
            below = [n for n in nodes if n["parent_idx"] == place and n["sibling_rank"] == 0]
            if not below:
                break
            [node] = below
            if node["path_accepted"] is None:  # the text ended
                break
            tested.append((node["path_accepted"], node["parent_entropy"], node["js_distance"]))
            if not node["path_accepted"]:
                break
            accepted, place = accepted + 1, node["node_idx"]
            if node["parent_entropy"] > threshold:
                break
        return accepted, tested


def test_thresholds_and_tokens_of_adasd(figures: TraceFigures, trees: Any) -> None:
    requests = defaultdict(list)
    for (request, _), nodes in sorted(trees.items()):
        requests[request].append(nodes)
    told = [PlainAdaSD(requests[name]) for name in sorted(requests)]
    found = figures.thresholds
    assert isinstance(found, StopThresholds)
    assert found.policy == f"adasd-paper:window={DEPTH}"
    assert (found.num_requests, found.num_unsupported) == (NUM_PROMPTS, 0)
    assert found.num_rounds == sum(one.num_rounds for one in told)
    tested = [token for one in told for token in one.tested]
    for fate, signals in ((True, found.accepted), (False, found.rejected)):
        assert signals.num_tokens == sum(ok is fate for ok, *_ in tested) > 100
        for index, spread in ((1, signals.entropy), (2, signals.distance)):
            means = [np.mean([t[index] for t in one.tested if t[0] is fate]) for one in told]
            assert spread is not None
            assert spread.num_requests == NUM_PROMPTS
            assert spread.mean == pytest.approx(np.mean(means), rel=1e-5)
            assert spread.third == pytest.approx(np.quantile(means, 0.75), rel=1e-5)
        counts = signals.distances
        assert sum(counts) == signals.num_tokens
        expected = np.mean([distance for ok, _, distance in tested if ok is fate])
        middles = (np.arange(len(counts)) + 0.5) / len(counts)
        assert abs(np.average(middles, weights=counts) - expected) < 0.01  # half a bin
    table = np.array([one.thresholds for one in told])
    grid = np.array(found.positions) - 1
    assert len(grid) == min(MAX_PLACES, table.shape[1])
    shown = np.where(np.isinf(table), np.nan, table)[:, grid]
    whole = np.isfinite(shown).any(0)
    expected = np.nanquantile(shown[:, whole], (0.25, 0.5, 0.75), axis=0)
    assert np.allclose(np.array(found.quartiles)[:, whole], expected, rtol=1e-5)
    assert np.isnan(np.array(found.quartiles)[:, ~whole]).all()
    for path in found.paths:
        assert any(np.allclose(path, one, rtol=1e-5, equal_nan=True) for one in shown)


# ----------------------------------------------------------------- rounds of trees


def walked(requests: list[list[PlainTree]], depth: int, top_k: int, size: int) -> Any:
    """Rounds of a static tree: prompt, accepted, rank of the last accepted, whether it was cut."""
    for prompt, trees in enumerate(requests):
        here = 0
        while here < len(trees):
            tree = trees[here]
            order = [n for n in static_tree(tree, depth, top_k, size) if n]
            path = [n for n in order if tree.on_path[n]]
            accepted = min(len(path), tree.remaining)
            rank = max((place for place, n in enumerate(order, 1) if n in path), default=0)
            yield prompt, accepted, rank, accepted == tree.remaining and accepted < depth
            here += accepted + 1


def test_profiles_by_rank(figures: TraceFigures, traces: TraceSet) -> None:
    assert figures.tree is not None
    depth, top_k, size = (int(word.partition("=")[2]) for word in figures.tree.split(":")[1:])
    rounds = list(walked(plain_trees(traces), depth, top_k, size))
    categories = dict(enumerate(("arithmetic", "code", "prose") * 2))
    ranks = figures.ranks
    assert ranks is not None
    assert sorted(str(one.name) for one in ranks.categories) == ["arithmetic", "code", "prose"]
    sizes = [one.num_rounds for one in ranks.categories]
    assert sizes == sorted(sizes, reverse=True)
    assert ranks.whole.name is None
    for profile in (ranks.whole, *ranks.categories):
        lengths = defaultdict(list)
        for prompt, accepted, rank, is_cut in rounds:
            if rank and not is_cut and profile.name in (None, categories[prompt]):
                lengths[rank].append(1 + accepted)
        assert profile.num_rounds == sum(map(len, lengths.values()))
        for rank, (num, tau) in enumerate(zip(profile.counts, profile.tau, strict=True), 1):
            assert num == len(lengths[rank])
            if num:
                assert close(tau.value, np.mean(lengths[rank]))
            else:
                assert math.isnan(tau.value)


def test_a_profile_by_hand(tmp_path: Path) -> None:
    """One round ends at n4, fifth of six; both levels have an entropy of 0.5 nats."""
    positions = [Position((1, 4), 0.5), Position((), 0.5), Position((), 0.5), Position((), 0.5)]
    ranks = trace_figures(write_log(tmp_path / "log", [Prompt("a", "", positions)])).ranks
    assert ranks is not None
    assert ranks.categories == (), "none has a name"
    whole = ranks.whole
    assert whole.counts == (0, 0, 0, 0, 1, 0)
    assert (whole.tau[4].value, whole.mean_phi[4]) == (3.0, 1.0)
    assert math.isnan(whole.mean_phi[0])


def test_phi_of_other_depths_does_not_count() -> None:
    """Of three rounds that end at rank 1, two have a Φ of 3 levels and one of 2."""
    prompt, accepted, submitted, tcr = (np.full(3, n, np.int32) for n in (0, 1, 4, 1))
    phi, depth, no = np.array([1.0, 2.0, 9.0]), np.array([3, 3, 2], np.int32), np.zeros(3, np.bool_)
    rounds = ReferenceRounds(prompt, prompt, accepted, submitted, tcr, phi, depth, no, no)
    ranks = _terminal_ranks(rounds, ["code"], Resamples.draw(1))
    assert ranks is not None
    for found in (ranks.whole, *ranks.categories):
        assert (found.counts, found.mean_phi[0]) == ((3, 0, 0), 1.5)


def test_utilisation_of_requests(traces: TraceSet) -> None:
    words = ("ar", "chain:num_draft_tokens=3", "eagle2:depth=3:top_k=3:num_tokens=8")
    runs = replay(DenseLog.open(traces), [resolve_policy(word).policy for word in words])
    plain, chain, tree = score(words, runs)
    assert plain.pooled.utilisation is None, "nothing was drafted"
    requests = plain_trees(traces)
    for scores, sizes in ((chain, (3, 1, 4)), (tree, (3, 3, 8))):
        found = np.zeros((len(requests), 2))
        for prompt, accepted, *_ in walked(requests, *sizes):
            found[prompt] += accepted, 3
        told = found[:, 0] / found[:, 1]
        spread = scores.pooled.utilisation
        assert spread is not None
        values = (spread.low, spread.first, spread.median, spread.third, spread.high)
        assert np.allclose(values, np.quantile(told, (0.05, 0.25, 0.5, 0.75, 0.95)))
        assert spread.mean == pytest.approx(told.mean())
        [code] = [f.utilisation for f in scores.by_category if f.group == "code"]
        assert code is not None
        assert code.num_requests == 2
        assert code.mean == pytest.approx(told[[1, 4]].mean())


# ----------------------------------------------------------------- without data


def test_logs_without_the_columns_give_no_figure(tmp_path: Path) -> None:
    dense = trace_figures(write_log(tmp_path / "dense"))
    assert dense.margins is None
    assert dense.thresholds is not None
    for signals in (dense.thresholds.accepted, dense.thresholds.rejected):
        assert signals.distance is None
        assert not any(signals.distances)


LIVE: dict[str, Any] = {
    "parent": (-1, 0, 0),
    "index": (0, 1, 2),
    "depth": (0, 1, 1),
    "match": (None, True, None),
    "offered_depth": 1,
    "top_k": 2,
    "sibling_rank": (0, 0, 1),
    "draft_logp": np.log((1.0, 0.6, 0.25)),
    "parent_entropy": (0.0, 1.2, 1.2),
    "target_top1_logit": (0.0, 5.0, 5.0),
    "target_top2_logit": (0.0, 4.6, 4.6),
    "target_rank": (0, 2, 1),
    "target_logp": np.log((1.0, 0.4 * np.exp(-0.4), 0.4)),
}


def test_live_rounds_by_hand(tmp_path: Path) -> None:
    """Two equal rounds; nobody looked at the second child, so its fate is unknown and its rank is
    not. No other policy can be replayed on them."""
    found = trace_figures(live_traces(tmp_path / "live", **LIVE))
    assert found.thresholds is None
    children = found.entropy_ranks
    assert children is not None
    assert children.num_nodes[2] == (2, 0)  # from 1 to 1.5 nats
    assert close(children.mean_prob[2][0], 0.6)
    assert children.accepted_frac[2][0] == 1
    assert sum(map(sum, children.num_nodes)) == 2
    margins = found.margins
    assert margins is not None
    assert (margins.num_positions, margins.low_ranks) == (2, (0, 2, 0))
    assert margins.low_margin.value == 1
    assert [prob for *_, prob, _ in margins.sample] == pytest.approx([0.4, 0.4], rel=1e-6)


def test_drafts_that_were_drawn_have_no_rank(tmp_path: Path) -> None:
    policy = resolve_policy("chain:num_draft_tokens=1+ratio").policy
    found = trace_figures(live_traces(tmp_path / "live", **LIVE, policy=policy))
    assert found.entropy_ranks is None
    assert found.margins is None


def test_spreads_leave_out_what_is_not_known() -> None:
    spread = Spread.of(np.array([1.0, np.nan, 3.0]))
    assert spread is not None
    assert (spread.num_requests, spread.median, spread.mean) == (2, 2.0, 2.0)
    assert Spread.of(np.array([np.nan])) is None


def test_results_are_read_as_they_were_written(figures: TraceFigures) -> None:
    assert figures.margins is not None
    again = TargetMargins.model_validate_json(figures.margins.model_dump_json())
    assert again.low_ranks == figures.margins.low_ranks
    assert any(math.isnan(prob) for *_, prob, _ in again.sample)
