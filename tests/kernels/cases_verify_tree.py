"""Walks of random trees against the loops of the docstrings, on any device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from specctl.kernels.verify_tree import (
    Acceptance,
    Judged,
    NearLaw,
    RunnerUp,
    Walk,
    verify_tree,
    walk_tree,
)
from tests.kernels.poison import poisoned

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
        up, own = random_tree(random, random.randint((num_slots + 1) // 2, num_slots), reach)
        parent[row, : len(up)], tokens[row, : len(up)] = torch.tensor(up), torch.tensor(own)
        for node in range(len(up)):
            children = [child for child, above in enumerate(up) if above == node]
            if children and random.random() < 0.8:
                targets[row, node] = own[random.choice(children)]
        deepest = max(deepest, *depths(up))
    return Batch(parent, tokens, targets, deepest, draw)


def random_tree(random: Random, size: int, reach: int) -> tuple[list[int], list[int]]:
    """Parents and tokens; siblings differ, and no node stands below level 60."""
    up, tokens, depth = [-1], [random.randrange(VOCAB)], [0]
    for node in range(1, size):
        near = [n for n in range(max(0, node - reach), node) if depth[n] < 60] or [0]
        above = random.choice(near)
        taken = {tokens[n] for n in range(1, node) if up[n] == above}
        up.append(above)
        depth.append(depth[above] + 1)
        tokens.append(random.choice([token for token in range(VOCAB) if token not in taken]))
    return up, tokens


def depths(up: list[int]) -> list[int]:
    found = [0]
    for above in up[1:]:
        found.append(found[above] + 1)
    return found


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
        law = torch.randn(rows, slots, VOCAB, generator=batch.generator)
        law[batch.rand(rows, slots, VOCAB) < 0.15] = -math.inf
        return RunnerUp(
            top_ids=torch.stack([first, second], -1),
            top_logits=logits,
            greedy=greedy,
            bound=batch.rand(rows) - (1 if form == "difference" else 0),
            form=form,  # type: ignore[arg-type]
            denied=batch.rand(VOCAB - 3) < 0.25 if cut else None,
            law=law.bfloat16() if cut else None,
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


def near_law(*, cut: bool) -> Callable[[Batch], NearLaw]:
    def given(batch: Batch) -> NearLaw:
        rows = len(batch.parent)
        distance = batch.rand(*batch.parent.shape)
        distance[:, 3::11] = math.nan
        threshold = 1.2 * batch.rand(rows).double()
        return NearLaw(distance, threshold, batch.rand(VOCAB) < 0.3 if cut else None)

    return given


ACCEPTANCES: dict[str, Callable[[Batch], Acceptance | None]] = {
    "strict": strict,
    "judged": judged,
    "ratio": runner_up("ratio", cut=False),
    "ratio, cut": runner_up("ratio", cut=True),
    "difference": runner_up("difference", cut=False),
    "difference, cut": runner_up("difference", cut=True),
    "near law": near_law(cut=False),
    "near law, cut": near_law(cut=True),
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
    if isinstance(acceptance, NearLaw) and children:
        token = int(batch.token_ids[row, children[0]])
        near = float(acceptance.distance[row, children[0]]) < float(acceptance.threshold[row])
        free = not (_denied(acceptance, y) or _denied(acceptance, token))
        return children[0] if near and free else None
    return None


def _runner_up(given: RunnerUp, held: dict[int, int], y: int, row: int, node: int) -> int | None:
    v1, v2 = given.top_ids[row, node].tolist()
    if given.greedy[row]:
        v1, v2 = y, (v2 if v1 == y else v1)
    if v1 in held or _denied(given, y) or _denied(given, v2):
        return None
    if given.law is not None and given.law[row, node, v2] == -math.inf:
        return None
    z1, z2 = given.top_logits[row, node]
    if given.form == "ratio":
        near = bool(z1 > 0 and z2 > 0 and z2 / z1 > given.bound[row])
    else:
        near = bool(z2 - z1 > given.bound[row])
    return held.get(v2) if near else None


def _denied(given: RunnerUp | NearLaw, token: int) -> bool:
    return given.denied is not None and token < len(given.denied) and bool(given.denied[token])


def children_of(batch: Batch, row: int, node: int) -> list[int]:
    return [child for child, up in enumerate(batch.parent[row].tolist()) if up == node]


def walked(batch: Batch, acceptance: Acceptance | None, width: int) -> Walk:
    """The whole docstring, row by row."""
    rows = []
    for row in range(len(batch.parent)):
        if batch.parent[row, 0] != -1:
            rows.append(([-1] * width, [-1] * width, -1, 0, -1))
            continue
        path, tokens = [0], []
        while (child := follow(batch, acceptance, row, path[-1])) is not None:
            path.append(child)
            tokens.append(int(batch.token_ids[row, child]))
        tokens.append(int(batch.target_ids[row, path[-1]]))
        behind = children_of(batch, row, path[-1])
        pad = [-1] * (width - len(path))
        rejected = behind[0] if behind else -1
        rows.append((path + pad, tokens + pad, tokens[-1], len(path) - 1, rejected))
    return Walk(*(torch.tensor(column) for column in zip(*rows, strict=True)))


# --------------------------------------------------------------------------- checks


def moved(acceptance: Acceptance | None, device: torch.device) -> Acceptance | None:
    if acceptance is None:
        return None
    return type(acceptance)(**{name: on(v, device) for name, v in vars(acceptance).items()})


def on(value: Any, device: torch.device) -> Any:
    """On the device and, as a slice of something larger, not contiguous."""
    if not isinstance(value, Tensor):
        return value
    spread = torch.stack([value, torch.ones_like(value)], value.ndim).to(device)
    return spread.select(value.ndim, 0)


def check_walk(batch: Batch, name: str, device: torch.device, spare_depth: int = 0) -> Walk:
    """Every field equals the loop's; returns it."""
    acceptance = ACCEPTANCES[name](batch)
    wanted = walked(batch, acceptance, batch.max_depth + spare_depth + 1)
    tree = [on(part, device) for part in (batch.parent, batch.token_ids, batch.target_ids)]
    with poisoned():
        found = walk_tree(*tree, batch.max_depth + spare_depth, moved(acceptance, device))
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


def check_first_two_of_more(device: torch.device) -> None:
    """Pairs that are the first of five per node, as top-k leaves them."""
    batch = random_batch(4, 12, 13, 4)
    given = ACCEPTANCES["ratio"](batch)
    assert isinstance(given, RunnerUp)
    five = torch.cat([given.top_ids, batch.randint(0, VOCAB, *batch.parent.shape, 3)], 2)
    given = replace(given, top_ids=five[..., :2])
    there = replace(moved(given, device), top_ids=five.to(device)[..., :2])
    tree = [part.to(device) for part in (batch.parent, batch.token_ids, batch.target_ids)]
    found = walk_tree(*tree, batch.max_depth, there)
    assert torch.equal(found.path.cpu(), walked(batch, given, batch.max_depth + 1).path)
