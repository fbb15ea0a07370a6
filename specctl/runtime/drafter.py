"""Drafters: models that propose the next level of a tree.

Each slot holds a *stable* prefix, the text read so far. Entries of tree nodes follow it during a
round and are overwritten by the next `read`. Both kinds evaluate a node of level d at position
`stable + d - 1` (EAGLE's slots lag the text by one). Their state stays at fixed addresses, so that
passes may be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from specctl.features import ENTROPY_TOP_K
from specctl.kernels.node_features import node_features
from specctl.policy.rules import Frontier, Level
from specctl.runtime.attention import Pass, PassTables, Prompt, attend_prompt
from specctl.runtime.cached_model import CachedModel, SlotCache
from specctl.runtime.eagle3_head import Attend, Eagle3Head
from specctl.tree import Children


class Drafter(Protocol):
    """Reads committed text, then evaluates tree nodes level by level."""

    aux_layers: tuple[int, ...]  # target layers whose inputs are the features of `read`
    vocab_size: int  # of its logits
    lead: int  # tokens that its stable prefix is ahead of the target's, which lacks the root

    @property
    def device(self) -> torch.device: ...
    @property
    def capacity(self) -> int:
        """Entries of a slot."""
        ...

    def allocate(self, num_slots: int, capacity: int, max_width: int) -> None:
        """Allocates slots of `capacity` tokens, tree nodes included, and levels of `max_width`."""
        ...

    def prefill(self, slot: int, token_ids: Tensor, features: Tensor | None) -> None:
        """Reads a prompt and its first generated token.

        Args:
            token_ids: `[1, T + 1]`. features: `[T, F]` of the prompt.
        """
        ...

    def read(self, text: Pass, last: Tensor, features: Tensor | None) -> None:
        """Reads committed text of B requests.

        Args:
            last: `[B]` int64, index of each request's last token among the T of the text; padding
                may follow.
            features: `[T, F]`, the target's states before each of these tokens, or None.
        """
        ...

    def root_logits(self, num_rows: int) -> Tensor:
        """`[B, V]`: logits after each root."""
        ...

    def level(self, nodes: Pass, parent: Tensor) -> Tensor:
        """`[B, n, V]`: logits after the nodes of a level.

        Args:
            parent: `[B, n]` int64, column of each node's parent in the level before; 0 at level 1.
        """
        ...

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Maps draft ids to target ids."""
        ...

    def move(self, source: int, target: int) -> None:
        """Copies one slot over another."""
        ...


class SmallModelDrafter:
    """An independent causal LM with the target's tokenizer.

    Args:
        vocab_size: padding logits from here on are dropped.
    """

    aux_layers: tuple[int, ...] = ()
    lead = 1

    def __init__(self, model: CachedModel, vocab_size: int | None = None) -> None:
        self.model = model
        self.vocab_size = vocab_size or model.vocab_size
        self._roots = torch.empty(0)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def capacity(self) -> int:
        assert self.model.cache is not None, "allocate() comes first"
        return self.model.cache.capacity

    def allocate(self, num_slots: int, capacity: int, max_width: int) -> None:
        del max_width
        self.model.allocate(num_slots, capacity)
        size = (num_slots, self.vocab_size)
        self._roots = torch.zeros(size, dtype=self.model.dtype, device=self.device)

    def prefill(self, slot: int, token_ids: Tensor, features: Tensor | None) -> None:
        del features
        self._roots[slot] = self.model.extend(slot, 0, token_ids).logits[-1, : self.vocab_size]

    def read(self, text: Pass, last: Tensor, features: Tensor | None) -> None:
        del features
        self._roots[: len(last)] = self._pass(text)[last]

    def root_logits(self, num_rows: int) -> Tensor:
        return self._roots[:num_rows]

    def level(self, nodes: Pass, parent: Tensor) -> Tensor:
        del parent  # the pass holds the ancestors
        return self._pass(nodes).view(*nodes.size, -1)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids

    def move(self, source: int, target: int) -> None:
        assert self.model.cache is not None
        self.model.cache.move(source, target)
        self._roots[target] = self._roots[source]

    def _pass(self, tokens: Pass) -> Tensor:
        return self.model.forward(tokens).logits[:, : self.vocab_size]


