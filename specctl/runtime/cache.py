"""Keys and values of a batch of slots, written at per-slot offsets, compacted after a round.

A slot is one request's row. Active requests occupy slots 0..B-1, so that a forward works on a
view; a request that leaves is replaced by the last active one (`move`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specctl.errors import ModelConfigError
from specctl.kernels.commit_kv import commit_kv
from specctl.runtime.attention import Pass, Prompt


class SlotCache(Cache):
    """A transformers cache over one `[2 L, slots, H, S, D]` tensor.

    The model calls `update`; the runtime calls everything else. `stage` says where the next forward
    writes, `commit` what of it stays.

    Args:
        num_layers: L. num_slots: rows. capacity: S, tokens a slot can hold.
        like: `[H, D]`, one layer's key of one token, for heads, dtype and device; None allocates at
            the first use.
    """

    def __init__(
        self, num_layers: int, num_slots: int, capacity: int, like: Tensor | None = None
    ) -> None:
        super().__init__(layers=[])  # the base class wants layers; this one answers `update` itself
        self.num_layers, self.num_slots, self.capacity = num_layers, num_slots, capacity
        self.storage = None if like is None else self._allocated(like)
        self._slots, self._width, self._appends = slice(0, 0), 0, False
        self._reads: Pass | Prompt = Prompt()

    def stage(self, reads: Pass | Prompt, num_new: int, slot: int = 0) -> None:
        """Prepares the next forward: a pass over slots 0..B-1, or a prompt into one slot.

        Raises:
            ModelConfigError: more entries than a slot has.
        """
        width = reads.before + num_new if isinstance(reads, Prompt) else reads.width
        if width > self.capacity:
            raise ModelConfigError(
                "KV cache",
                expected=f"at most {self.capacity} tokens a request",
                found=f"{width}",
                fix="shorten the prompt or lower max_new_tokens",
            )
        num_rows = 1 if isinstance(reads, Prompt) else reads.num_rows
        self._slots, self._reads, self._width = slice(slot, slot + num_rows), reads, width
        # The new entries of a single text end where attention does.
        self._appends = isinstance(reads, Prompt) or (reads.exact and num_rows == 1)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **_: object
    ) -> tuple[Tensor, Tensor]:
        """Stores `[1, H, T, D]` and returns the entries that may be seen, `[B, H, width, D]`."""
        if self.storage is None:
            if key_states.shape != value_states.shape:
                raise ModelConfigError(
                    "attention heads",
                    expected="keys and values of one size in every layer",
                    found=f"keys {tuple(key_states.shape[1:])}, values "
                    f"{tuple(value_states.shape[1:])}",
                    fix="use a model without latent attention",
                )
            self.storage = self._allocated(key_states[0, :, 0])
        reads, end = self._reads, self._width
        both = self.storage[2 * layer_idx : 2 * layer_idx + 2, self._slots, :, :end]
        keys, values = both[0], both[1]
        if self._appends:
            keys[:, :, end - key_states.shape[2] :] = key_states
            values[:, :, end - key_states.shape[2] :] = value_states
        else:
            assert isinstance(reads, Pass)
            keys[reads.row, :, reads.place] = key_states[0].transpose(0, 1)
            values[reads.row, :, reads.place] = value_states[0].transpose(0, 1)
        return keys, values

    def commit(self, offset: Tensor, path: Tensor) -> None:
        """Keeps the accepted path of each request; see `kernels.commit_kv`."""
        if self.storage is not None and path.shape[1] > 1:
            commit_kv(self.storage[:, : len(offset)], offset, path)

    def move(self, source: int, target: int) -> None:
        """Copies one slot over another."""
        if self.storage is not None and source != target:
            self.storage[:, target] = self.storage[:, source]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Entries before the staged forward; positions are always given explicitly."""
        del layer_idx
        return self._reads.before if isinstance(self._reads, Prompt) else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Visible entries and their offset, for models that size masks by the cache."""
        del query_length, layer_idx
        return self._width, 0

    @property
    def is_compileable(self) -> bool:
        return False

    def _allocated(self, like: Tensor) -> Tensor:
        heads, dim = like.shape
        size = (2 * self.num_layers, self.num_slots, heads, self.capacity, dim)
        with torch.inference_mode(False):  # so that it may be written in and out of that mode
            return torch.zeros(size, dtype=like.dtype, device=like.device)
