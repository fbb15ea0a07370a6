"""Which policies stand in the table: one curve a family and depth, all of one top_k.

A family is a name, and for a depth the settings of its one knob. Fitted ones vary what their
artifact fixed; see `fits`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specctl.policy import (
    EntropyBins,
    JointThreshold,
    PerRequest,
    Policy,
    ScoredTree,
    SparseGates,
    StaticTree,
    Strict,
)

TOP_K = 10
"""Of every tree in the table; EAGLE-2's own."""
DEPTHS = (6, 8)
"""Levels at which shapes are compared: EAGLE-2's, and two more."""
SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 22, 24, 28, 32, 36, 40, 48, 56, 64)
LARGER = (72, 80, 96, 112, 128, 160, 192)
PROBS = (0.003, 0.006, 0.011, 0.018, 0.03, 0.05, 0.08, 0.13, 0.2, 0.3, 0.45, 0.65)
"""Thresholds of joint probability, and of a classifier's estimate of joint acceptance."""
EAGLE2 = Policy(shape=StaticTree(depth=6, top_k=TOP_K, num_tokens=60))
"""What is to be beaten: 6 levels, 60 nodes, root counted."""
Settings = dict[str, Policy]


@dataclass(frozen=True)
class Family:
    """A policy family whose one knob is turned at a given depth.

    Attributes:
        settings: of a depth, from the smallest tree to the largest.
        depths: the levels that it is compared at.
    """

    name: str
    settings: Callable[[int], Settings]
    depths: tuple[int, ...] = DEPTHS


def static_settings(depth: int) -> Settings:
    """EAGLE-2's tree by size: the control of the same depth.

    A tree of no more nodes than levels is the same rerank cut earlier. The record refuses it, as
    nobody would draft so deep for it, but at equal depth it is the control of a small budget.
    """
    fields = {"kind": "eagle2", "depth": depth, "top_k": TOP_K}
    sizes = (*SIZES, *LARGER)
    trees = {str(n): StaticTree.model_construct(**fields, num_tokens=n) for n in sizes}
    parts = {"budget": PerRequest(), "acceptance": Strict()}
    return {size: Policy.model_construct(shape=tree, **parts) for size, tree in trees.items()}


def threshold_settings(depth: int) -> Settings:
    """A joint-probability threshold: the control that learned pruning has to beat."""
    return {
        f"{prob:g}": Policy(shape=JointThreshold(depth=depth, top_k=TOP_K, min_prob=prob))
        for prob in reversed(PROBS)
    }


STATIC = Family("static", static_settings)
THRESHOLD = Family("threshold", threshold_settings)
CONTROLS = (STATIC, THRESHOLD)


def scored_family(name: str, fitted: ScoredTree, betas: Sequence[float]) -> Family:
    """A classifier that prunes, by beta."""

    falling = sorted(betas, reverse=True)

    def settings(depth: int) -> Settings:
        change = {"depth": depth, "num_tokens": None, "first_top_k": TOP_K, "second_top_k": TOP_K}
        shape = fitted.model_copy(update=change)
        return {f"{b:g}": Policy(shape=shape.model_copy(update={"beta": b})) for b in falling}

    return Family(name, settings)


def hetero_family(name: str, fitted: EntropyBins, *, alpha: int | None = None) -> Family:
    """HeteroSpec by the size of its base tree; its bins decide its levels, from 6 to the last."""

    def settings(depth: int) -> Settings:
        del depth
        sizes = (12, 16, 20, 24, 28, 32, 40, 48, 60, 80)
        return {str(size): Policy(shape=_hetero(fitted, size, alpha)) for size in sizes}

    return Family(name, settings, depths=(max(fitted.plan_depths),))


def _hetero(
    fitted: EntropyBins, size: int, alpha: int | None, gammas: tuple[float, ...] | None = None
) -> EntropyBins:
    change = {
        "base": fitted.base.model_copy(update={"num_tokens": size}),
        "alpha": fitted.alpha if alpha is None else alpha,
        "gammas": gammas or fitted.gammas,
    }
    return EntropyBins.model_validate({**dict(fitted), **change})


def hetero_grid(fitted: EntropyBins) -> Settings:
    """HeteroSpec's free settings, to be chosen on training prompts."""
    grid = {}
    for gammas in ((0.3, 0.6, 1.0), (0.5, 0.75, 1.0), (1.0, 1.0, 1.0)):
        for alpha in (1, 2, 3, 5):
            for size in (20, 24, 28, 32, 40, 60):
                words = f"{size}, alpha {alpha}, gammas {'/'.join(map(str, gammas))}"
                grid[words] = Policy(shape=_hetero(fitted, size, alpha, gammas))
    return grid


def gates_family(name: str, fitted: SparseGates) -> Family:
    """ECHO's gates by the size of their tree; gates deeper than the tree are left out."""

    gates = list(zip(fitted.gate_levels, fitted.thresholds, strict=True))

    def settings(depth: int) -> Settings:
        inside = [(d, t) for d, t in gates if d <= depth]
        levels, thresholds = zip(*inside, strict=True)
        change = {"depth": depth, "gate_levels": levels, "thresholds": thresholds}
        shape = fitted.model_copy(update=change)
        return {
            str(size): Policy(shape=shape.model_copy(update={"num_tokens": size}))
            for size in SIZES
            if size > depth
        }

    return Family(name, settings)