class Eagle3Drafter:
    """An EAGLE-3 head: one layer over fused target states and its own previous output."""

    lead = 0

    def __init__(self, head: Eagle3Head, aux_layers: tuple[int, ...]) -> None:
        self.head, self.aux_layers = head, aux_layers
        self.vocab_size = head.config.draft_vocab_size
        self.cache = SlotCache([], 0, 0)
        self._roots = self._hidden = torch.empty(0)

    @property
    def device(self) -> torch.device:
        return self.head.norm.device

    @property
    def capacity(self) -> int:
        return self.cache.capacity

    def allocate(self, num_slots: int, capacity: int, max_width: int) -> None:
        config, like = self.head.config, self.head.norm
        self.cache = SlotCache([], 0, 0)  # frees the old cache before the new one is allocated
        key = like.new_empty(config.num_key_value_heads, config.head_dim)
        self.cache = SlotCache([like.device], num_slots, capacity, key)
        with torch.inference_mode(False):
            self._roots = like.new_zeros(num_slots, config.hidden_size)
            self._hidden = like.new_zeros(num_slots, max(1, max_width), config.hidden_size)

    def prefill(self, slot: int, token_ids: Tensor, features: Tensor | None) -> None:
        # Slot i pairs token i + 1 with the target's state at i, so the first token has no slot.
        self._roots[slot] = self.read_prompt(self.cache, slot, 0, token_ids[:, 1:], features)[-1]

    def read_prompt(
        self, cache: SlotCache, slot: int, start: int, token_ids: Tensor, features: Tensor | None
    ) -> Tensor:
        """`[T, H]`: the head's outputs for text at `start` of a slot.

        Args:
            token_ids: `[1, T]`. features: `[T, F]`, the target's states before each of them.
        """
        reads, size = Prompt(start), token_ids.shape[1]
        cache.stage(reads, size, slot)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cache.update(key, value, 0)
            return attend_prompt(query, keys, values, reads)

        positions = torch.arange(start, start + size, device=self.device)[None]
        return self._block(token_ids, self._fused(features)[None], positions, attend)[0]

    def read(self, text: Pass, last: Tensor, features: Tensor | None) -> None:
        self._roots[: len(last)] = self._pass(text, self._fused(features))[last]

    def root_logits(self, num_rows: int) -> Tensor:
        roots = self._roots[:num_rows]
        self._hidden[:num_rows, 0] = roots
        return self.head.logits(roots)

    def level(self, nodes: Pass, parent: Tensor) -> Tensor:
        before = self._hidden[: nodes.num_rows]
        index = parent[..., None].expand(-1, -1, before.shape[2])
        hidden = self._pass(nodes, before.gather(1, index).flatten(0, 1)).view(*nodes.size, -1)
        before[:, : nodes.max_nodes] = hidden
        return self.head.logits(hidden)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.head.to_target_ids(draft_ids)

    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target)
        self._roots[target] = self._roots[source]

    def _fused(self, features: Tensor | None) -> Tensor:
        assert features is not None, "the target captures no states for this head"
        return self.head.fuse(features)

    def _pass(self, tokens: Pass, hidden: Tensor) -> Tensor:
        """`[T, H]`: outputs at nodes or text, from the hidden states `[T, H]` before them."""
        self.cache.stage(tokens, len(hidden))

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.update(key, value, 0)
            return tokens.attend(query, keys, values).transpose(1, 2)

        ids, positions = tokens.token_ids[None], tokens.position_ids[None]
        return self._block(ids, hidden[None], positions, attend)[0]

    def _block(
        self, token_ids: Tensor, hidden: Tensor, position_ids: Tensor, attend: Attend
    ) -> Tensor:
        # Nodes past the last position are never emitted, but must stay in bounds.
        position_ids = position_ids.clamp(max=len(self.head.cos) - 1)
        return self.head.block(self.head.embed(token_ids), hidden, position_ids, attend)


