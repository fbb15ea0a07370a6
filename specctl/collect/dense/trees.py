"""One text to its dense tables: read, draft, label, write, a chunk of roots at a time.

text ─► Chunk (trees of P roots, labelled) ─leaving─► columns on the host ─to_tables─► Arrow
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specctl.collect.dense.attention import Attention, merged_attention
from specctl.collect.dense.drafters import DenseDrafter, dense_drafter
from specctl.collect.dense.labels import (
    Labels,
    PathObserver,
    TargetDistributions,
    TargetText,
    continuations,
    label_paths,
)
from specctl.collect.round_rows import Columns, Masked, nullable, repeat, table_of
from specctl.collect.shipping import Shipping, lane_for
from specctl.features import DraftPool
from specctl.policy import FullTree, Policy, ShapeRule, policy_digest
from specctl.policy.growing import Children, PoolBuffers, grow_tree, pool_capacity
from specctl.policy.rules import Frontier, fresh_start
from specctl.runtime.drafter import children_of
from specctl.runtime.load import Pair
from specctl.runtime.requests import Request, Stopwatch
from specctl.runtime.runnable import runnable
from specctl.trace import TIME_COLUMNS
from specctl.tree import ROOT, gather

if TYPE_CHECKING:
    from specctl.logs.parquet import Tables

CHUNK_BYTES = 192 << 20
"""Bound on the trees of one chunk, their logits and their scores; the text's own keys, values and
states stand beside it, and models are not counted."""
LEAVING_BYTES = 64 << 20
"""Of host memory that columns are copied to: two chunks at a time, 70 bytes a node. Until then they
take as much of the device, beside `CHUNK_BYTES`."""
POOL_BYTES = 61
"""A slot of a pool: 49 in `growth.PoolBuffers`, 4 in `Labels`, 8 for its index in the log."""


@dataclass(frozen=True)
class Chunk:
    """The trees of P consecutive roots of one text, drafted and labelled.

    Attributes:
        roots: their indices in the text. text: `[T]` int64, prompt and response.
        pool: `[P, N]`. labels: `[P, N]`. js_distance: `[P, D]`, by depth of the node on the path.
        targets: after every token that a node on a path stands for.
    """

    request: Request
    roots: range
    text: Tensor
    pool: DraftPool
    labels: Labels
    js_distance: Tensor
    targets: TargetDistributions


class Heading(NamedTuple):
    """The part of a chunk that the host knows while its columns are on their way."""

    request: Request
    roots: range


class DenseDrafting:
    """Drafts full trees from every position of texts.

    Args:
        pair: with a drafter. shape: of the trees.
        chunk_bytes: bound on one chunk of positions.
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
        self._shipping: Shipping[Heading] = Shipping(lane_for(self._target.device), LEAVING_BYTES)

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
    ) -> Iterator[tuple[Heading, dict[str, Tensor]]]:
        """Columns of a text's chunks, on the host."""
        lane = self._shipping.lane
        try:
            for chunk in self.chunks(request, response_ids):
                columns, heading = leaving(chunk), Heading(chunk.request, chunk.roots)
                with lane.after([lane.mark()]):
                    landed = self._shipping.send(columns, heading)
                del chunk, columns  # the next one needs their room; tensors on their way are kept
                yield from landed + self._shipping.land(num_left=1)
            yield from self._shipping.land()
        finally:
            self._shipping.land()  # of a text that was broken off

    def _to_tables(self, heading: Heading, columns: dict[str, Tensor]) -> Tables:
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
            end = min(roots.stop - 1 + self.rule.max_depth, len(text))
            targets = target.distributions(start, end)
            self._drafter.read(roots, target.features)
            continuation = continuations(text, roots, self.rule.max_depth)
            observed = PathObserver(self._drafter, targets, request.sampling, roots, continuation)
            source = DenseSource(observed)
            plan = self.rule.begin(fresh_start(len(roots), device=text.device))
            pool = grow_tree(self.rule, plan, source, text[roots.start : roots.stop], Stopwatch())
            labels = label_paths(pool.tree, continuation)
            yield Chunk(request, roots, text, pool, labels, observed.js_distance, targets)


