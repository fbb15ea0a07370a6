"""Dense tables of one text: read, drafted and labelled a chunk of roots at a time.

text ─► trees of P roots, labelled ─columns_of─► columns on the host ─rows.dense_tables─► Arrow
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specctl.collect.dense.drafters import DenseDrafter, dense_drafter
from specctl.collect.dense.labels import (
    Labels,
    TargetDistributions,
    TargetText,
    continuations,
    label_paths,
)
from specctl.collect.rows import dense_tables, pool_columns
from specctl.collect.transfer import Transfer, lane_for
from specctl.policy import FullTree, Policy, ShapeRule, policy_digest
from specctl.policy.growing import grow_tree, pool_capacity
from specctl.policy.rules import fresh_start
from specctl.runtime.load import Pair
from specctl.runtime.requests import Request, Stopwatch
from specctl.runtime.runnable import runnable
from specctl.tree import ROOT, DraftPool, gather

if TYPE_CHECKING:
    from specctl.logs.parquet import Tables

CHUNK_BYTES = 192 << 20
"""Bound on the trees, logits and scores of one chunk. The text's keys, values and states, and the
models, come on top."""
POOL_BYTES = 61
"""Bytes per slot of a pool: 49 in `tree.DraftPool`, 4 in `Labels`, 8 for its index in the log."""


class DenseDrafting:
    """Drafts full trees from every position of texts.

    Args:
        pair: a pair with a drafter.
        chunk_bytes: bound on one chunk of positions.

    Raises:
        UsageError: no drafter, or a draft vocabulary smaller than `top_k`.
    """

    def __init__(self, pair: Pair, shape: FullTree, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        policy = Policy(shape=shape)
        rules = runnable(policy, pair.drafter, pair.target.model.device)
        drafter = rules.drafter
        assert drafter is not None, "a full tree drafts"
        self.rule, self.shape, self.digest = rules.shape, shape, policy_digest(policy)
        self._target, self._aux_layers = pair.target.model, drafter.aux_layers
        self._drafter, self._chunk_bytes = dense_drafter(drafter), chunk_bytes
        self._transfer: Transfer[range] = Transfer(lane_for(self._target.device))

    def tables(self, request: Request, response_ids: tuple[int, ...]) -> list[Tables]:
        """The rows of one text, in order; empty if the response has fewer than two tokens.

        While a GPU drafts one chunk, the columns of the previous one are copied to the host and a
        second thread makes tables. On a CPU, drafting uses all cores and one thread does it all.
        """

        def made(roots: range, columns: dict[str, Tensor]) -> Tables:
            with torch.inference_mode():
                return dense_tables(request, roots, columns, self.shape, self.digest)

        with torch.inference_mode():
            landed = self._landed(request, response_ids)
            if not self._transfer.lane.overlaps:
                return [made(*chunk) for chunk in landed]
            with ThreadPoolExecutor(1) as pool:
                waiting = [pool.submit(made, *chunk) for chunk in landed]
                return [rows.result() for rows in waiting]

    def _landed(
        self, request: Request, response_ids: tuple[int, ...]
    ) -> Iterator[tuple[range, dict[str, Tensor]]]:
        """Columns of a text's chunks, on the host."""
        lane = self._transfer.lane
        try:
            for roots, columns in self.chunks(request, response_ids):
                yield from self._transfer.land()  # the chunk before, copied meanwhile
                with lane.after([lane.mark()]):
                    self._transfer.send(columns, roots)
                del columns  # frees them for the next chunk; `send` keeps what it still copies
            yield from self._transfer.land()
        finally:
            self._transfer.land()  # if the caller stopped early

    def chunks(
        self, request: Request, response_ids: tuple[int, ...]
    ) -> Iterator[tuple[range, dict[str, Tensor]]]:
        """Roots and the `columns_of` their trees, chunk by chunk; needs inference mode."""
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
            yield roots, self._columns(text, roots, target)

    def _columns(self, text: Tensor, roots: range, target: TargetText) -> dict[str, Tensor]:
        end = min(roots.stop - 1 + self.rule.max_depth, len(text))
        targets = target.distributions(roots.start, end)
        self._drafter.read(roots, target.features)
        continuation = continuations(text, roots, self.rule.max_depth)
        plan = self.rule.begin(fresh_start(len(roots), device=text.device))
        here = text[roots.start : roots.stop]
        pool = grow_tree(self.rule, plan, self._drafter, here, Stopwatch())
        labels = label_paths(pool, continuation)
        return {"text": text, **columns_of(roots, pool, labels, targets)}


