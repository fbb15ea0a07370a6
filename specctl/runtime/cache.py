"""Keys and values of a batch of slots, written at per-slot offsets, compacted after a round.

A slot is one request's row. Active requests occupy slots 0..A-1, so that a forward works on a
view; a request that leaves is replaced by the last active one (`move`).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specctl.errors import ModelConfigError
from specctl.kernels.commit_kv import commit_kv


class Placed(Protocol):
    """Where packed tokens of A rows write; see `packing.Layout` and `graphs.Places`.

    Attributes:
        num_rows: A. row: `[T]` int64, whose token it is. place: `[T]` int64, the entry of its slot
            that it writes. width: entries that attention may cover.
    """

    @property
    def num_rows(self) -> int: ...
    @property
    def row(self) -> Tensor: ...
    @property
    def place(self) -> Tensor: ...
    @property
    def width(self) -> int: ...


class SlotCache(Cache):
    """A transformers cache over one `[2 L, slots, H, S, D]` tensor, allocated at first use.

    The model calls `update`; the runtime calls everything else. Lengths are kept by whoever
    drives the cache: `stage` says where the next forward writes, `commit` what of it stays.

    Args:
        num_layers: L. num_slots: rows. capacity: S, tokens a slot can hold.
    """

    def __init__(self, num_layers: int, num_slots: int, capacity: int) -> None:
        # The base class wants layer objects; this cache answers `update` itself.
        super().__init__(layers=[])
        self.num_layers, self.num_slots, self.capacity = num_layers, num_slots, capacity
        self.storage: Tensor | None = None
        self._rows = slice(0, 0)
        self._offsets: list[int] = []
        self._index: Tensor | None = None
        self._packing: Placed | None = None
        self._width = 0

    def stage(self, first_slot: int, offsets: list[int], num_new: int) -> int:
        """Prepares the next forward: row i writes `num_new` entries from `offsets[i]` on.

        Returns:
            Number of entries that attention will see: the widest row, rounded to nothing.
        """
        self._rows = slice(first_slot, first_slot + len(offsets))
        self._offsets, self._index, self._packing = offsets, None, None
        self._width = max(offsets) + num_new
        self._check_room()
        return self._width

    def stage_packed(self, first_slot: int, packing: Placed) -> None:
        """Prepares a forward of packed rows; row i lives in slot `first_slot + i`."""
        self._rows = slice(first_slot, first_slot + packing.num_rows)
        self._offsets, self._packing = [], packing
        self._width = packing.width
        self._check_room()

    def _check_room(self) -> None:
        if self._width > self.capacity:
            raise ModelConfigError(
                "KV cache",
                expected=f"at most {self.capacity} tokens a request",
                found=f"{self._width}",
                fix="shorten the prompt or lower max_new_tokens",
            )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **_: object
    ) -> tuple[Tensor, Tensor]:
        """Called by the model: stores `[A, H, T, D]` and returns the visible `[A, H, S', D]`.

        Packed rows come as `[1, H, T, D]`.
        """
        storage = self._allocated(key_states, value_states)
        keys, values = storage[2 * layer_idx, self._rows], storage[2 * layer_idx + 1, self._rows]
        if self._packing is not None:
            at = self._packing.row, slice(None), self._packing.place
            keys[at] = key_states[0].transpose(0, 1)
            values[at] = value_states[0].transpose(0, 1)
        elif len(self._offsets) == 1:
            start = self._offsets[0]
            keys[:, :, start : start + key_states.shape[2]] = key_states
            values[:, :, start : start + key_states.shape[2]] = value_states
        else:
            index = self._scatter_index(key_states)
            keys.scatter_(2, index, key_states)
            values.scatter_(2, index, value_states)
        return keys[:, :, : self._width], values[:, :, : self._width]

    def commit(self, first_slot: int, offset: Tensor, path: Tensor) -> None:
        """Keeps the accepted path of each row; see `kernels.commit_kv`."""
        if self.storage is not None and path.shape[1] > 1:
            rows = slice(first_slot, first_slot + len(offset))
            commit_kv(self.storage[:, rows], offset, path)

    def move(self, source: int, target: int) -> None:
        """Copies one slot over another."""
        if self.storage is not None and source != target:
            self.storage[:, target] = self.storage[:, source]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Entries visible before the staged forward; positions are always given explicitly."""
        del layer_idx
        return max(self._offsets, default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Visible entries and their offset, for models that size masks by the cache."""
        del query_length, layer_idx
        return self._width, 0

    @property
    def is_compileable(self) -> bool:
        return False

    def _scatter_index(self, key_states: Tensor) -> Tensor:
        if self._index is None:
            steps = torch.arange(key_states.shape[2], device=key_states.device)
            starts = torch.tensor(self._offsets, device=key_states.device)
            self._index = (starts[:, None] + steps)[:, None, :, None]
        return self._index.expand_as(key_states)

    def _allocated(self, keys: Tensor, values: Tensor) -> Tensor:
        if self.storage is None:
            if keys.shape != values.shape:
                raise ModelConfigError(
                    "attention heads",
                    expected="keys and values of one size in every layer",
                    found=f"keys {tuple(keys.shape[1:])}, values {tuple(values.shape[1:])}",
                    fix="use a model without latent attention",
                )
            heads, dim = keys.shape[1], keys.shape[3]
            shape = (2 * self.num_layers, self.num_slots, heads, self.capacity, dim)
            self.storage = keys.new_zeros(shape)
        return self.storage
