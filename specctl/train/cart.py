"""`fit cart`: HeteroSpec's bins of Φ from a `rounds` table (arXiv:2505.13254, section 4.2).

    rounds ─select─► arrays, split by prompt ─partition─► edges ─► EntropyBins ─► report

Readings of the paper follow notes/state-of-the-art.md, section 6. Its filter keeps fully
accepted rounds only, which selects on success; `filter="all"` with `label="accepted"` does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pydantic import ValidationError

from specctl.errors import TraceEmptyError, UsageError
from specctl.policy.parse import describe_violation
from specctl.policy.records import EntropyBins, Policy
from specctl.train.partition import Floats, Phis, cart_edges, exact_edges
from specctl.train.report import CartReport, Stability, build_report, low_entropy_overlap
from specctl.train.rounds import CartConfig, Rounds, select_rounds

if TYPE_CHECKING:  # slow to import
    import polars as pl

__all__ = ["CartConfig", "CartFit", "fit_cart"]
DEEPER = (1, 2, 3)
"""Levels added for the stability check: 4 to 6 for the paper's 3."""


@dataclass(frozen=True)
class CartFit:
    """A fitted policy and what is known of it.

    Attributes:
        held_out_phi: `[n]` float32, nats, of every eligible held-out round; the ONNX twin is
            checked on these.
    """

    policy: Policy
    config: CartConfig
    report: CartReport
    held_out_phi: Phis


def fit_cart(rounds: pl.DataFrame | pl.LazyFrame, config: CartConfig) -> CartFit:
    """Fits bins of Φ on the training prompts and reports on the held-out ones.

    CART may find fewer than 2^max_leaf_depth bins where rounds are few; the report shows it.

    Raises:
        UsageError: options that contradict each other.
        TraceSchemaError: columns are missing.
        TraceEmptyError: too few prompts, rounds, or bins for the gammas.
    """
    chosen = select_rounds(rounds, config)
    train = chosen.used & ~chosen.held_out
    phi, label = chosen.phi[train], chosen.label[train]
    edges = find_edges(phi, label, config.max_leaf_depth, config)
    _check_bins(edges, phi, label, config)
    shape = _shape(edges, config)
    report = build_report(chosen, shape, config, _stability(chosen, edges, phi, label, config))
    return CartFit(Policy(shape=shape), config, report, chosen.phi[chosen.held_out])


def find_edges(phi: Phis, label: Floats, leaf_depth: int, config: CartConfig) -> list[float]:
    """Thresholds by the configured method, at most 2^leaf_depth - 1 of them."""
    if config.method == "exact":
        return exact_edges(phi, label, num_bins=2**leaf_depth, min_rows=config.min_rows)
    return cart_edges(phi, label, depth=leaf_depth, min_rows=config.min_rows, seed=config.seed)


def _shape(edges: list[float], config: CartConfig) -> EntropyBins:
    plan = config.model_dump(include={"gammas", "alpha", "index_base", "cap_tokens"})
    try:
        return EntropyBins(base=config.base, edges=tuple(edges), **plan)
    except ValidationError as error:
        raise UsageError(
            "plan of the bins",
            expected="a depth and a size that a policy may have",
            found=describe_violation(error),
            fix="lower --alpha or the gammas",
        ) from None


def _check_bins(edges: list[float], phi: Phis, label: Floats, config: CartConfig) -> None:
    """A policy needs an edge, and a bin for every gamma."""
    wanted = max(2, len(config.gammas))
    if len(edges) + 1 < wanted:
        raise TraceEmptyError(
            f"fit cart ({config.method})",
            expected=f"at least {wanted} bins, for {len(config.gammas)} gammas",
            found=f"{len(edges) + 1} from {len(phi)} training rounds with {len(np.unique(phi))} "
            f"values of phi and {len(np.unique(label))} of {config.label}",
            fix="collect more rounds, give fewer gammas, or use --filter all --label accepted",
        )


def _stability(
    rounds: Rounds, edges: list[float], phi: Phis, label: Floats, config: CartConfig
) -> tuple[Stability, ...]:
    """Overlap with deeper partitions of the same training rounds, over all used rounds."""
    overlaps = []
    for leaf_depth in (config.max_leaf_depth + more for more in DEEPER):
        deeper = find_edges(phi, label, leaf_depth, config)
        overlap = low_entropy_overlap(
            rounds.phi[rounds.used], edges, deeper, num_low=len(config.gammas)
        )
        overlaps.append(
            Stability(max_leaf_depth=leaf_depth, num_bins=len(deeper) + 1, jaccard=overlap)
        )
    return tuple(overlaps)