def positions_per_chunk(
    rule: ShapeRule,
    drafter: DenseDrafter,
    target_vocab: int,
    text_tokens: int,
    max_bytes: int,
) -> int:
    """The largest P, at least 1, for which the tensors of P trees stay within `max_bytes`.

    Per position, with W the widest level, V and V_t the vocabularies, H heads, S tokens of text
    and D levels: draft logits and two passes over them, 3 · 4 W V; scores and weights of attention,
    2 · 4 W H (S + D W); the target's distributions and two passes, 5 · 4 V_t; the pool and its
    labels, `POOL_BYTES` a slot.
    """
    width = max(1, rule.width)
    logits = 12 * width * drafter.vocab_size
    scores = 8 * width * drafter.num_heads * (text_tokens + rule.max_depth * width)
    position_bytes = logits + scores + 20 * target_vocab + POOL_BYTES * pool_capacity(rule)
    return max(1, max_bytes // position_bytes)


# --------------------------------------------------------------------------- columns


def columns_of(
    roots: range, pool: DraftPool, labels: Labels, targets: TargetDistributions
) -> dict[str, Tensor]:
    """The tensors of `rows.dense_tables`, on their device.

    Args:
        roots: indices of the P roots in the text. pool, labels: `[P, N]`.
        targets: distributions after every token that a node on the path may stand for.
    """
    row, node = labels.judged.nonzero(as_tuple=True)
    above, token = pool.depth[row, node] - 1, pool.token_ids[row, node]
    at = roots.start - targets.first + row + above
    top2, top1 = targets.ordered[:, -2:][at].unbind(1)
    return {
        **labelled_columns(pool, labels),
        "target_logp": targets.logp[at, token],
        "target_rank": _rank(targets, at, token),
        "target_top1_logit": top1,
        "target_top2_logit": top2,
        "target_entropy": targets.entropy[at],
    }


def labelled_columns(pool: DraftPool, labels: Labels) -> dict[str, Tensor]:
    """The columns of `columns_of` without the target: M nodes, tree after tree, without gaps."""
    place = pool.valid.cumsum(1) - 1
    flat = pool.valid.flatten().nonzero()[:, 0]
    slots = pool_columns(pool) | {
        "node_idx": place,
        "parent_idx": gather(place, pool.parent, ROOT),
        **vars(labels),
    }
    return {
        "num_drafted": pool.num_nodes - 1,
        "num_accepted": labels.num_accepted,
        "row": torch.div(flat, pool.num_slots, rounding_mode="floor"),
        **{name: values.flatten()[flat] for name, values in slots.items()},
    }


def _rank(targets: TargetDistributions, at: Tensor, token: Tensor) -> Tensor:
    """1 + number of strictly larger logits, by binary search in the sorted distributions.

    Args:
        at: `[M]` int64, row of the distribution. token: `[M]` int64.
    """
    order = at.argsort(stable=True)
    counts = torch.bincount(at, minlength=len(targets.logits))
    behind = torch.arange(len(at), device=at.device) - (counts.cumsum(0) - counts)[at[order]]
    slot = torch.empty_like(at).scatter_(
        0, order, behind
    )  # the node's place among those of its row
    table = targets.logits.new_zeros(len(counts), int(counts.max()))
    table[at, slot] = targets.logits[at, token]
    not_larger = torch.searchsorted(targets.ordered, table, right=True)[at, slot]
    return targets.ordered.shape[1] - not_larger + 1
