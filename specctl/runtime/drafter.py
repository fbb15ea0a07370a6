"""Drafters: what proposes the next level of a tree.

Both kinds keep, per slot, a *stable* prefix of text they have read; the entries of tree nodes
stand behind it during a round and are overwritten by the next `extend`. The node at level d is
evaluated at position `stable + d - 1`, for both kinds (EAGLE's slots lag the text by one).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specctl.runtime.attention import (
    causal_inner,
    masked_attention,
    packed_attention,
    prefix_mask,
)
from specctl.runtime.cache import SlotCache
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.draft_slots import (
    DraftSlots,
    TreeState,
    last_of,
    level_positions,
    step_positions,
)
from specctl.runtime.eagle3 import Eagle3Head
from specctl.runtime.eagle3_head import Attend
from specctl.runtime.packing import Packing, packing_of, pays


class Drafter(Protocol):
    """Reads committed text, then evaluates tree nodes level by level.

    Attributes:
        aux_layers: target layers whose inputs `extend` wants as features; may be empty.
        vocab_size: size of the logits it returns.
        device: where it computes.
    """

    aux_layers: tuple[int, ...]
    vocab_size: int

    @property
    def device(self) -> torch.device: ...

    def allocate(self, num_slots: int, capacity: int) -> None:
        """Room for `num_slots` requests of `capacity` tokens, tree nodes included."""
        ...

    def prefill(self, slot: int, token_ids: Tensor, features: Tensor | None) -> None:
        """Reads a prompt and its first generated token.

        Args:
            token_ids: `[1, T + 1]`. features: `[1, T, ·]` of the prompt.
        """
        ...

    def extend(self, token_ids: Tensor, counts: list[int], features: Tensor | None) -> None:
        """Reads newly committed text into slots 0..A-1.

        Args:
            token_ids: `[A, T]`, row b holding `counts[b]` tokens, then padding.
            features: `[A, T, ·]` of the tokens before each of these, or None.
        """
        ...

    def begin_round(self, num_rows: int) -> Tensor:
        """Forgets the last round's nodes; `[A, V]` logits after each root."""
        ...

    def expand(self, token_ids: Tensor, parent_slot: Tensor) -> Tensor:
        """Evaluates one level of nodes; `[A, W, V]` logits after each.

        Args:
            token_ids: `[A, W]`, target vocabulary.
            parent_slot: `[A, W]`, column of each node's parent in the previous level; all 0 at
                the first level, whose parent is the root.
        """
        ...

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft vocabulary to target vocabulary."""
        ...

    def move(self, source: int, target: int) -> None:
        """Copies one slot over another."""
        ...


class SmallModelDrafter:
    """An independent causal LM with the target's tokenizer.

    Args:
        vocab_size: logits beyond it are padding of the model's own and are cut off.
    """

    aux_layers: tuple[int, ...] = ()

    def __init__(self, model: CachedModel, vocab_size: int | None = None) -> None:
        self.model = model
        self.vocab_size = vocab_size or model.vocab_size
        self.slots, self._tree = DraftSlots([]), TreeState()

    @property
    def device(self) -> torch.device:
        return self.model.device

    def allocate(self, num_slots: int, capacity: int) -> None:
        self.model.allocate(num_slots, capacity)
        self.slots = DraftSlots([0] * num_slots)

    def prefill(self, slot: int, token_ids: Tensor, features: Tensor | None) -> None:
        del features
        self.slots.stable[slot] = token_ids.shape[1]
        logits = self.model.extend(slot, 0, token_ids).logits[:, -1, : self.vocab_size]
        self.slots.keep_root(slot, logits)

    def extend(self, token_ids: Tensor, counts: list[int], features: Tensor | None) -> None:
        del features
        offsets = self.slots.advance(counts)
        positions = step_positions(offsets, token_ids)
        inner = causal_inner(token_ids.shape[1], token_ids.device)
        result = self.model.forward(0, offsets, token_ids, positions, inner, sizes=counts)
        self.slots.keep_root(0, last_of(result.logits, counts)[:, : self.vocab_size])

    def begin_round(self, num_rows: int) -> Tensor:
        self._tree = TreeState()
        return self.slots.roots(num_rows)

    def expand(self, token_ids: Tensor, parent_slot: Tensor) -> Tensor:
        behind = self._tree.num_nodes
        inner = self._tree.descend(parent_slot)
        offsets = self.slots.stable[: len(token_ids)]
        positions = level_positions(offsets, self._tree.level, token_ids)
        result = self.model.forward(0, offsets, token_ids, positions, inner, behind=behind)
        return result.logits[..., : self.vocab_size]

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids

    def move(self, source: int, target: int) -> None:
        assert self.model.cache is not None
        self.model.cache.move(source, target)
        self.slots.move(source, target)


class Eagle3Drafter:
    """An EAGLE-3 head: one layer over fused target states and its own previous output."""

    def __init__(self, head: Eagle3Head, aux_layers: tuple[int, ...]) -> None:
        self.head, self.aux_layers = head, aux_layers
        self.vocab_size = head.config.draft_vocab_size
        self.cache = SlotCache(1, 0, 0)
        self.slots, self._tree = DraftSlots([]), TreeState()
        self._hidden = torch.empty(0)

    @property
    def device(self) -> torch.device:
        return self.head.norm.device

    def allocate(self, num_slots: int, capacity: int) -> None:
        self.cache = SlotCache(1, num_slots, capacity)
        self.slots = DraftSlots([0] * num_slots)

    def prefill(self, slot: int, token_ids: Tensor, features: Tensor | None) -> None:
        # Slot i pairs token i + 1 with the target's state at i: the first token has no slot.
        hidden = self._read(slot, [0], token_ids[:, 1:], features)
        self.slots.stable[slot] = hidden.shape[1]
        self.slots.keep_root(slot, hidden[:, -1])

    def extend(self, token_ids: Tensor, counts: list[int], features: Tensor | None) -> None:
        hidden = self._read(0, self.slots.advance(counts), token_ids, features, counts)
        self.slots.keep_root(0, last_of(hidden, counts))

    def begin_round(self, num_rows: int) -> Tensor:
        self._tree = TreeState()
        self._hidden = self.slots.roots(num_rows)[:, None]
        return self.head.logits(self._hidden)[:, 0]

    def expand(self, token_ids: Tensor, parent_slot: Tensor) -> Tensor:
        behind = self._tree.num_nodes
        inner = self._tree.descend(parent_slot)
        index = parent_slot[..., None].expand(-1, -1, self._hidden.shape[2])
        hidden = self._hidden.gather(1, index)
        offsets = self.slots.stable[: len(token_ids)]
        positions = level_positions(offsets, self._tree.level, token_ids)
        self._hidden = self._run(0, offsets, token_ids, hidden, positions, inner, behind)
        return self.head.logits(self._hidden)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.head.to_target_ids(draft_ids)

    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target)
        self.slots.move(source, target)

    def _read(
        self,
        first_slot: int,
        offsets: list[int],
        token_ids: Tensor,
        features: Tensor | None,
        sizes: list[int] | None = None,
    ) -> Tensor:
        assert features is not None, "the target captures no states for this head"
        positions = step_positions(offsets, token_ids)
        inner = causal_inner(token_ids.shape[1], token_ids.device)
        if sizes is not None and pays(sizes):
            packing = packing_of(offsets, sizes, inner)
            return self._read_packed(first_slot, packing, token_ids, features, positions)
        hidden = self.head.fuse(features)
        return self._run(first_slot, offsets, token_ids, hidden, positions, inner)

    def _read_packed(
        self,
        first_slot: int,
        packing: Packing,
        token_ids: Tensor,
        features: Tensor,
        position_ids: Tensor,
    ) -> Tensor:
        self.cache.stage_packed(first_slot, packing)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.update(key, value, 0)
            return packed_attention(query, keys, values, packing)

        tokens, positions = packing.pack(token_ids), packing.pack(position_ids)
        hidden = self.head.fuse(packing.pack(features))
        return packing.unpack(self._block(tokens, hidden, positions, attend), token_ids.shape[1])

    def _run(
        self,
        first_slot: int,
        offsets: list[int],
        token_ids: Tensor,
        hidden: Tensor,
        position_ids: Tensor,
        inner: Tensor,
        behind: int = 0,
    ) -> Tensor:
        starts = [offset + behind for offset in offsets]
        width = self.cache.stage(first_slot, starts, token_ids.shape[1])
        mask = prefix_mask(offsets, inner, width)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.update(key, value, 0)
            return masked_attention(query, keys, values, mask)

        return self._block(token_ids, hidden, position_ids, attend)

    def _block(
        self, token_ids: Tensor, hidden: Tensor, position_ids: Tensor, attend: Attend
    ) -> Tensor:
        # Nodes past the last position are never emitted, but they must not be out of bounds.
        position_ids = position_ids.clamp(max=len(self.head.cos) - 1)
        return self.head.block(self.head.embed(token_ids), hidden, position_ids, attend)
