"""The drafters' passes with all lengths on the device, so that they can be recorded.

Levels and readings are those of `runtime.drafter`; only where a token stands and what it sees
comes from tensors. Rows are equal: each level evaluates as many nodes of every request.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from specctl.runtime.cascade import Cascade, cascade_attention
from specctl.runtime.draft_slots import DraftSlots
from specctl.runtime.drafter import Drafter, Eagle3Drafter, SmallModelDrafter
from specctl.runtime.graphs.places import Constants, Places


class Pass(NamedTuple):
    """T tokens of each of B rows for a drafter to evaluate: nodes of a level, or committed text.

    Attributes:
        token_ids, position_ids, place: `[B, T]` int64; `place` is an entry of the row's slot.
        words: `[B · T, words]` int32, the entries behind `stable` that each sees, itself included.
        stable: `[B]` int64, entries that the drafter has read.
        behind: entries behind `stable` that earlier passes wrote.
        constants: of the loop.
    """

    token_ids: Tensor
    position_ids: Tensor
    place: Tensor
    words: Tensor
    stable: Tensor
    behind: int
    constants: Constants

    @property
    def size(self) -> tuple[int, int]:
        """B and T."""
        rows, num_each = self.token_ids.shape
        return rows, num_each

    def places(self, width: int) -> Places:
        """Where they write, in slots of `width` entries."""
        row = self.constants.even_rows(*self.size)
        return Places(row, self.place.reshape(-1), self.size[0], width)

    def cascade(self) -> Cascade:
        """What they see."""
        offsets = self.constants.even_offsets(*self.size)
        return Cascade(self.stable, offsets, self.words[None, None], self.size[1], self.behind)


class StaticDrafter(Protocol):
    """A drafter whose state between calls stands at fixed addresses.

    Attributes:
        slots: what the drafter keeps on the host, too.
    """

    @property
    def slots(self) -> DraftSlots: ...

    def root_logits(self, num_rows: int) -> Tensor:
        """`[B, V]` after the roots."""
        ...

    def level(self, nodes: Pass, parent: Tensor) -> Tensor:
        """`[B, W, V]` after the nodes, whose parents are columns `[B, W]` of the level before."""
        ...

    def read(self, text: Pass, last: Tensor, features: Tensor | None) -> None:
        """Reads committed text; `last` `[B]` is the column of each row's last token."""
        ...


class StaticEagle3:
    """An EAGLE-3 head's passes. `hidden` holds the outputs of the last level.

    Args:
        max_width: nodes of a level at most.
    """

    def __init__(self, drafter: Eagle3Drafter, num_slots: int, max_width: int) -> None:
        self.drafter, self.head = drafter, drafter.head
        like = self.head.norm
        self.hidden = like.new_zeros(num_slots, max(1, max_width), self.head.config.hidden_size)

    @property
    def slots(self) -> DraftSlots:
        return self.drafter.slots

    def root_logits(self, num_rows: int) -> Tensor:
        roots = self.slots.roots(num_rows)
        self.hidden[:num_rows, 0] = roots
        return self.head.logits(roots)

    def level(self, nodes: Pass, parent: Tensor) -> Tensor:
        rows, num_nodes = nodes.size
        before = self.hidden[:rows]
        index = parent[..., None].expand(-1, -1, before.shape[2])
        hidden = self._pass(nodes, before.gather(1, index))
        before[:, :num_nodes] = hidden
        return self.head.logits(hidden)

    def read(self, text: Pass, last: Tensor, features: Tensor | None) -> None:
        assert features is not None, "the target captures no states for this head"
        hidden = self._pass(text, self.head.fuse(features))
        self.slots.roots(len(last)).copy_(at_column(hidden, last))

    def _pass(self, tokens: Pass, hidden: Tensor) -> Tensor:
        """`[B, T, H]`: the head's layer over tokens that see each other as their words say."""
        cache, cascade = self.drafter.cache, tokens.cascade()
        rows, num_each = tokens.size
        cache.stage_packed(0, tokens.places(cache.capacity))

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cache.update(key, value, 0)
            return cascade_attention(query, keys, values, cascade).transpose(1, 2)

        positions = tokens.position_ids.reshape(1, -1).clamp(max=len(self.head.cos) - 1)
        embeds = self.head.embed(tokens.token_ids.reshape(1, -1))
        output = self.head.block(embeds, hidden.reshape(1, rows * num_each, -1), positions, attend)
        return output.view(rows, num_each, -1)


class StaticSmallModel:
    """A small model's passes."""

    def __init__(self, drafter: SmallModelDrafter) -> None:
        self.drafter = drafter

    @property
    def slots(self) -> DraftSlots:
        return self.drafter.slots

    def root_logits(self, num_rows: int) -> Tensor:
        return self.slots.roots(num_rows)

    def level(self, nodes: Pass, parent: Tensor) -> Tensor:
        del parent  # its words say who is above a node
        return self._pass(nodes)

    def read(self, text: Pass, last: Tensor, features: Tensor | None) -> None:
        del features
        self.slots.roots(len(last)).copy_(at_column(self._pass(text), last))

    def _pass(self, tokens: Pass) -> Tensor:
        model, (rows, num_each) = self.drafter.model, tokens.size
        assert model.cache is not None, "allocate() comes first"
        result = model.forward_placed(
            tokens.places(model.cache.capacity),
            tokens.cascade().options,
            tokens.token_ids.reshape(1, -1),
            tokens.position_ids.reshape(1, -1),
        )
        logits = result.logits[0, :, : self.drafter.vocab_size]
        return logits.view(rows, num_each, -1)


def static_drafter(drafter: Drafter, num_slots: int, max_width: int) -> StaticDrafter | None:
    """The passes of a drafter, or None for a kind that has none."""
    if isinstance(drafter, Eagle3Drafter):
        return StaticEagle3(drafter, num_slots, max_width)
    if isinstance(drafter, SmallModelDrafter):
        return StaticSmallModel(drafter)
    return None


def at_column(values: Tensor, column: Tensor) -> Tensor:
    """`[B, ·]`: one entry of each row of `[B, T, ·]`."""
    index = column[:, None, None].expand(-1, 1, values.shape[2])
    return values.gather(1, index)[:, 0]
