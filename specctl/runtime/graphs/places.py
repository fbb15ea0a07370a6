"""Where the tokens of a captured pass stand: decided on the device, in tensors of a fixed size."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specctl.kernels.tree_attention import pack_ancestors


@dataclass(frozen=True)
class Places:
    """T tokens of B rows, end to end; a `cache.Placed`.

    Attributes:
        row: `[T]` int64, whose token it is. place: `[T]` int64, the entry of its slot that it
            writes.
        num_rows: B. width: entries that a pass may cover: all of a slot's.
    """

    row: Tensor
    place: Tensor
    num_rows: int
    width: int


@dataclass
class Constants:
    """Tensors that depend on sizes alone, made once: in a graph each would be a launch a round.

    They are made when a key runs for the first time, which is never recorded.
    """

    device: torch.device
    _made: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)

    def even_rows(self, num_rows: int, num_each: int) -> Tensor:
        """`[B · W]` int64: whose each token is, where rows are equal."""
        return self._get("rows", num_rows, num_each)

    def even_offsets(self, num_rows: int, num_each: int) -> Tensor:
        """`[B + 1]` int64: where equal rows start on the packed axis, and the end."""
        return self._get("offsets", num_rows, num_each)

    def causal_words(self, num_rows: int, num_each: int) -> Tensor:
        """`[B · T, words]` int32: each of T new tokens sees itself and those before it."""
        return self._get("causal", num_rows, num_each)

    def _get(self, kind: str, num_rows: int, num_each: int) -> Tensor:
        key = (kind, num_rows, num_each)
        if key not in self._made:
            self._made[key] = _MAKERS[kind](num_rows, num_each).to(self.device)
        return self._made[key]


def _causal(num_rows: int, num_each: int) -> Tensor:
    seen = torch.ones(num_each, num_each, dtype=torch.bool).tril()
    return pack_ancestors(seen).repeat(num_rows, 1)


_MAKERS = {
    "rows": lambda rows, each: torch.arange(rows * each) // each,
    "offsets": lambda rows, each: torch.arange(rows + 1) * each,
    "causal": _causal,
}
