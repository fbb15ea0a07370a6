"""Boosted trees for nodes: trained by LightGBM, taken out of it as flat arrays.

No LightGBM file or text is ever written or loaded: its dumped structure becomes a `TreesScorer`,
thresholds rounded down to float32, which keeps every `x <= t` of a float32 x, and leaves rounded to
a grid on which every sum of them is exact in float32. So fit, replay, runtime and the ONNX twin
find the same bits, whatever order they add in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.logs.node_sample import NodeRows
from specctl.logs.positions import Bools
from specctl.policy import TreesScorer
from specctl.records import floor_float32
from specctl.train.configs import TreesConfig

EXACT_BITS = 23
"""Sums of grid points below 2^k are exact in float32 on a grid of 2^(k - 23)."""
RISING = ("joint_logp", "joint_prob", "draft_logp")
FALLING = ("sibling_rank",)
"""Features in which acceptance cannot fall, or rise, all others being equal: the drafter would
have to know better by saying less. Depth and entropy are free: what is left of a path that was
accepted so far may be likelier, or less likely, to go on."""


def boost(
    rows: NodeRows,
    validation: Bools,
    names: tuple[str, ...],
    config: TreesConfig,
    *,
    on_tree: Callable[[int], None] | None = None,
) -> Any:
    """A LightGBM booster of the rows' label, stopped early on the validation rows.

    Args:
        validation: `[M]` rows that are not trained on. names: of the feature columns.
        on_tree: called with 1 after every tree.
    """
    import lightgbm as lgb

    parts = [rows.take(chosen) for chosen in (~validation, validation)]
    datasets = [
        lgb.Dataset(part.features, part.accepted.astype(np.float32), free_raw_data=True)
        for part in parts
    ]
    callbacks: list[Any] = [lgb.early_stopping(config.patience, verbose=False)]
    if on_tree is not None:
        callbacks.append(lambda _: on_tree(1))
    return lgb.train(
        parameters(names, config),
        datasets[0],
        num_boost_round=config.num_trees,
        valid_sets=[datasets[1]],
        callbacks=callbacks,
    )


def parameters(names: tuple[str, ...], config: TreesConfig) -> dict[str, Any]:
    """LightGBM's words for a configuration."""
    directions = [(name in RISING) - (name in FALLING) for name in names]
    constraints = (
        {"monotone_constraints": directions} if config.monotone and any(directions) else {}
    )
    return {
        "objective": "binary",
        "metric": "binary_logloss",
        "num_leaves": config.num_leaves,
        "min_data_in_leaf": config.min_rows,
        "learning_rate": config.lr,
        "lambda_l2": config.l2,
        "num_threads": config.threads,
        "seed": config.seed,
        "deterministic": True,
        "force_row_wise": True,
        "feature_pre_filter": False,
        "use_missing": False,
        "verbosity": -1,
        **constraints,
    }


def feature_gains(booster: Any, names: tuple[str, ...]) -> dict[str, float]:
    """Share of the training loss that the splits on each feature took off."""
    gains = booster.feature_importance("gain", iteration=booster.best_iteration)
    total = max(float(gains.sum()), 1e-30)
    return {name: float(gain) / total for name, gain in zip(names, gains, strict=True)}


# --------------------------------------------------------------------------- flat arrays


def trees_scorer(booster: Any, names: tuple[str, ...], log_kept: float = 0.0) -> TreesScorer:
    """The booster's trees up to its best iteration.

    Args:
        log_kept: added to the log-odds, see `NodeRows.log_kept`.
    """
    dumped = booster.dump_model(num_iteration=booster.best_iteration)["tree_info"]
    rows: list[list[float]] = []
    roots = []
    for tree in dumped:
        roots.append(len(rows))
        rows += _flat(tree["tree_structure"], len(rows))
    feature, threshold, left, right, values = zip(*rows, strict=True)
    value = np.array(values)
    is_leaf = np.array(feature) < 0
    first_tree = np.arange(len(rows)) < (roots[1] if len(roots) > 1 else len(rows))
    value[is_leaf & first_tree] += log_kept
    return TreesScorer(
        features=names,
        roots=tuple(roots),
        feature=tuple(map(int, feature)),
        threshold=tuple(floor_float32(t) for t in threshold),
        left=tuple(map(int, left)),
        right=tuple(map(int, right)),
        value=tuple(on_grid(np.where(is_leaf, value, 0.0), roots).tolist()),
    )


def _flat(structure: dict[str, Any], first: int) -> list[list[float]]:
    """Feature, threshold, left, right, value of a tree's nodes, parents first, from `first` on."""
    rows: list[list[float]] = [[]]
    pending = [(structure, 0)]
    while pending:
        node, place = pending.pop()
        if "leaf_value" in node:
            rows[place] = [-1, 0.0, -1, -1, node["leaf_value"]]
            continue
        assert node["decision_type"] == "<=", "only numbers are split"
        left, right = len(rows), len(rows) + 1
        rows += [[], []]
        rows[place] = [node["split_feature"], node["threshold"], first + left, first + right, 0.0]
        pending += ((node["right_child"], right), (node["left_child"], left))
    return rows


def on_grid(value: NDArray[np.float64], roots: list[int]) -> NDArray[np.float64]:
    """Values rounded so that any sum of one a tree is exact in float32."""
    largest = sum(float(np.abs(tree).max()) for tree in np.split(value, roots[1:]))
    grid = 2.0 ** (math.ceil(math.log2(largest + len(roots) * 2.0**-EXACT_BITS)) - EXACT_BITS)
    return np.round(value / grid) * grid + 0.0  # -0.0 becomes 0.0