class DrafterSource:
    """Children for `policy.growing.grow_tree`: one forward of the drafter a level.

    Args:
        stable: `[B]` int64, entries of each slot that the drafter has read. longest: their largest.
        keep_logits: keep the logits of every node for `parent_logits`.
        draw: draws a chain's next tokens instead of taking the likeliest: from logits `[B, Vd]` and
            the level, 1 for the root's children, to processed logits, which are kept instead, and
            draft ids `[B]`.
    """

    def __init__(
        self,
        drafter: Drafter,
        stable: Tensor,
        longest: int,
        tables: PassTables,
        *,
        keep_logits: bool = False,
        draw: Callable[[Tensor, int], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.drafter, self.stable, self.longest = drafter, stable, longest
        self.tables, self.keep_logits, self._draw = tables, keep_logits, draw
        self._depth = self._behind = 0
        self._visible: Tensor | None = None  # all entries behind, while the tree is a chain
        self._kept: list[Tensor] = []
        self._slot_column: list[Tensor] = []

    def children(self, level: Level, frontier: Frontier, top_k: int) -> Children:
        if level.start == 0:
            logits = self.drafter.root_logits(len(frontier.index))[:, None]
        else:
            parent = torch.zeros_like(frontier.index)
            if level.start > 1:
                parent = (frontier.index - level.start) // top_k
            token_ids = level.pool.token_ids.gather(1, frontier.index)
            logits = self.drafter.level(self._nodes(token_ids, parent), parent)
        children = children_of(logits, top_k, self.drafter.to_target_ids)
        if self._draw is not None:
            drawn_from, ids = self._draw(logits[:, 0], self._depth + 1)
            own = logits.float().log_softmax(-1).gather(-1, ids[:, None, None])
            target_ids = self.drafter.to_target_ids(ids)[:, None, None]
            children, logits = (
                children._replace(token_ids=target_ids, logp=own),
                drawn_from[:, None],
            )
        if self.keep_logits:
            before = sum(kept.shape[1] for kept in self._kept)
            columns = torch.arange(logits.shape[1], device=logits.device) + before
            self._kept.append(logits)
            self._slot_column.append(columns.repeat_interleave(top_k))
        return children

    def parent_logits(self, slots: Tensor) -> Tensor:
        """`[B, N, Vd]`: the logits that pool slots `[B, N]` were drawn from; for the root and empty
        slots those of the root's children."""
        logits = torch.cat(self._kept, 1)
        column = torch.cat([torch.zeros_like(self._slot_column[0][:1]), *self._slot_column])
        index = column[slots.clamp(min=0)][..., None]
        return logits.gather(1, index.expand(-1, -1, logits.shape[2]))

    def _nodes(self, token_ids: Tensor, parent: Tensor) -> Pass:
        rows, width = parent.shape
        position = self.stable[:, None] + self._depth
        behind, device = self._behind, parent.device
        self._depth, self._behind = self._depth + 1, behind + width
        words = None
        if self._visible is None and width == 1:  # a chain so far: causal like text
            words, prefixes, before = self.tables.causal_words(rows, 1), self.stable + behind, 0
        else:
            prefixes, before = self.stable, behind
            if self._visible is None:
                self._visible = parent.new_ones(rows, 1, behind, dtype=torch.bool)
            above = self._visible.gather(1, parent[..., None].expand(-1, -1, behind))
            own = torch.eye(width, dtype=torch.bool, device=device).expand(rows, -1, -1)
            self._visible = torch.cat([above, own], 2)
        steps = torch.arange(behind, behind + width, device=device)
        return Pass(
            token_ids=token_ids.flatten(),
            position_ids=position.expand(-1, width).flatten(),
            row=self.tables.rows(rows, width),
            place=(self.stable[:, None] + steps).flatten(),
            prefixes=prefixes,
            offsets=self.tables.offsets(rows, width),
            max_nodes=width,
            behind=before,
            width=self.longest + behind + width,
            words=words,
            visible=None if self._visible is None else self._visible.flatten(0, 1),
            exact=True,
        )


def children_of(logits: Tensor, top_k: int, to_target_ids: Callable[[Tensor], Tensor]) -> Children:
    """The likeliest children by a drafter's logits `[B, W, V]`."""
    found = node_features(logits, top_k, ENTROPY_TOP_K)
    token_ids = to_target_ids(found.top_ids)
    return Children(token_ids, found.top_logp, found.entropy, found.topk_entropy)
