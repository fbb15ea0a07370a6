"""Rounds made by hand and at random, for the tests of collection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specctl.collect.rounds import headings, statistics
from specctl.collect.rows import RoundRows
from specctl.collect.trace_writer import make_header
from specctl.collect.transfer import Transfer, lane_for
from specctl.kernels.verify_tree import walk_tree
from specctl.logs.trace_files import TraceHeader
from specctl.policy import Policy, StaticTree
from specctl.runtime.requests import Request, RoundRecord, RoundTimes, Sampling
from specctl.tree import DraftPool, TokenTree, gather, take
from tests.trees import joint_logp

TIMES = RoundTimes(draft_us=10, verify_us=20, policy_us=3, other_us=4)
DIGEST = "sha256:" + "ab" * 32


def header(**changes: object) -> TraceHeader:
    """The header that the tests collect under."""
    policy = Policy(shape=StaticTree(depth=3, top_k=2, num_tokens=6))
    made = make_header(
        policy,
        Sampling(),
        target_digest=DIGEST,
        drafter_digest=DIGEST,
        tokenizer_digest=DIGEST,
        collect={"max_new_tokens": 32},
    )
    return made.model_copy(update=changes)


def make_record(
    tree: TokenTree,
    *,
    submitted: Tensor,
    target_logits: Tensor,
    sibling_rank: Tensor,
    expanded: Tensor,
    topk_entropy: Tensor,
    requests: list[Request] | None = None,
    round_idx: int = 0,
    **given: Any,
) -> RoundRecord:
    """A record over drafted trees; what the tests do not vary is filled in."""
    rows = tree.parent.shape[0]
    entropies = topk_entropy + 0.5, topk_entropy
    filled = {"offered_width": 2, "top_k": 2, "times": TIMES, "policy_digest": DIGEST}
    return RoundRecord(
        requests=requests or [request(f"p{row}") for row in range(rows)],
        round_idx=torch.full((rows,), round_idx),
        position=torch.full((rows,), 1),
        context_tokens=torch.full((rows,), 9),
        pool=DraftPool(*tree, joint_logp(tree), *entropies, sibling_rank, expanded),
        submitted=submitted,
        tree=take(tree, submitted),
        target_logits=target_logits,
        processed=target_logits,
        **(filled | given),
    )


def frame_of(*records: RoundRecord) -> RoundRows:
    """Rounds that are alike on the host, brought there as the recorder does it."""
    transfer: Transfer[Any] = Transfer(lane_for(records[0].target_logits.device))
    with transfer.lane.after([transfer.lane.mark()]):
        transfer.send(statistics(records), headings(records))
    [landed] = transfer.land()
    return RoundRows(*landed)


def request(prompt_id: str, turn: int = 0) -> Request:
    return Request(f"{prompt_id}/{turn}", (1, 2), 32, prompt_id, "code", turn)


def random_record(
    prompt_ids: list[str],
    round_idx: int = 0,
    *,
    seed: int = 0,
    depth: int = 3,
    top_k: int = 3,
    num_tokens: int = 8,
    vocabulary: int = 40,
) -> RoundRecord:
    """An EAGLE-2-like round: `top_k` children of the `top_k` best nodes of each level."""
    draw = torch.Generator().manual_seed(seed)
    rows = len(prompt_ids)
    tree, sibling, expanded = _grow(rows, depth, top_k, vocabulary, draw)
    order = joint_logp(tree).sort(dim=1, descending=True, stable=True).indices
    submitted = order[:, :num_tokens].sort(1).values
    logits = torch.randn(rows, submitted.shape[1], vocabulary, generator=draw)
    target_ids = logits.argmax(-1)
    there = take(tree, submitted)
    path = walk_tree(there.parent, there.token_ids, target_ids, depth, None).path
    return make_record(
        tree,
        submitted=submitted,
        target_ids=target_ids,
        target_logits=logits,
        path=path,
        num_emitted=(path >= 0).sum(1),
        offered_depth=torch.full((rows,), depth),
        sibling_rank=sibling,
        expanded=expanded,
        topk_entropy=torch.rand(tree.parent.shape, generator=draw),
        requests=[request(prompt) for prompt in prompt_ids],
        round_idx=round_idx,
        top_k=top_k,
    )


def _grow(
    rows: int, depth: int, top_k: int, vocabulary: int, draw: torch.Generator
) -> tuple[TokenTree, Tensor, Tensor]:
    levels = [0]
    frontier = torch.zeros(rows, 1, dtype=torch.int64)
    parent, logp = torch.full((rows, 1), -1), torch.zeros(rows, 1)
    score, expanded = torch.zeros(rows, 1), []
    for level in range(1, depth + 1):
        grown = torch.rand(rows, frontier.shape[1], top_k, generator=draw).add(0.1).log()
        grown = grown.clamp(max=0).sort(-1, descending=True).values.flatten(1)
        above = frontier.repeat_interleave(top_k, 1)
        expanded.append(frontier)
        start = parent.shape[1]
        parent, logp = torch.cat([parent, above], 1), torch.cat([logp, grown], 1)
        score = torch.cat([score, score.gather(1, above) + grown], 1)
        frontier = score[:, start:].topk(min(top_k, score.shape[1] - start), 1).indices + start
        levels += [level] * above.shape[1]
    size = parent.shape[1]
    sibling = torch.cat([torch.zeros(1), torch.arange(size - 1) % top_k]).long().expand(rows, size)
    offset = torch.randint(vocabulary, (rows, size), generator=draw)
    first = gather(offset, parent, 0)  # siblings share it, so their tokens differ
    tokens = (first + sibling) % vocabulary
    marked = torch.zeros(rows, size, dtype=torch.bool).scatter_(1, torch.cat(expanded, 1), True)
    return TokenTree(tokens, parent, torch.tensor(levels).expand(rows, size), logp), sibling, marked


def padded_tree(tokens: list[int], parent: list[int], logp: list[float]) -> TokenTree:
    """One row from lists; depths follow from the parents."""
    depth: list[int] = []
    for up in parent:
        depth.append(depth[up] + 1 if up >= 0 else 0)
    return TokenTree(
        torch.tensor([tokens]), torch.tensor([parent]), torch.tensor([depth]), torch.tensor([logp])
    )


def move(value: Any, device: torch.device) -> Any:
    """A record with its tensors on another device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if hasattr(value, "__dataclass_fields__") and any(
        isinstance(inner, torch.Tensor) or hasattr(inner, "tree") for inner in vars(value).values()
    ):
        return replace(value, **{name: move(inner, device) for name, inner in vars(value).items()})
    return value
