"""Shapes with memory, against a telling in plain Python that keeps lists."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from specctl.errors import UsageError
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, LogChunk
from specctl.policy import EntropyStop, Policy, StaticTree, SurvivalBudget, build_shape
from specctl.replay.outcomes import online_steps
from specctl.replay.rounds import Rounds, replay, replay_chunk
from specctl.replay.submissions import submissions_of
from tests.replay.logs import PlainTree, log_fixtures, plain_trees

DEPTH = 6
Told = list[tuple[int, int, int]]
"""Accepted draft tokens, submitted nodes and drafted levels of each round."""


traces, log = log_fixtures(num_prompts=3, depth=DEPTH, top_k=3)


@dataclass
class PlainStop:
    """AdaSD's chain, one token at a time; unlimited memory."""

    record: EntropyStop
    accepted: list[float]
    rejected: list[float]

    def threshold(self) -> float:
        least = self.record.min_samples
        enough = len(self.rejected) >= least and self.rejected
        if self.record.between == "rejected":
            return sum(self.rejected) / len(self.rejected) if enough else np.inf
        if not (enough and len(self.accepted) >= least and self.accepted):
            return np.inf
        means = (sum(v) / len(v) for v in (self.accepted, self.rejected))
        return sum(means) / 2

    def round(self, tree: PlainTree, entropy: list[float]) -> tuple[int, int, int]:
        limit, node, chain, levels = self.threshold(), 0, [], 0
        for level in range(1, self.record.window + 1):
            node = tree.children[node][0]
            levels = level
            uncertain = entropy[node] > limit
            if uncertain and not self.record.keep_last and level > 1:
                break
            chain.append(node)
            if uncertain and (self.record.keep_last or level > 1):
                break
        path = [n for n in chain if tree.on_path[n]]
        self.accepted += [entropy[n] for n in path]
        self.rejected += [entropy[n] for n in chain[len(path) : len(path) + 1]]
        return min(len(path), tree.remaining), 1 + len(chain), levels


def entropies(traces: TraceSet) -> list[list[list[float]]]:
    """Of every request, position and node."""
    nodes = traces.scan("nodes").select("request_id", "round_idx", "parent_entropy").collect()
    trees = nodes.partition_by("request_id", "round_idx", maintain_order=True)
    found: dict[str, list[list[float]]] = {}
    for tree in trees:
        found.setdefault(str(tree["request_id"][0]), []).append(tree["parent_entropy"].to_list())
    return list(found.values())


def told(rounds: Rounds) -> list[Told]:
    o = rounds.outcomes
    rows = zip(o.accepted.tolist(), o.verified.tolist(), o.levels.tolist(), strict=True)
    found: list[Told] = [[] for _ in range(rounds.positions.num_requests)]
    for request, row in zip(rounds.request.tolist(), rows, strict=True):
        found[request].append(row)
    return found


def plainly(traces: TraceSet, record: EntropyStop) -> list[Told]:
    found = []
    for trees, entropy in zip(plain_trees(traces), entropies(traces), strict=True):
        stop, here, rounds = PlainStop(record, [], []), 0, []
        while here < len(trees):
            rounds.append(stop.round(trees[here], entropy[here]))
            here += rounds[-1][0] + 1
        found.append(rounds)
    return found


RECORDS = [
    EntropyStop(window=DEPTH),
    EntropyStop(window=DEPTH, min_samples=1),
    EntropyStop(window=4, min_samples=2, between="rejected"),
    EntropyStop(window=DEPTH, min_samples=1, keep_last=False),
    EntropyStop(window=DEPTH, min_samples=1, between="rejected", keep_last=False),
]


@pytest.mark.parametrize("record", RECORDS, ids=range(len(RECORDS)))
def test_replay_equals_a_plain_telling(
    traces: TraceSet, log: DenseLog, record: EntropyStop
) -> None:
    [found] = replay(log, [Policy(shape=record)])
    wanted = plainly(traces, record)
    assert told(found) == wanted
    if record.min_samples < 8:
        depths = {levels for rounds in wanted for _, _, levels in rounds}
        assert len(depths) > 2, "too tame to tell"
    assert not found.outcomes.missing.any()
    bounds = found.bounds
    calls = [len(rounds) for rounds in wanted]
    assert bounds.calls_low.tolist() == bounds.calls_high.tolist() == calls
    verified = [sum(size for _, size, _ in rounds) for rounds in wanted]
    assert bounds.verified_low.tolist() == bounds.verified_high.tolist() == verified


