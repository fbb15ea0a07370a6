"""Calibration: from what the drafter thinks of a token to how often the target takes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.policy.budgets import Calibration
from specctl.tree import TokenTree, path_sum

MAX_LOG_ODDS = 16.0
"""Nats. Float32 cannot tell a probability from 1 beyond it."""


@dataclass(frozen=True)
class CalibrationTable:
    """A calibration on the device, `[D]` float64 each.

    Attributes:
        max_depth: of the trees; None asks the device for it.
    """

    slopes: Tensor
    intercepts: Tensor
    max_depth: int | None = None

    def acceptance_logp(self, tree: TokenTree) -> Tensor:
        """`[B, N]` float64, nats: log-probability that the whole path to a node is accepted."""
        entry = (tree.depth - 1).clamp(0, len(self.slopes) - 1)
        odds = self.slopes[entry] * draft_log_odds(tree.draft_logp) + self.intercepts[entry]
        own = torch.nn.functional.logsigmoid(odds).masked_fill(tree.depth == 0, 0.0)
        deepest = int(tree.depth.max()) if self.max_depth is None else self.max_depth
        return path_sum(own, tree.parent, deepest)


def calibration_table(record: Calibration, device: torch.device) -> CalibrationTable:
    """The record's numbers, ready to decide."""
    slopes, intercepts = (
        torch.tensor(values, dtype=torch.float64, device=device)
        for values in (record.slopes, record.intercepts)
    )
    return CalibrationTable(slopes, intercepts)


def draft_log_odds(draft_logp: Tensor) -> Tensor:
    """Log-odds of a log-probability, float64 nats, clipped to `MAX_LOG_ODDS` either way."""
    logp = draft_logp.double()
    rest = torch.log(-torch.expm1(logp))
    return (logp - rest).clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)
