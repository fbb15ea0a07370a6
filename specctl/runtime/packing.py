"""Requests with different numbers of nodes in one forward: back to back, without padding.

Their tokens stand end to end on one axis, so that the layers of a model see exactly the nodes that
there are; attention takes each request's stretch to its own slot. The same offsets describe the
stretches to a variable-length kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Stretch(NamedTuple):
    """One row of a packing.

    Attributes:
        start, end: its tokens on the packed axis.
        mask: `[1, 1, n, S]` bool, which of the first S entries of its slot each of them sees: its
            prefix and itself, however long other rows' are.
    """

    start: int
    end: int
    mask: Tensor

    @property
    def width(self) -> int:
        """S."""
        return self.mask.shape[3]


@dataclass(frozen=True)
class Layout:
    """T tokens of A rows, end to end.

    Attributes:
        prefixes: entries of each row's slot before its tokens.
        sizes: tokens of each row.
        offsets: `[A + 1]` int64: where each row's tokens start, and the end.
        row: `[T]` int64, whose token it is.
        place: `[T]` int64, the entry of its slot that it writes.
    """

    prefixes: list[int]
    sizes: list[int]
    offsets: Tensor
    row: Tensor
    place: Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.row)

    @property
    def origin(self) -> tuple[Tensor, Tensor]:
        """Row and column of every packed token, `[T]` int64 each."""
        rows = torch.arange(self.num_rows, device=self.offsets.device)
        row = rows.repeat_interleave(self.offsets.diff(), output_size=self.num_tokens)
        return row, torch.arange(self.num_tokens, device=row.device) - self.offsets[row]

    @property
    def num_rows(self) -> int:
        """A."""
        return len(self.prefixes)

    @property
    def width(self) -> int:
        """Entries that the widest row covers, its own tokens included."""
        return max(map(sum, zip(self.prefixes, self.sizes, strict=True)))

    def pack(self, values: Tensor) -> Tensor:
        """`[A, N, ...]` to `[1, T, ...]`."""
        return values[self.origin][None]

    def unpack(self, packed: Tensor, num_columns: int) -> Tensor:
        """`[1, T, ...]` to `[A, N, ...]`, 0 behind each row's own."""
        values = packed.new_zeros(self.num_rows, num_columns, *packed.shape[2:])
        values[self.origin] = packed[0]
        return values


@dataclass(frozen=True)
class Packing(Layout):
    """A layout, and what its tokens see.

    Attributes:
        stretches: the rows, in order.
        mask: `[T, S]` bool, the entries of its slot that a token sees.
    """

    stretches: list[Stretch]
    mask: Tensor

    @property
    def options(self) -> dict[str, Any]:
        """What a model is called with so that its attention learns of this."""
        return {"attention_mask": self.mask[None, None], "packing": self}


def layout_of(prefixes: list[int], sizes: list[int], device: torch.device) -> Layout:
    """Lays out rows of these sizes."""
    num_packed = sum(sizes)
    offsets = torch.tensor([0, *accumulate(sizes)], device=device)
    rows = torch.arange(len(sizes), device=device)
    row = rows.repeat_interleave(offsets.diff(), output_size=num_packed)
    prefix = torch.tensor(prefixes, device=device)[row]
    place = prefix + torch.arange(num_packed, device=device) - offsets[row]
    return Layout(prefixes, sizes, offsets, row, place)


def packing_of(prefixes: list[int], sizes: list[int], inner: Tensor) -> Packing:
    """A layout with its masks.

    Args:
        inner: `[A or 1, N, N]` bool, which of the entries behind its prefix a query sees.
    """
    layout = layout_of(prefixes, sizes, inner.device)
    prefix = torch.tensor(prefixes, device=inner.device)[layout.row, None]
    seen = layout.pack(inner.expand(len(sizes), -1, -1))[0]
    columns = torch.arange(max(prefixes) + inner.shape[2], device=inner.device)
    behind = prefix + columns[: inner.shape[2]]
    mask = (columns < prefix).scatter_(1, behind, seen)
    return Packing(**vars(layout), stretches=_stretches(prefixes, sizes, mask), mask=mask)


def _stretches(prefixes: list[int], sizes: list[int], mask: Tensor) -> list[Stretch]:
    bounds = pairwise(accumulate(sizes, initial=0))
    return [
        Stretch(start, end, mask[None, None, start:end, : prefix + end - start])
        for prefix, (start, end) in zip(prefixes, bounds, strict=True)
    ]


def pays(sizes: Sequence[int]) -> bool:
    """Whether rows of these sizes are packed, or padded to the largest.

    They are packed when padding would add a fifth. On the CPU the two break even at about a tenth
    (docs/LOG.md): a layer attends row by row then, in place of once for all. The rule reads sizes
    alone, so that equal batches always run alike.
    """
    return 5 * len(sizes) * max(sizes) >= 6 * sum(sizes)