def test_one_requests_memory_is_no_other_requests(traces: TraceSet, log: DenseLog) -> None:
    """Requests of a chunk step together; a mixed-up row would show in any order of prompts."""
    record = EntropyStop(window=DEPTH, min_samples=1)
    together = told(replay(log, [Policy(shape=record)])[0])
    [chunk] = log.chunks()
    requests = np.arange(chunk.positions.num_requests)
    for request in requests:
        alone = replay_chunk(Policy(shape=record), chunk.take(requests == request))
        assert told(alone) == [together[request]]


def test_what_replay_shows_a_rule_is_what_a_live_round_shows(log: DenseLog) -> None:
    """The path in the submitted tree, root first, by depth."""
    record = EntropyStop(window=DEPTH, top_k=3, num_tokens=14, min_samples=1)
    [chunk] = log.chunks()
    step = next(online_steps(build_shape(record), chunk))
    path, tree = step.outcome.path, step.outcome.tree
    for row in range(len(path)):
        nodes = [node for node in path[row].tolist() if node >= 0]
        assert nodes[0] == 0
        assert tree.depth[row, nodes].tolist() == list(range(len(nodes)))
        assert tree.parent[row, nodes].tolist() == [-1, *nodes[:-1]]
        assert len(nodes) == int(step.draft.on_path[row].sum())


def shallower(chunk: LogChunk, depth: int) -> LogChunk:
    """The chunk as if only `depth` levels had been logged."""
    level = torch.full((chunk.num_nodes,), -1)
    level[chunk.root] = 0
    parents = chunk.root
    for below in range(1, DEPTH + 1):
        children = chunk.first_child[parents]
        children = (children[children >= 0][:, None] + torch.arange(3)).flatten()
        level[children] = below
        parents = children
    assert (level >= 0).all()
    return replace(chunk, first_child=chunk.first_child.masked_fill(level >= depth, -1))


@pytest.mark.parametrize(
    "record",
    [
        EntropyStop(window=DEPTH, min_samples=1),
        EntropyStop(window=DEPTH, min_samples=1, between="rejected"),
        EntropyStop(window=DEPTH, min_samples=1, top_k=2, num_tokens=9),
    ],
    ids=["midpoint", "rejected", "tree"],
)
@pytest.mark.parametrize("depth", [1, 2, 4, 5])
def test_bounds_hold_whatever_the_log_lacks(log: DenseLog, record: EntropyStop, depth: int) -> None:
    policy = Policy(shape=record)
    [chunk] = log.chunks()
    whole, part = (replay_chunk(policy, of) for of in (chunk, shallower(chunk, depth)))
    assert part.outcomes.missing.any()
    calls, verified = (np.bincount(whole.request, of) for of in (None, whole.outcomes.verified))
    found = part.bounds
    ordered = (
        [found.calls_low, calls, found.calls_high],
        [found.verified_low, verified, found.verified_high],
    )
    assert all((np.diff(rows, axis=0) >= 0).all() for rows in ordered)
    assert (found.calls_low > 1).all()


def test_what_replay_cannot_tell_of_it_is_refused(log: DenseLog) -> None:
    record = EntropyStop(window=DEPTH)
    shared = Policy(shape=record, budget=SurvivalBudget(max_tokens=9))
    with pytest.raises(UsageError, match="learns from what the budget lets it verify"):
        submissions_of(log, [shared])
    with pytest.raises(UsageError, match="learns from what the budget lets it verify"):
        submissions_of(log, [Policy(shape=StaticTree()), Policy(shape=record)], keep_nodes=True)


def test_results_do_not_depend_on_the_threads(log: DenseLog) -> None:
    policy = Policy(shape=EntropyStop(window=DEPTH, min_samples=1))
    one, two = (replay(log, [policy], num_threads=n)[0] for n in (1, 2))
    assert told(one) == told(two)
