"""Which policies stand in the tables. A family is a name and, for a depth, the settings of its one
knob; fitted ones vary what their artifact fixed."""

from __future__ import annotations

from collections.abc import Callable
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
"""Of every tree in the tables; EAGLE's own."""
SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 22, 24, 28, 32, 36, 40, 48, 56, 64)
LARGER = (72, 80, 96, 112, 128, 160, 192)
PROBS = (0.003, 0.006, 0.011, 0.018, 0.03, 0.05, 0.08, 0.13, 0.2, 0.3, 0.45, 0.65)
"""Thresholds of joint probability."""
BETAS = (0.006, 0.015, 0.03, 0.06, 0.12, 0.22, 0.38, 0.6)
"""Thresholds of an estimate of joint acceptance."""
LEVEL_PROBS = (0.0, 0.5, 0.7)
"""Of a level's nodes together, below which drafting stops: the marginal rule of levels."""
Settings = dict[str, Policy]


@dataclass(frozen=True)
class Family:
    """A policy family whose one knob is turned at a given depth.

    Attributes:
        settings: of a depth, from the smallest tree to the largest.
    """

    name: str
    settings: Callable[[int], Settings]


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


def fitted_family(name: str, policy: Policy) -> Family:
    """The knob that a fitted policy has beside what was learned."""
    shape = policy.shape
    if isinstance(shape, ScoredTree):
        return Family(name, lambda depth: scored_settings(shape, depth))
    if isinstance(shape, EntropyBins):
        return Family(name, lambda _: hetero_settings(shape))
    assert isinstance(shape, SparseGates), f"no knob for {shape.kind}"
    return Family(name, lambda depth: gates_settings(shape, depth))


def scored_settings(fitted: ScoredTree, depth: int, level_prob: float = 0.0) -> Settings:
    """A classifier that prunes, by beta."""
    change = {"depth": depth, "num_tokens": None, "min_level_prob": level_prob}
    shape = fitted.model_copy(update=change)
    return {f"{b:g}": Policy(shape=shape.model_copy(update={"beta": b})) for b in reversed(BETAS)}


def hetero_settings(fitted: EntropyBins) -> Settings:
    """HeteroSpec by the size of its base tree; its bins decide its levels."""
    sizes = [n for n in (4, 8, 12, 16, 24, 32, 48, 60, 80) if n > fitted.base.depth]
    bases = {n: fitted.base.model_copy(update={"num_tokens": n}) for n in sizes}
    return {
        str(n): Policy(shape=EntropyBins.model_validate({**dict(fitted), "base": base}))
        for n, base in bases.items()
    }


def gates_settings(fitted: SparseGates, depth: int) -> Settings:
    """ECHO's gates by the size of their tree; gates deeper than the tree are left out."""
    gates = [g for g in zip(fitted.gate_levels, fitted.thresholds, strict=True) if g[0] <= depth]
    levels, thresholds = zip(*gates, strict=True)
    change = {"depth": depth, "gate_levels": levels, "thresholds": thresholds}
    shape = fitted.model_copy(update=change)
    return {
        str(size): Policy(shape=shape.model_copy(update={"num_tokens": size}))
        for size in (8, 12, 16, 24, 32, 48, 60)
        if size > depth
    }
