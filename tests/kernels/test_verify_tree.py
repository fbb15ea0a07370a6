"""`verify_tree` and `walk_tree` against the loops of their docstrings. Captured rounds accept by
them as the rules of `specctl.policy` do, which judge all nodes first: test_captured_rounds.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.kernels.verify_tree import Acceptance, Judged, RunnerUp, Walk, verify_tree, walk_tree
from tests.kernels.helpers import poisoned

SHAPES = {"small": (20, 13, 4), "bushy": (8, 64, 30), "deep": (18, 100, 3)}
PLAIN = ("strict", "judged")
VOCAB = 97
EMPTY_ROW = 2
"""This row of every batch holds no root, as an unused row of a captured batch."""


@dataclass(frozen=True)
class Batch:
    """Trees of B rows and what the target said of them, on the CPU."""

    parent: Tensor
    token_ids: Tensor
    target_ids: Tensor
    max_depth: int
    generator: torch.Generator

    def randint(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)


def random_batch(seed: int, num_rows: int, num_slots: int, reach: int) -> Batch:
    """Trees with empty slots; a parent stands at most `reach` slots before its child.

    The target's token is a child's four times of five, so that walks go deep.
    """
    draw = torch.Generator().manual_seed(seed)
    parent = torch.full((num_rows, num_slots), -2)
    tokens, targets = (torch.randint(VOCAB, parent.shape, generator=draw) for _ in range(2))
    random, deepest = Random(seed), 0
    for row in range(num_rows):
        if row == EMPTY_ROW:
            continue
        size = random.randint((num_slots + 1) // 2, num_slots)
        up, own, depths = random_tree(random, size, reach)
        parent[row, : len(up)], tokens[row, : len(up)] = torch.tensor(up), torch.tensor(own)
        for node in range(len(up)):
            children = [child for child, above in enumerate(up) if above == node]
            if children and random.random() < 0.8:
                targets[row, node] = own[random.choice(children)]
        deepest = max(deepest, *depths)
    return Batch(parent, tokens, targets, deepest, draw)


def random_tree(random: Random, size: int, reach: int) -> tuple[list[int], list[int], list[int]]:
    """Parents, tokens and depths; siblings differ, and no node stands below level 60."""
    up, tokens, depth = [-1], [random.randrange(VOCAB)], [0]
    for node in range(1, size):
        near = [n for n in range(max(0, node - reach), node) if depth[n] < 60] or [0]
        above = random.choice(near)
        taken = {tokens[n] for n in range(1, node) if up[n] == above}
        up.append(above)
        depth.append(depth[above] + 1)
        tokens.append(random.choice([token for token in range(VOCAB) if token not in taken]))
    return up, tokens, depth


# --------------------------------------------------------------------------- acceptances


def strict(batch: Batch) -> None:
    return None


def judged(batch: Batch) -> Judged:
    """At most one child of every node, the root marked too."""
    admitted = torch.zeros_like(batch.parent, dtype=torch.bool)
    for row, links in enumerate(batch.parent.tolist()):
        for node in range(len(links)):
            children = [c for c, up in enumerate(links) if up == node]
            if children and batch.rand() < 0.8:
                admitted[row, children[int(batch.randint(0, len(children)))]] = True
    admitted[:, 0] = True
    return Judged(admitted)


def runner_up(form: str, *, cut: bool) -> Callable[[Batch], RunnerUp]:
    """Second choices that are children as often as not.

    Args:
        cut: some tokens are denied, some excluded by top-p, and logits are bfloat16.
    """

    def given(batch: Batch) -> RunnerUp:
        rows, slots = batch.parent.shape
        greedy = batch.rand(rows) < 0.5
        eldest, youngest = outer_children(batch)
        first = torch.where(batch.rand(rows, slots) < 0.6, batch.target_ids, eldest)
        first = first.where(first >= 0, batch.target_ids)
        second = (first + 1 + batch.randint(0, VOCAB - 1, rows, slots)) % VOCAB
        is_child = (batch.rand(rows, slots) < 0.9) & (youngest >= 0) & (youngest != first)
        second = torch.where(is_child, youngest, second)
        high = 4 * batch.rand(rows, slots) - 1
        logits = torch.stack([high, high - 2 * batch.rand(rows, slots) ** 3], -1)
        logits[:, ::7] = logits[:, ::7, :1]  # ties
        filtered = torch.randn(rows * slots, VOCAB, generator=batch.generator)
        filtered[batch.rand(rows * slots, VOCAB) < 0.15] = -math.inf
        node_at = torch.randperm(rows * slots, generator=batch.generator).view(rows, slots)
        return RunnerUp(
            top_ids=torch.stack([first, second], -1),
            top_logits=logits,
            greedy=greedy,
            bound=batch.rand(rows) - (1 if form == "difference" else 0),
            form=form,  # type: ignore[arg-type]
            denied=batch.rand(VOCAB - 3) < 0.25 if cut else None,
            filtered=filtered.bfloat16() if cut else None,
            node_at=node_at if cut else None,
        )

    return given


def outer_children(batch: Batch) -> tuple[Tensor, Tensor]:
    """`[B, N]` tokens of each node's first and last child, -1 for none."""
    found = torch.full((2, *batch.parent.shape), -1)
    for row, links in enumerate(batch.parent.tolist()):
        for node in range(len(links)):
            children = children_of(batch, row, node)
            if children:
                found[:, row, node] = batch.token_ids[row, [children[0], children[-1]]]
    return found[0], found[1]


