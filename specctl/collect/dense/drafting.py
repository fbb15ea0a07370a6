"""One text to its dense tables: read, draft, label, write, a chunk of roots at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from specctl.collect.dense.attention import merged_attention
from specctl.collect.dense.drafters import DenseDrafter, dense_drafter
from specctl.collect.dense.labels import PathObserver, continuations, label_paths
from specctl.collect.dense.laws import Laws, TargetText
from specctl.collect.dense.rows import Chunk, ChunkHeading, heading_of, leaving, to_tables
from specctl.collect.dense.trees import Attention
from specctl.collect.shipping import Shipping, lane_for
from specctl.policy import FullTree, Policy, ShapeRule, policy_digest
from specctl.policy.rules import fresh_start
from specctl.runtime.drafter import Drafter
from specctl.runtime.growth import DrafterSource, grow_tree, pool_capacity
from specctl.runtime.load import Pair
from specctl.runtime.metrics import Stopwatch
from specctl.runtime.observe import Request
from specctl.runtime.runnable import runnable

if TYPE_CHECKING:
    from specctl.logs.trace_set import Tables

CHUNK_BYTES = 192 << 20
"""What the trees of one chunk, their logits and their scores may take; the text's own keys,
values and states stand beside it, and models are not counted."""
LEAVING_BYTES = 64 << 20
"""Of host memory that columns are copied to: two chunks at a time, 70 bytes a node. What they take
of the device until then stands beside `CHUNK_BYTES` too."""
POOL_BYTES = 61
"""A slot of a pool: 49 in `growth.PoolBuffers`, 4 in `Labels`, 8 for its index in the log."""


class DenseDrafting:
    """Drafts full trees from every position of texts.

    Args:
        pair: with a drafter. shape: of the trees.
        chunk_bytes: bound on what one chunk of positions takes.
        attention: how the nodes attend; the reference is `attention.exact_attention`.

    Raises:
        UsageError: no drafter, or a draft vocabulary smaller than `top_k`.
    """

    def __init__(
        self,
        pair: Pair,
        shape: FullTree,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        attention: Attention = merged_attention,
    ) -> None:
        policy = Policy(shape=shape)
        rules = runnable(policy, pair.drafter, pair.target.model.device)
        drafter = rules.drafter
        assert drafter is not None, "a full tree drafts"
        self.rule, self.shape, self.digest = rules.shape, shape, policy_digest(policy)
        self._target, self._aux_layers = pair.target.model, drafter.aux_layers
        self._drafter, self._chunk_bytes = dense_drafter(drafter, attention), chunk_bytes
        self._shipping: Shipping[ChunkHeading] = Shipping(
            lane_for(self._target.device), LEAVING_BYTES
        )

    def tables(self, request: Request, response_ids: tuple[int, ...]) -> list[Tables]:
        """The rows of one text, in order; none where the response has fewer than two tokens.

        While a device drafts one chunk, the columns of the one before leave it, and another thread
        makes tables of those that left. A CPU drafts with all its cores, so there it is one thread.
        """
        with torch.inference_mode():
            landed = self._landed(request, response_ids)
            if not self._shipping.lane.overlaps:
                return [self._to_tables(*chunk) for chunk in landed]
            with ThreadPoolExecutor(1) as pool:
                made = [pool.submit(self._to_tables, *chunk) for chunk in landed]
                return [rows.result() for rows in made]

    def _landed(
        self, request: Request, response_ids: tuple[int, ...]
    ) -> Iterator[tuple[ChunkHeading, dict[str, Tensor]]]:
        """Columns of a text's chunks, on the host."""
        lane = self._shipping.lane
        try:
            for chunk in self.chunks(request, response_ids):
                columns = leaving(chunk)
                with lane.after([lane.mark()]):
                    landed = self._shipping.send(columns, heading_of(chunk))
                del chunk, columns  # the next one needs their room; what leaves is kept
                yield from landed + self._shipping.land(num_left=1)
            yield from self._shipping.land()
        finally:
            self._shipping.land()  # of a text that was broken off

    def _to_tables(self, heading: ChunkHeading, columns: dict[str, Tensor]) -> Tables:
        with torch.inference_mode():
            return to_tables(heading, columns, self.shape, self.digest)

    def chunks(self, request: Request, response_ids: tuple[int, ...]) -> Iterator[Chunk]:
        """The labelled trees of one text, chunk by chunk; call it in inference mode."""
        prompt = len(request.prompt_ids)
        text = torch.tensor([*request.prompt_ids, *response_ids], device=self._target.device)
        self._target.capture(self._aux_layers)
        target = TargetText(self._target, text, prompt, request.sampling)
        self._drafter.begin_text(text)
        size = positions_per_chunk(
            self.rule, self._drafter, self._target.vocab_size, len(text), self._chunk_bytes
        )
        last = len(text) - 1  # the last token has no continuation, so no tree
        for start in range(prompt, last, size):
            roots = range(start, min(start + size, last))
            laws = target.laws(start, min(roots.stop - 1 + self.rule.max_depth, len(text)))
            self._drafter.read(roots, target.features)
            yield self._draft(request, roots, text, laws)

    def _draft(self, request: Request, roots: range, text: Tensor, laws: Laws) -> Chunk:
        continuation = continuations(text, roots, self.rule.max_depth)
        observed = PathObserver(self._drafter, laws, request.sampling, roots, continuation)
        source = DrafterSource(cast(Drafter, observed))  # growing asks no more of a drafter
        plan = self.rule.begin(fresh_start(len(roots), device=text.device))
        pool = grow_tree(self.rule, plan, source, text[roots.start : roots.stop], Stopwatch())
        labels = label_paths(pool.tree, continuation)
        return Chunk(request, roots, text, pool, labels, observed.js_distance, laws)


def positions_per_chunk(
    rule: ShapeRule,
    drafter: DenseDrafter,
    target_vocab: int,
    text_tokens: int,
    max_bytes: int,
) -> int:
    """P such that what stands at a time for P trees stays within `max_bytes`, at least 1.

    For each position, with W the widest level, V and V_t the vocabularies, H heads, S tokens of
    text, D levels and K children: draft logits and two passes over them, 3 · 4 W V; scores and
    weights of attention, 2 · 4 W H (S + D W); the target's laws and two passes, 5 · 4 V_t; the
    pool and its labels, `POOL_BYTES` a slot.
    """
    width = max(1, rule.width)
    logits = 12 * width * drafter.vocab_size
    scores = 8 * width * drafter.num_heads * (text_tokens + rule.max_depth * width)
    position_bytes = logits + scores + 20 * target_vocab + POOL_BYTES * pool_capacity(rule)
    return max(1, max_bytes // position_bytes)
