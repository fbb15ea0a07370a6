"""Walks that a threshold decides to the last bit, on any device."""

from __future__ import annotations

import math

import torch

from specctl.kernels.verify_tree import Acceptance, NearLaw, RunnerUp, walk_tree
from tests.kernels.cases_verify_tree import moved


def at_the_edge() -> list[tuple[Acceptance, bool]]:
    """For a root with one child, token 1, behind a target that wants 0: whether it is entered."""

    def near(gap: float, threshold: float) -> NearLaw:
        return NearLaw(torch.full((1, 2), gap), torch.tensor([threshold], dtype=torch.float64))

    def second(z1: float, z2: float, form: str, bound: float) -> RunnerUp:
        ids = torch.tensor([0, 1]).expand(1, 2, 2)
        logits = torch.tensor([z1, z2]).expand(1, 2, 2)
        return RunnerUp(ids, logits, torch.tensor([True]), torch.tensor([bound]), form)  # type: ignore[arg-type]

    # Kept as float32, 0.9 is 0.89999998: less than 0.9 in float64, and equal to itself.
    return [
        (near(0.9, 0.9), True),
        (near(0.5, 0.5), False),
        (near(0.0, 0.0), False),
        (near(math.nan, 0.9), False),
        (near(0.5, math.nan), False),
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


def check_edges(device: torch.device) -> None:
    parent, tokens, targets = (torch.tensor([x], device=device) for x in ([-1, 0], [7, 1], [0, 8]))
    for acceptance, follows in at_the_edge():
        found = walk_tree(parent, tokens, targets, 1, moved(acceptance, device))
        assert found.num_accepted.tolist() == [int(follows)], acceptance
        assert found.token_ids.tolist() == ([[1, 8]] if follows else [[0, -1]])
        assert found.first_rejected.tolist() == ([-1] if follows else [1])