ACCEPTANCES: dict[str, Callable[[Batch], Acceptance | None]] = {
    "strict": strict,
    "judged": judged,
    "ratio": runner_up("ratio", cut=False),
    "ratio, cut": runner_up("ratio", cut=True),
    "difference": runner_up("difference", cut=False),
    "difference, cut": runner_up("difference", cut=True),
}


# --------------------------------------------------------------------------- the loops


def follow(batch: Batch, acceptance: Acceptance | None, row: int, node: int) -> int | None:
    """The docstrings' `follow`, in Python numbers."""
    children = children_of(batch, row, node)
    held = {int(batch.token_ids[row, child]): child for child in children}
    y = int(batch.target_ids[row, node])
    if isinstance(acceptance, Judged):
        return next((child for child in children if acceptance.admitted[row, child]), None)
    if y in held:
        return held[y]
    if isinstance(acceptance, RunnerUp):
        return _runner_up(acceptance, held, y, row, node)
    return None


def _runner_up(given: RunnerUp, held: dict[int, int], y: int, row: int, node: int) -> int | None:
    v1, v2 = given.top_ids[row, node].tolist()
    if given.greedy[row]:
        v1, v2 = y, (v2 if v1 == y else v1)
    if v1 in held or _denied(given, y) or _denied(given, v2):
        return None
    if given.filtered is not None and given.filtered[given.node_at[row, node], v2] == -math.inf:
        return None
    z1, z2 = given.top_logits[row, node]
    if given.form == "ratio":
        near = bool(z1 > 0 and z2 > 0 and z2 / z1 > given.bound[row])
    else:
        near = bool(z2 - z1 > given.bound[row])
    return held.get(v2) if near else None


def _denied(given: RunnerUp, token: int) -> bool:
    return given.denied is not None and token < len(given.denied) and bool(given.denied[token])


def children_of(batch: Batch, row: int, node: int) -> list[int]:
    return [child for child, up in enumerate(batch.parent[row].tolist()) if up == node]


def walked(batch: Batch, acceptance: Acceptance | None, width: int) -> Walk:
    """The whole docstring, row by row."""
    rows = []
    for row in range(len(batch.parent)):
        if batch.parent[row, 0] != -1:
            rows.append(([-1] * width, [-1] * width))
            continue
        path, tokens = [0], []
        while (child := follow(batch, acceptance, row, path[-1])) is not None:
            path.append(child)
            tokens.append(int(batch.token_ids[row, child]))
        tokens.append(int(batch.target_ids[row, path[-1]]))
        pad = [-1] * (width - len(path))
        rows.append((path + pad, tokens + pad))
    return Walk(*(torch.tensor(column) for column in zip(*rows, strict=True)))


def num_accepted(walk: Walk) -> Tensor:
    return (walk.path >= 0).sum(1) - 1


# --------------------------------------------------------------------------- checks


def acceptance_on(acceptance: Acceptance | None, device: torch.device) -> Acceptance | None:
    if acceptance is None:
        return None
    return type(acceptance)(**{name: on(v, device) for name, v in vars(acceptance).items()})


def on(value: Any, device: torch.device) -> Any:
    """On the device; every second number of rows that are longer."""
    if not isinstance(value, Tensor):
        return value
    wide = torch.cat([value, torch.ones_like(value)], -1)
    spread = torch.stack([wide, torch.ones_like(wide)], -1).to(device)
    return spread[..., : value.shape[-1], 0]


