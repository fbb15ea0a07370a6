"""Where a relaxed acceptance could first have left the logged texts, from a dense log.

The strict rounds of a policy are walked as in replay. A round ends strictly where no child holds
the target's token; there, a child that is the target's second choice could have been accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specctl.artifacts.manifest import PairFingerprint
from specctl.errors import TraceMismatchError, UsageError
from specctl.logs.logged_draft import BATCH_POSITIONS, batches, logged_draft
from specctl.logs.positions import Longs
from specctl.logs.trace_columns import Traces
from specctl.logs.tree_log import DenseLog, LogChunk, Support
from specctl.policy import Policy, build_shape
from specctl.policy.acceptances import Mars, Strict
from specctl.policy.mars import TopTwo, closeness
from specctl.replay.outcomes import check_replayable, needs_entropy
from specctl.replay.walk import walk
from specctl.tree import gather, take

COLUMNS = ("target_rank", "target_top1_logit", "target_top2_logit", "token_id")
NOTHING = float("-inf")


@dataclass(frozen=True)
class Openings:
    """M strict rounds of Q texts, in order; see `train.hazard.Openings`."""

    num_tokens: Longs
    text: Longs
    place: Longs
    closeness: Any


@dataclass(frozen=True)
class OpenedLog:
    """A dense log and the limits that its texts were cut at."""

    log: DenseLog
    limits: tuple[int, ...]


def open_dense(traces: Traces, pair: PairFingerprint) -> OpenedLog:
    """Opens dense traces of a pair.

    Raises:
        TraceError: live traces, or of another pair.
    """
    found, log = traces.fingerprint, DenseLog.open(traces)
    names = ("target_digest", "drafter_digest", "tokenizer_digest")
    if any(getattr(found, name) != getattr(pair, name) for name in names):
        raise TraceMismatchError(
            "--traces",
            expected=f"traces of {pair.target} with {pair.drafter}",
            found=f"{found.target} with {found.drafter}",
            fix="give traces of the pair that is judged",
        )
    limits = tuple({int(header.collect["max_new_tokens"]) for header in traces.headers})
    return OpenedLog(log, limits)


def logged_openings(opened: OpenedLog, policy: Policy, acceptance: Mars) -> Openings:
    """How close each strict round came to a relaxation.

    Texts shorter than the log's limit ended by themselves, with a token that is never relaxed.

    Args:
        policy: shape under which the texts are decoded, strictly.
        acceptance: its form says what closeness is, its list what is denied; its threshold is not
            used.

    Raises:
        UsageError: a policy that a log cannot tell, or one that remembers earlier rounds.
        TraceError: traces without token ids, which what is denied is told by.
    """
    policy = policy.model_copy(update={"acceptance": Strict()})
    check_replayable(policy)
    rule = build_shape(policy.shape)
    if rule.memory_size:
        raise UsageError(
            f"--traces with {policy.name}",
            expected="a shape that decides by the position alone",
            found="one that learns from earlier rounds",
            fix="leave --traces out",
        )
    log, forbidden = opened.log, torch.tensor(acceptance.deny_token_ids, dtype=torch.int64)
    log.check_tokens("tokens that are never relaxed", "keep")
    chunks = log.chunks(with_entropy=needs_entropy(policy), extra=COLUMNS)
    parts: list[Openings] = []
    for chunk in chunks:
        before = sum(len(part.num_tokens) for part in parts)
        found = _chunk_ends(rule, chunk, log.support, acceptance, forbidden)
        parts.append(_visited(chunk, *found, opened.limits, before))
    return Openings(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("num_tokens", "text", "place", "closeness")
        )
    )


@torch.inference_mode()
def _chunk_ends(
    rule: Any, chunk: LogChunk, support: Support, acceptance: Mars, forbidden: Tensor
) -> tuple[Any, Any]:
    """Draft tokens accepted and the closeness of the end, at every position."""
    accepted, close = [], []
    for rows in batches(chunk.positions.num_rows, BATCH_POSITIONS):
        draft = logged_draft(rule, chunk, rows)
        on_path = draft.on_path
        tree = take(draft.pool.tree, draft.submitted)
        last = tree.depth.masked_fill(~on_path, -1).argmax(1)
        node = gather(draft.node, draft.submitted, -1)
        behind = (tree.parent == last[:, None]) & (node >= 0)
        close.append(_closeness(chunk, node.clamp(min=0), behind, acceptance, forbidden))
        accepted.append((on_path.sum(1) - 1).numpy())
    return np.concatenate(accepted), np.concatenate(close)


def _closeness(
    chunk: LogChunk, node: Tensor, behind: Tensor, acceptance: Mars, forbidden: Tensor
) -> Any:
    """`[B]` of the second choice among the children `[B, N]` of the last accepted node."""
    rank, first, second, token = (
        torch.from_numpy(np.asarray(chunk.extra[name], np.float64))[node] for name in COLUMNS
    )
    best = TopTwo(node, node, first.float(), second.float())
    allowed = behind & (rank == 2) & ~torch.isin(token.long(), forbidden)
    values = closeness(acceptance, best).masked_fill(~allowed, NOTHING).amax(1)
    return values.masked_fill((behind & (rank == 1)).any(1), NOTHING).numpy()


def _visited(
    chunk: LogChunk, accepted: Any, close: Any, limits: tuple[int, ...], num_before: int
) -> Openings:
    positions = chunk.positions
    start, request = positions.start[:-1], positions.request
    num_tokens = positions.remaining[start].astype(np.int64) + 1
    place = num_tokens[request] - positions.remaining + accepted
    # A round's end is about the token at `place`; the last one of a text that ended by itself is
    # denied, and behind a text there is nothing.
    last = num_tokens - ~np.isin(num_tokens, limits)
    values = np.where(place < last[request], close, np.float32(NOTHING)).astype(np.float32)
    seen = walk(positions, np.minimum(accepted, positions.remaining) + 1)
    return Openings(
        num_tokens, request[seen] + num_before, place[seen].astype(np.int64), values[seen]
    )
