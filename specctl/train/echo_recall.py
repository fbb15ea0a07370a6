"""What gates cost: the accepted tokens that a closed gate would have cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specctl.policy.records import Record
from specctl.train.echo_levels import Gate, LevelRows, stop_levels


class RecallReport(Record):
    """Accepted tokens that closed gates cut, over accepted tokens; means over held-out prompts.

    Attributes:
        loss_frac: where a budget leaves nothing to widen with, so that the level of the gate is
            lost too. widened_loss_frac: where the default nodes of that level are verified.
        loss_bound, widened_loss_bound: (n · loss + 1) / (n + 1), which conformal risk control
            compares with the loss that one would allow (notes/state-of-the-art.md, 4b).
    """

    num_prompts: int
    loss_frac: float
    loss_bound: float
    widened_loss_frac: float
    widened_loss_bound: float


def recall(gates: Sequence[Gate], rows: LevelRows) -> RecallReport:
    """What the gates cut of each prompt's accepted tokens."""
    stopped = stop_levels(rows, gates)
    tight, widened = (
        np.where(stopped > 0, np.minimum(rows.accepted, stopped - lost), rows.accepted)
        for lost in (1, 0)
    )
    num_prompts, losses = _losses(rows, (tight, widened))
    bounds = [(num_prompts * loss + 1) / (num_prompts + 1) for loss in losses]
    return RecallReport(
        num_prompts=num_prompts,
        loss_frac=losses[0],
        loss_bound=bounds[0],
        widened_loss_frac=losses[1],
        widened_loss_bound=bounds[1],
    )


def _losses(rows: LevelRows, kept: Sequence[NDArray[np.int64]]) -> tuple[int, list[float]]:
    """Prompts with an accepted token, and the mean share of these that each way loses."""
    _, owner = np.unique(rows.prompt, return_inverse=True)
    total = np.bincount(owner, rows.accepted).astype(np.float64)
    counts = [np.bincount(owner, one).astype(np.float64) for one in kept]
    some = total > 0
    if not some.any():
        return 0, [0.0 for _ in counts]
    return int(some.sum()), [float(np.mean(1 - one[some] / total[some])) for one in counts]