def check_walk(batch: Batch, name: str, device: torch.device, spare_depth: int = 0) -> Walk:
    """Every field equals the loop's; returns it."""
    acceptance = ACCEPTANCES[name](batch)
    wanted = walked(batch, acceptance, batch.max_depth + spare_depth + 1)
    tree = [on(part, device) for part in (batch.parent, batch.token_ids, batch.target_ids)]
    with poisoned():
        found = walk_tree(*tree, batch.max_depth + spare_depth, acceptance_on(acceptance, device))
    for field, value in found._asdict().items():
        expected = getattr(wanted, field)
        assert value.dtype == torch.int64
        assert torch.equal(value.cpu(), expected), f"{name}, {field}: {value}, not {expected}"
    return wanted


def check_verify(batch: Batch, device: torch.device) -> None:
    given = judged(batch)
    wanted = walked(batch, given, batch.max_depth + 1).path
    with poisoned():
        found = verify_tree(on(batch.parent, device), on(given.admitted, device), batch.max_depth)
    assert torch.equal(found.cpu(), wanted)


# --------------------------------------------------------------------------- tests


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ACCEPTANCES)
def test_walk_equals_the_loop(name: str, shape: str, device: torch.device) -> None:
    batch = random_batch(len(name), *SHAPES[shape])
    check_verify(batch, device)
    wanted = check_walk(batch, name, device, spare_depth=min(2, 64 - batch.max_depth))
    # Not in vain: walks end early and late, behind leaves and before refused children.
    assert num_accepted(wanted).max() >= 3
    ends = [(row, max(path)) for row, path in enumerate(wanted.path.tolist()) if path[0] == 0]
    assert {bool(children_of(batch, *end)) for end in ends} == {True, False}


def test_the_largest_tree(device: torch.device) -> None:
    for name in ("strict", "ratio, cut"):
        check_walk(random_batch(5, 2, 1024, 40), name, device)


@pytest.mark.parametrize("name", [name for name in ACCEPTANCES if name not in PLAIN])
def test_relaxations_are_reached(name: str) -> None:
    """Each acceptance goes where strict does not, or the tests above say little."""
    batch = random_batch(11, 200, 13, 4)
    strict = walked(batch, None, batch.max_depth + 1)
    relaxed = walked(batch, ACCEPTANCES[name](batch), batch.max_depth + 1)
    assert (num_accepted(relaxed) > num_accepted(strict)).sum() >= 10


def test_a_root_alone_and_no_rows(device: torch.device) -> None:
    root = torch.tensor([[-1]], device=device)
    walk = walk_tree(root, root, root + 8, 0)
    assert [field.tolist() for field in walk] == [[[0]], [[7]]]
    nothing = torch.zeros(0, 5, dtype=torch.int64, device=device)
    assert walk_tree(nothing, nothing, nothing, 3).path.shape == (0, 4)
    assert verify_tree(nothing, nothing.bool(), 3).shape == (0, 4)


def test_depth_is_cut_where_the_caller_says(device: torch.device) -> None:
    chain = torch.tensor([[-1, 0, 1, 2]], device=device)
    walk = walk_tree(chain, chain + 1, chain + 2, 2)
    assert [field.tolist() for field in walk] == [[[0, 1, 2]], [[1, 2, 3]]]


def at_the_edge() -> list[tuple[Acceptance, bool]]:
    """For a root with one child, token 1, behind a target that wants 0: whether it is entered."""

    def second(z1: float, z2: float, form: str, bound: float) -> RunnerUp:
        ids = torch.tensor([0, 1]).expand(1, 2, 2)
        logits = torch.tensor([z1, z2]).expand(1, 2, 2)
        return RunnerUp(ids, logits, torch.tensor([True]), torch.tensor([bound]), form)  # type: ignore[arg-type]

    return [
        (second(10.0, 9.0, "ratio", 0.9), False),
        (second(10.0, 9.000001, "ratio", 0.9), True),
        (second(10.0, 10.0, "ratio", 1.0), False),
        (second(0.0, 0.0, "ratio", 0.5), False),
        (second(-1.0, -2.0, "ratio", 0.5), False),
        (second(1.0, -1.0, "ratio", -2.0), False),
        (second(10.0, 9.5, "difference", -0.5), False),
        (second(10.0, 9.5, "difference", -0.5000001), True),
        (second(math.nan, 9.5, "difference", -9.0), False),
    ]


def test_thresholds_are_exceeded_not_met(device: torch.device) -> None:
    parent, tokens, targets = (torch.tensor([x], device=device) for x in ([-1, 0], [7, 1], [0, 8]))
    for acceptance, follows in at_the_edge():
        found = walk_tree(parent, tokens, targets, 1, acceptance_on(acceptance, device))
        assert found.token_ids.tolist() == ([[1, 8]] if follows else [[0, -1]]), acceptance