@dataclass(frozen=True)
class DenseSource:
    """Children below many roots of one text, for `policy.growing.grow_tree`."""

    drafter: PathObserver

    def children(self, pool: PoolBuffers, frontier: Frontier, top_k: int) -> Children:
        if pool.level_start == 0:
            logits = self.drafter.begin_round(len(frontier.index))[:, None]
        else:
            parent = torch.zeros_like(frontier.index)
            if pool.level_start > 1:
                parent = (frontier.index - pool.level_start) // top_k
            logits = self.drafter.expand(pool.token_ids.gather(1, frontier.index), parent)
        return children_of(logits, top_k, self.drafter.to_target_ids)


def positions_per_chunk(
    rule: ShapeRule,
    drafter: DenseDrafter,
    target_vocab: int,
    text_tokens: int,
    max_bytes: int,
) -> int:
    """P such that the tensors of P trees stay within `max_bytes`, at least 1.

    For each position, with W the widest level, V and V_t the vocabularies, H heads, S tokens of
    text, D levels and K children: draft logits and two passes over them, 3 · 4 W V; scores and
    weights of attention, 2 · 4 W H (S + D W); the target's distributions and two passes, 5 · 4 V_t;
    the pool and its labels, `POOL_BYTES` a slot.
    """
    width = max(1, rule.width)
    logits = 12 * width * drafter.vocab_size
    scores = 8 * width * drafter.num_heads * (text_tokens + rule.max_depth * width)
    position_bytes = logits + scores + 20 * target_vocab + POOL_BYTES * pool_capacity(rule)
    return max(1, max_bytes // position_bytes)


# --------------------------------------------------------------------------- columns


TARGET_COLUMNS = (
    "target_logp",
    "target_rank",
    "target_top1_logit",
    "target_top2_logit",
    "target_ratio",
    "target_margin",
    "target_entropy",
    "js_distance",
)


def leaving(chunk: Chunk) -> dict[str, Tensor]:
    """The tensors of a chunk that its rows need, by name, on its device.

    Returns:
        `text` `[T]`; `num_drafted` and `num_accepted` `[P]`; values of the M nodes, trees one after
        another, no gaps; `TARGET_COLUMNS` of those S nodes whose parent is on the path.
    """
    tree, labels, targets = chunk.pool.tree, chunk.labels, chunk.targets
    place = tree.valid.cumsum(1) - 1
    flat = tree.valid.flatten().nonzero()[:, 0]
    slots = {
        "node_idx": place,
        "parent_idx": gather(place, tree.parent, ROOT),
        "depth": tree.depth,
        "token_id": tree.token_ids,
        "sibling_rank": chunk.pool.sibling_rank,
        "draft_logp": tree.draft_logp,
        "joint_logp": chunk.pool.joint_logp,
        "parent_entropy": chunk.pool.entropy,
        "parent_topk_entropy": chunk.pool.topk_entropy,
        "expanded": chunk.pool.expanded,
        **vars(labels),
    }
    row, node = labels.seen.nonzero(as_tuple=True)
    above, token = tree.depth[row, node] - 1, tree.token_ids[row, node]
    at = chunk.roots.start - targets.first + row + above
    top2, top1 = targets.ordered[:, -2:][at].unbind(1)
    told = (
        targets.logp[at, token],
        _rank(targets, at, token),
        top1,
        top2,
        top2 / top1,
        top1 - top2,
        targets.entropy[at],
        chunk.js_distance[row, above],
    )
    return {
        "text": chunk.text,
        "num_drafted": tree.num_nodes - 1,
        "num_accepted": labels.num_accepted,
        "row": torch.div(flat, tree.num_slots, rounding_mode="floor"),
        **{name: values.flatten()[flat] for name, values in slots.items()},
        **dict(zip(TARGET_COLUMNS, told, strict=True)),
    }


def _rank(targets: TargetDistributions, at: Tensor, token: Tensor) -> Tensor:
    """1 + number of strictly larger logits, found in the sorted row of each distribution.

    Args:
        at: `[M]` int64, row of the distribution. token: `[M]` int64.
    """
    order = at.argsort(stable=True)
    counts = torch.bincount(at, minlength=len(targets.logits))
    behind = torch.arange(len(at), device=at.device) - (counts.cumsum(0) - counts)[at[order]]
    slot = torch.empty_like(at).scatter_(0, order, behind)  # of each node among those of its row
    table = targets.logits.new_zeros(len(counts), int(counts.max()))
    table[at, slot] = targets.logits[at, token]
    not_larger = torch.searchsorted(targets.ordered, table, right=True)[at, slot]
    return targets.ordered.shape[1] - not_larger + 1


def to_tables(
    heading: Heading, tensors: dict[str, Tensor], shape: FullTree, policy_digest: str
) -> Tables:
    """In the columns, order and types of the trace format; columns of live rounds alone are null.

    Args:
        tensors: of `leaving`, on the host.
    """
    request, roots = heading
    size, root = len(roots), np.arange(roots.start, roots.stop)
    round_idx = root - len(request.prompt_ids)
    accepted, text = tensors["num_accepted"], tensors["text"]
    bonus_at = torch.from_numpy(root) + accepted + 1
    known = bonus_at < len(text)
    shared = {
        "request_id": request.request_id,
        "prompt_id": request.prompt_id,
        "category": request.category,
        "kind": "dense",
        "policy_digest": policy_digest,
    }
    numbers = {
        "turn": request.turn,
        "offered_depth": shape.depth,
        "offered_width": shape.width or shape.top_k,
        "top_k": shape.top_k,
        "batch_size": 1,
        **dict.fromkeys(TIME_COLUMNS, 0.0),
    }
    none = nullable(torch.zeros(size), torch.zeros(size, dtype=torch.bool))
    rounds: Columns = {
        **{name: [value] * size for name, value in shared.items()},
        **{name: np.full(size, value) for name, value in numbers.items()},
        **dict.fromkeys(("tcr", "phi", "phi_depth"), none),
        "round_idx": round_idx,
        "position": round_idx + 1,
        "context_tokens": root + 1,
        "root_token_id": text[roots.start : roots.stop].numpy(),
        "bonus_token_id": nullable(text[bonus_at.clamp(max=len(text) - 1)], known),
        "num_drafted": tensors["num_drafted"].numpy(),
        "num_verified": (accepted + 1).numpy(),
        "num_accepted": accepted.numpy(),
        "num_emitted": np.minimum(accepted.numpy() + 1, len(text) - 1 - root),
        "fully_accepted": (accepted == shape.depth).numpy(),
    }
    row, on_path, seen = tensors["row"], tensors["on_path"], tensors["seen"]
    plain = (
        *("node_idx", "parent_idx", "depth", "token_id", "sibling_rank", "draft_logp"),
        *("joint_logp", "parent_entropy", "parent_topk_entropy", "expanded"),
    )
    nodes: Columns = {
        "request_id": repeat([request.request_id] * size, row),
        "round_idx": round_idx[0] + row.numpy(),
        **{name: tensors[name].numpy() for name in plain},
        "verified": on_path.numpy(),
        # Among the verified, which are one path, a rank says nothing.
        "confidence_rank": nullable(row, torch.zeros_like(on_path)),
        "node_match": nullable(on_path, tensors["told"]),
        "path_accepted": nullable(on_path, ~tensors["unknown"]),
        **{name: _spread(tensors[name], seen) for name in TARGET_COLUMNS},
    }
    return {"rounds": table_of("rounds", rounds), "nodes": table_of("nodes", nodes)}


def _spread(values: Tensor, seen: Tensor) -> Masked:
    """A column with `values` where `seen`, in order, and null elsewhere."""
    column = values.new_zeros(len(seen))
    column[seen] = values
    return nullable(column, seen)
