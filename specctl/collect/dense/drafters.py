"""Drafters that read a text once and then draft at many of its positions together.

`grow_tree` sees a batch whose rows are positions. Slots, stable prefixes and node positions are as
in `runtime.drafter`, so every tree equals that of a live round.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specctl.collect.dense.attention import TreeMemory, attend_by
from specctl.policy.rules import Frontier, Level
from specctl.runtime.cached_model import CachedModel, SlotCache
from specctl.runtime.drafter import Drafter, Eagle3Drafter, SmallModelDrafter, children_of
from specctl.runtime.eagle3_head import Eagle3Head
from specctl.tree import Children

READ_TOKENS = 512
"""Most text read in one forward: its mask and logits are `[512, text]` and `[512, V]`."""


class DenseDrafter:
    """Reads one text in order; the tokens read last are the roots of the next trees. A source of
    `policy.growing.grow_tree`."""

    vocab_size: int  # V of its logits
    num_heads: int  # of its attention; sets the memory of a chunk

    def begin_text(self, token_ids: Tensor) -> None:
        """Starts a text of `[T]` tokens."""
        raise NotImplementedError

    def read(self, roots: range, features: Tensor | None) -> None:
        """Reads the text up to the last of `roots`, which are indices into it.

        Args:
            features: `[T', ·]` the target's states at the first T' tokens, up to the last root at
                least; None if the drafter uses none.
        """
        raise NotImplementedError

    def begin_round(self) -> Tensor:
        """`[P, V]` logits after each root."""
        raise NotImplementedError

    def expand(self, token_ids: Tensor, parent_slot: Tensor) -> Tensor:
        """Evaluates one level of nodes; `[P, W, V]`."""
        raise NotImplementedError

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Maps ids of the draft vocabulary to the target's."""
        return draft_ids

    def children(self, level: Level, frontier: Frontier, top_k: int) -> Children:
        """See `policy.growing.ChildSource`."""
        if level.start == 0:
            logits = self.begin_round()[:, None]
        else:
            parent = torch.zeros_like(frontier.index)
            if level.start > 1:
                parent = (frontier.index - level.start) // top_k
            logits = self.expand(level.pool.token_ids.gather(1, frontier.index), parent)
        return children_of(logits, top_k, self.to_target_ids)


class DenseEagle3(DenseDrafter):
    """An EAGLE-3 head, teacher-forced on the target's states."""

    def __init__(self, head: Eagle3Head) -> None:
        self.head = head
        self.vocab_size = head.config.draft_vocab_size
        self.num_heads = head.config.num_attention_heads
        self._num_read = 0

    def begin_text(self, token_ids: Tensor) -> None:
        self._text, self._num_read = token_ids, 0
        self._cache = SlotCache([token_ids.device], 1, len(token_ids) - 1)

    def read(self, roots: range, features: Tensor | None) -> None:
        assert features is not None, "the target captures no states for this head"
        # Slot i pairs token i + 1 with the target's state at i, so that a root t has slot t - 1.
        end = roots.stop - 1
        hidden = [
            self._read(begin, features[begin : min(begin + READ_TOKENS, end)])
            for begin in range(self._num_read, end, READ_TOKENS)
        ]
        self._num_read = end
        self._roots = torch.cat(hidden, 1)[0, -len(roots) :]
        self._trees = TreeMemory(self._cache, range(roots.start, roots.stop))

    def begin_round(self) -> Tensor:
        self._hidden = self._roots[:, None]
        return self.head.logits(self._hidden)[:, 0]

    def expand(self, token_ids: Tensor, parent_slot: Tensor) -> Tensor:
        self._trees.descend(parent_slot)
        index = parent_slot[..., None].expand(-1, -1, self._hidden.shape[2])
        hidden = self._hidden.gather(1, index)
        # Nodes past the last position are never emitted; the clamp keeps them in bounds.
        positions = self._trees.positions(token_ids.shape[1]).clamp(max=len(self.head.cos) - 1)
        embeds, attend = self.head.embed(token_ids), partial(self._trees.attend, 0)
        self._hidden = self.head.block(embeds, hidden, positions, attend)
        return self.head.logits(self._hidden)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.head.to_target_ids(draft_ids)

    def _read(self, start: int, features: Tensor) -> Tensor:
        """Reads one slot per state of `features`, from slot `start` on; `[1, T, H]`."""
        token_ids = self._text[None, start + 1 : start + 1 + len(features)]
        read = Eagle3Drafter(self.head, ()).read_prompt
        return read(self._cache, 0, start, token_ids, features)[None]


class DenseSmallModel(DenseDrafter):
    """An independent causal LM: a plain pass over the text, then trees after it."""

    def __init__(self, model: CachedModel, vocab_size: int) -> None:
        self.model, self.vocab_size = model, vocab_size
        self.num_heads = int(model.config.num_attention_heads)
        self._num_read = 0

    def begin_text(self, token_ids: Tensor) -> None:
        self._text, self._num_read = token_ids, 0
        self.model.allocate(1, len(token_ids))

    def read(self, roots: range, features: Tensor | None) -> None:
        del features
        for begin in range(self._num_read, roots.start, READ_TOKENS):
            self._read(range(begin, min(begin + READ_TOKENS, roots.start)), last_only=True)
        self._roots = self._read(roots, last_only=False)[0, :, : self.vocab_size]
        self._num_read = roots.stop
        cache = self.model.cache
        assert cache is not None
        self._trees = TreeMemory(cache, range(roots.start + 1, roots.stop + 1))

    def begin_round(self) -> Tensor:
        return self._roots

    def expand(self, token_ids: Tensor, parent_slot: Tensor) -> Tensor:
        self._trees.descend(parent_slot)
        positions = self._trees.positions(token_ids.shape[1])
        with attend_by(self.model.model, self._trees):
            output = self.model.model(
                input_ids=token_ids,
                position_ids=positions.clamp(max=self.model.context_tokens - 1),
                # Any 4-D mask keeps transformers from building one; `TreeMemory` masks itself.
                attention_mask=token_ids.new_ones(1, 1, 1, 1, dtype=torch.bool),
                use_cache=False,
            )
        logits: Tensor = output.logits
        return logits[..., : self.vocab_size]

    def _read(self, span: range, *, last_only: bool) -> Tensor:
        """Logits `[1, T', V]` of a span of the text."""
        token_ids = self._text[None, span.start : span.stop]
        return self.model.extend(0, span.start, token_ids, last_only=last_only).logits[None]


def dense_drafter(drafter: Drafter) -> DenseDrafter:
    """The dense form of a live drafter, sharing its weights."""
    if isinstance(drafter, Eagle3Drafter):
        return DenseEagle3(drafter.head)
    assert isinstance(drafter, SmallModelDrafter)
    return DenseSmallModel(drafter.model, drafter.vocab_size)
