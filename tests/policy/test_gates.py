"""ECHO's gates: a drawing checked by hand, and an independent telling with plain Python lists."""

from __future__ import annotations

import math

import pytest
import torch

from specctl.policy import SparseGates, build_shape
from specctl.policy.echo import log_threshold
from tests.policy.drafts import (
    A,
    B,
    C,
    D,
    Probabilities,
    grow,
    hand_law,
    paths_of,
    play,
    random_law,
    uniform_law,
)

# Joint probabilities of hand_law: a .6, b .3, c .06, d .04; below a: aa .36, ab .18, ac .036,
# ad .024; below b: ba .24, bc .03, bb and bd .015; below aa: aaa .216, aad .108, aab and aac .018.


def gates(**changes: object) -> SparseGates:
    fields = {"depth": 3, "width": 1, "max_width": 3, "gate_levels": (2,), "thresholds": (0.3,)}
    return SparseGates(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("record", "paths", "expansions"),
    [
        # Open gates: one node a level down to the depth cap.
        (gates(), [(), (A,), (A, A), (A, A, A)], 2),
        # Level 2 is at .36: its gate closes and the level is widened to aa, ab, ac.
        (gates(thresholds=(0.5,)), [(), (A,), (A, A), (A, B), (A, C)], 1),
        # So does level 1 at .6: a, b, c and nothing deeper is drafted.
        (gates(gate_levels=(1,), thresholds=(0.7,)), [(), (A,), (B,), (C,)], 0),
        # The first gate that closes counts.
        (gates(gate_levels=(1, 2), thresholds=(0.5, 0.5)), [(), (A,), (A, A), (A, B), (A, C)], 1),
        # At the deepest level a gate still widens, although nothing would follow.
        (
            gates(gate_levels=(3,), thresholds=(0.3,), max_width=2),
            [(), (A,), (A, A), (A, A, A), (A, A, D)],
            2,
        ),
    ],
)
def test_the_tree_by_hand(
    record: SparseGates, paths: list[tuple[int, ...]], expansions: int
) -> None:
    _, tree, drafter = grow(build_shape(record), [hand_law])
    assert paths_of(tree) == paths
    assert drafter.num_expansions == expansions, "nothing is drafted behind a closed gate"


@pytest.mark.parametrize(
    ("threshold", "level"), [(0.0, 0), (0.25, 0), (0.2500001, 1), (1.0, 1), (0.1, 0)]
)
def test_a_confidence_on_the_threshold_passes(threshold: float, level: int) -> None:
    record = gates(gate_levels=(1,), thresholds=(threshold,), depth=1, max_width=2)
    assert play(build_shape(record), [uniform_law]).plan.stopped_at.tolist() == [level]


@pytest.mark.parametrize("prob", [0.1, 0.3, 1 / 3, 0.7])
def test_thresholds_are_exact_in_float32(prob: float) -> None:
    rounded, exact = torch.tensor(log_threshold(prob)), math.log(prob)
    assert rounded.double() <= exact < torch.nextafter(rounded, torch.tensor(math.inf)).double()
    assert log_threshold(0.0) == -math.inf


def told_plainly(record: SparseGates, law: Probabilities) -> tuple[set[tuple[int, ...]], int]:
    """The same algorithm over paths and plain floats: kept paths and the level that stopped."""
    bars = dict(zip(record.gate_levels, record.thresholds, strict=True))
    kept, level = [()], {(): 1.0}
    for depth in range(1, record.depth + 1):
        children = [
            (prob * p, (*path, token))
            for path, prob in level.items()
            for p, token in sorted(
                ((p, t) for t, p in enumerate(law(path))), key=lambda c: (-c[0], c[1])
            )[: record.max_width]
        ]
        children.sort(key=lambda child: -child[0])
        closed = children[0][0] < bars.get(depth, 0.0)
        best = children[: record.max_width if closed else record.width]
        kept += [path for _, path in best]
        level = {path: prob for prob, path in best}
        if closed:
            return set(kept[: record.num_tokens]), depth
    return set(kept[: record.num_tokens]), 0


RECORDS = [
    SparseGates(gate_levels=(1, 3), thresholds=(0.3, 0.1), depth=4, width=3, max_width=6),
    SparseGates(gate_levels=(2,), thresholds=(0.2,), depth=5, width=1, max_width=8),
    SparseGates(gate_levels=(1, 2, 3), thresholds=(0.2, 0.15, 0.1), depth=3, width=2, max_width=2),
    SparseGates(
        gate_levels=(1, 4), thresholds=(0.3, 0.1), depth=6, width=2, max_width=5, num_tokens=8
    ),
]


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_rows_of_a_batch_equal_the_plain_telling(record: SparseGates) -> None:
    laws = [random_law(seed, sharpness=1.0 + seed % 4) for seed in range(16)]
    rule = build_shape(record)
    given, levels = play(rule, laws), set()
    for row, law in enumerate(laws):
        wanted, level = told_plainly(record, law)
        assert set(paths_of(given.tree, row)) == wanted
        reached = level if level <= rule.max_depth else 0
        assert int(given.plan.stopped_at[row]) == reached
        levels.add(reached)
    assert len(levels) > 1, "rows too alike to tell"


def test_a_cap_is_not_drafted_beyond() -> None:
    record = gates(depth=8, width=3, max_width=4, num_tokens=8, thresholds=(0.0,))
    rule = build_shape(record)
    assert rule.max_depth == 3, "levels of 3, 3 and 1 nodes fill 8 tokens"
    _, tree, _ = grow(rule, [random_law(1)])
    assert tree.depth[0].tolist() == [0, 1, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize("law", [hand_law, uniform_law])
def test_no_tree_outgrows_what_the_record_states(law: Probabilities) -> None:
    for threshold in (0.0, 0.2, 1.0):
        record = gates(gate_levels=(1, 3), thresholds=(threshold, threshold), width=2, depth=3)
        rule = build_shape(record)
        _, tree, _ = grow(rule, [law] if law is uniform_law else [random_law(3)])
        assert int(tree.num_nodes[0]) <= rule.max_tokens == record.most_tokens
