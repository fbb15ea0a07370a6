"""Scorers of a node's acceptance: a tiny network, or a table.

They compute in float32 for whole batches, without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from specctl.features import SUFFIX_TOKENS
from specctl.lazy import Device, Tensor, np, torch
from specctl.records import Array, Matrix, Record, increasing, require

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_HIDDEN, MAX_CELLS = 64, 256
"""Bounds that keep a hostile record from asking for absurd memory."""


class FfnScorer(Record):
    """C2T's two-layer ReLU network (arXiv:2502.13652, section 3.2), sigmoid output."""

    learned: ClassVar = ("mean", "scale", "w1", "b1", "w2", "b2")
    kind: Literal["ffn"] = "ffn"
    features: tuple[str, ...] = Field(min_length=1)  # names of the node features, in order
    mean: Array  # of each feature
    scale: Array  # of each feature
    w1: Matrix  # `[H, F]`
    b1: Array  # `[H]`
    w2: Array  # `[H]`
    b2: Array  # `[1]`

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        width, hidden = len(self.features), len(self.b1)
        shapes = (len(self.mean), len(self.scale), len(self.w1), len(self.w2), len(self.b2))
        require(
            shapes == (width, width, hidden, hidden, 1) and all(len(r) == width for r in self.w1),
            f"weights do not fit {width} features and {hidden} hidden units",
        )
        require(2 <= hidden <= MAX_HIDDEN, f"hidden units must be between 2 and {MAX_HIDDEN}")
        require(all(s > 0 for s in self.scale), "scale must be positive")
        return self


class AcceptanceTable(Record):
    """Acceptance given the parent's, by draft probability and `copy_length`."""

    learned: ClassVar = ("edges", "log_odds")
    kind: Literal["table"] = "table"
    features: tuple[Literal["draft_logp"], Literal["copy_length"]] = ("draft_logp", "copy_length")
    """Names of its two node features."""
    edges: Array
    """E ascending logs of draft probabilities: bin i holds those above edge i - 1 up to edge i."""
    log_odds: Matrix
    """`[2 · SUFFIX_TOKENS + 1, E + 1]`, a row for each `copy_length` from -SUFFIX_TOKENS on."""

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        rows, columns = 2 * SUFFIX_TOKENS + 1, len(self.edges) + 1
        require(
            len(self.log_odds) == rows and all(len(row) == columns for row in self.log_odds),
            f"a table of {len(self.edges)} edges has {rows} rows of {columns} cells",
        )
        require(columns <= MAX_CELLS, f"at most {MAX_CELLS} cells a row")
        require(increasing(self.edges), "edges must ascend")
        return self


Scorer = Annotated[FfnScorer | AcceptanceTable, Field(discriminator="kind")]
"""A learned score of nodes."""


LogOdds = Callable[[Tensor], Tensor]
"""`[n, F]` float32 features of nodes to `[n]` float32 log-odds of acceptance."""


def build_log_odds(scorer: Scorer, device: Device = "cpu") -> LogOdds:
    """The function of a scorer, its tables on `device`."""
    if isinstance(scorer, FfnScorer):
        return ffn_log_odds(scorer, device)
    return table_log_odds(scorer, device)


@dataclass(frozen=True)
class FfnLogOdds:
    """`w2 · relu(w1 · x + b1) + b2`, `[F, H]`, `[H]`, `[H]` and `[1]`; x is standardised by w1."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        # At these sizes faster than addmm.
        hidden = torch.mm(features, self.w1).add_(self.b1).relu_()
        return torch.mv(hidden, self.w2).add_(self.b2)


def ffn_log_odds(scorer: FfnScorer, device: Device) -> FfnLogOdds:
    w1, b1 = folded_layer(scorer)
    tables = (w1, b1, _floats(scorer.w2), _floats(scorer.b2))
    return FfnLogOdds(*(torch.from_numpy(table).to(device) for table in tables))


def folded_layer(scorer: FfnScorer) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The first layer over raw features: `[F, H]` weights and `[H]` biases.

    (x - mean) / scale · w is x · (w / scale) - mean / scale · w; in float64, rounded once.
    """
    weights = np.array(scorer.w1) / np.array(scorer.scale)
    biases = np.array(scorer.b1) - weights @ np.array(scorer.mean)
    return np.ascontiguousarray(weights.T, np.float32), biases.astype(np.float32)


def _floats(values: Sequence[float]) -> NDArray[np.float32]:
    return np.array(values, np.float32)


@dataclass(frozen=True)
class TableLogOdds:
    """Log-odds of a node's cell."""

    edges: Tensor  # `[E]`
    log_odds: Tensor  # `[(2 · SUFFIX_TOKENS + 1) · (E + 1)]`

    def __call__(self, features: Tensor) -> Tensor:
        logp, copied = features.unbind(1)
        found = self.log_odds[self.cells(logp, copied.long())]
        return torch.where(logp.isnan(), logp, found)

    def cells(self, draft_logp: Tensor, copied: Tensor) -> Tensor:
        """int64 indices into `log_odds`."""
        columns = len(self.edges) + 1
        first = torch.bucketize(draft_logp.contiguous(), self.edges).add_(SUFFIX_TOKENS * columns)
        return first.add_(copied, alpha=columns)


def table_log_odds(scorer: AcceptanceTable, device: Device) -> TableLogOdds:
    tables = (_floats(scorer.edges), np.array(scorer.log_odds, np.float32).flatten())
    return TableLogOdds(*(torch.from_numpy(table).to(device) for table in tables))


def highest_log_odds(scorer: Scorer) -> float:
    """An upper bound: the best cell of a table; infinite for a network."""
    if isinstance(scorer, FfnScorer):
        return math.inf
    return max(map(max, scorer.log_odds))
