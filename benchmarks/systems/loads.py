"""Shared budgets: so many verified tokens a request, spread over a batch, against the same number
for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from specctl.policy import (
    Budget,
    ElasticBudget,
    Policy,
    Shape,
    SparseGates,
    StaticTree,
    SurvivalBudget,
)
from systems.bench import Bench
from systems.choosing import Found, levels_of
from systems.curves import Curve, Paired, tau, tau_at, tokens_per_call
from systems.families import TOP_K
from systems.papers import policy_of

SHARED_LOADS = (8, 32)
"""Requests at a time, where there is something to share; 1 is shown for ECHO beside them."""
PER_REQUEST = (4, 8, 16, 32)
"""Verified tokens a request at which budgets are compared, roots counted."""
KNOBS = (3, 4, 6, 8, 12, 16, 24, 32, 44)
"""Of a budget's curve, tokens a request."""
DEPTH = 8
WIDE = f"eagle2 {DEPTH}-{TOP_K}-64"
TUNED = "ECHO gates, tuned"
PAPER = "echo-batch-paper"
Row = dict[str, Any]


def budget_rows(bench: Bench, found: Found, paired: Paired) -> Iterator[Row]:
    """Every shape under every budget at every load: tau against a static tree of equal tokens.

    Controls are per request: the static tree of the shape's depth, and the static depth that
    training prompts preferred at this size.
    """
    for load in (1, *SHARED_LOADS):
        for shape_name, shape in _shapes(bench, load).items():
            names = _budgets(shape_name)
            curves = {name: _curve(bench, shape, name, load) for name in names}
            for name, curve in curves.items():
                for size in PER_REQUEST:
                    yield {
                        "load": load,
                        "shape": shape_name,
                        "budget": name,
                        **_at_size(found, curve, curves["survival"], size, paired),
                    }


def _at_size(found: Found, curve: Curve, survival: Curve, size: int, paired: Paired) -> Row:
    """The budget whose K is `size` a request."""
    ours = curve.only(curve.labels.index(str(size)))
    static = found.static(levels_of(ours.policies[0]))
    best = found.static(best_static_depth(found, ours))
    return {
        "tokens_a_request": size,
        "tokens_per_call": float(tokens_per_call(ours.pooled)[0]),
        "tau": paired.tau(ours),
        "tau_over_static": paired.tau_against(ours, static),
        "tau_over_best_static": paired.tau_against(ours, best),
        "tau_over_survival": paired.tau_against(ours, survival),
        "support": ours.support,
    }


def tuned_gates(bench: Bench) -> SparseGates:
    """The gates of the highest tau at 4 tokens a request, batch 8, by training prompts.

    ECHO's own rule (Youden's J of every gate alone) does not know that what a gate saves is spent
    on another request; see docs/echo.md.
    """
    policies = {name: _elastic(gates, 4 * 8, gates.width) for name, gates in GATES.items()}
    taus = tau(bench.curve("gates", policies, "train", 8).pooled)
    return list(GATES.values())[int(np.argmax(taus))]


def _gates(levels: tuple[int, ...], bars: tuple[float, ...]) -> SparseGates:
    return SparseGates(
        depth=DEPTH, width=1, max_width=TOP_K, gate_levels=levels, thresholds=bars, num_tokens=64
    )


GATES = {
    "1": _gates((1,), (0.3,)),
    "1/3": _gates((1, 3), (0.2, 0.15)),
    "1/3 high": _gates((1, 3), (0.3, 0.3)),
    "1/3/5": _gates((1, 3, 5), (0.2, 0.15, 0.1)),
    "1/4/7": _gates((1, 4, 7), (0.1, 0.05, 0.03)),
}
"""Gates and the probability below which they close."""


def _elastic(shape: Shape, max_tokens: int, width: int) -> Policy:
    return Policy(shape=shape, budget=ElasticBudget(max_tokens=max_tokens, default_width=width))


def best_static_depth(found: Found, ours: Curve) -> int:
    """The static depth of the highest tau at our tokens a call, by training prompts."""
    wanted = tokens_per_call(ours.pooled)[0]
    depths = (2, 3, 4, 6, 8, 11)
    taus = [_tau_on_train(found, depth, wanted) for depth in depths]
    return depths[int(np.nanargmax(taus))]


def _tau_on_train(found: Found, depth: int, wanted: float) -> float:
    return float(tau_at(found.static(depth, "train").pooled, np.asarray(wanted)))


def _shapes(bench: Bench, load: int) -> dict[str, Shape]:
    """Trees that a budget trims: wide enough to leave it the choice. ECHO's own at every load."""
    wide: dict[str, Shape] = {
        WIDE: StaticTree(depth=DEPTH, top_k=TOP_K, num_tokens=64),
        PAPER: policy_of(PAPER).shape,
    }
    return wide if load == 1 else {**wide, TUNED: tuned_gates(bench)}


BUDGETS: dict[str, Callable[[int], Budget]] = {
    "survival": lambda max_tokens: SurvivalBudget(max_tokens=max_tokens),
    "ECHO": lambda max_tokens: ElasticBudget(max_tokens=max_tokens),
    "ECHO, width 1": lambda max_tokens: ElasticBudget(max_tokens=max_tokens, default_width=1),
}


def _budgets(shape_name: str) -> list[str]:
    """The narrow variant is shown once."""
    if shape_name == WIDE:
        return list(BUDGETS)
    return ["survival", "ECHO, width 1" if shape_name == TUNED else "ECHO"]


def _curve(bench: Bench, shape: Shape, budget: str, load: int) -> Curve:
    sizes = PER_REQUEST if load == 1 else KNOBS
    make = BUDGETS[budget]
    settings = {str(n): Policy(shape=shape, budget=make(n * load)) for n in sizes}
    return bench.curve(budget, settings, "held_out", load)
