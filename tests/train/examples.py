"""Synthetic `rounds` tables: made up, seeded, with the columns that a fit reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

SCHEMA = {
    "prompt_id": pl.String,
    "offered_depth": pl.Int16,
    "top_k": pl.Int16,
    "phi": pl.Float32,
    "phi_depth": pl.Int16,
    "num_accepted": pl.Int32,
    "fully_accepted": pl.Boolean,
    "tcr": pl.Int32,
}
DEPTH, TOP_K = 6, 8


def rounds_frame(
    phi: Sequence[float | None],
    accepted: Sequence[int],
    tcr: Sequence[int | None],
    prompts: Sequence[str],
    **columns: Any,
) -> pl.DataFrame:
    """A table of the given rounds, drafted by the default base tree."""
    size = len(phi)
    return pl.DataFrame(
        {
            "prompt_id": prompts,
            "offered_depth": [DEPTH] * size,
            "top_k": [TOP_K] * size,
            "phi": phi,
            "phi_depth": [DEPTH] * size,
            "num_accepted": accepted,
            "fully_accepted": [count == DEPTH for count in accepted],
            "tcr": tcr,
            **columns,
        },
        schema=SCHEMA,
    )


def noisy_rounds(num_rounds: int = 3000, num_prompts: int = 20, seed: int = 0) -> pl.DataFrame:
    """Rounds where a low Φ means more acceptance and a lower rank, with noise."""
    rng = np.random.default_rng(seed)
    phi = rng.gamma(2.0, 2.5, num_rounds).astype(np.float32)
    accepted = np.minimum(DEPTH, rng.poisson(6.0 * np.exp(-phi / 8.0)))
    rank = 1 + accepted + rng.poisson(phi)
    return rounds_frame(
        phi.tolist(),
        accepted.tolist(),
        [int(r) if a else None for r, a in zip(rank, accepted, strict=True)],
        [f"prompt-{i}" for i in rng.integers(0, num_prompts, num_rounds)],
    )
