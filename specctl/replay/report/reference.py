"""The rounds that the figures of HeteroSpec are drawn from: TCR, Φ and what was accepted.

Live traces bring the rounds that their policy ran. Dense traces hold a tree at every position and
no rounds, so a reference tree is replayed over them: the default EAGLE-2 tree, or as much of it
as the log contains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from specctl.features import phi
from specctl.logs.logged_draft import BATCH_POSITIONS, LoggedDraft, batches, logged_draft
from specctl.logs.positions import Bools, Floats, Ints
from specctl.logs.tree_log import DenseLog, LogChunk, Support
from specctl.policy.build import build_shape
from specctl.policy.records import StaticTree
from specctl.replay.report.rows import RoundRows
from specctl.replay.walk import walk


@dataclass(frozen=True)
class ReferenceRounds:
    """M rounds with a draft.

    Attributes:
        prompt, category: `[M]` int32, codes of `RoundRows`.
        accepted: `[M]` int32 draft tokens. submitted: `[M]` int32 nodes, root included.
        tcr: `[M]` int32, rank among the submitted; 0 where nothing was accepted.
        phi: `[M]` float64, nats, NaN where there is none. phi_depth: `[M]` int32, levels.
        is_cut: `[M]` bool, the text ended on the accepted path above the deepest level: more might
            have been accepted.
        is_unsupported: `[M]` bool, the log lacks an expansion that the tree asked for.
    """

    prompt: Ints
    category: Ints
    accepted: Ints
    submitted: Ints
    tcr: Ints
    phi: Floats
    phi_depth: Ints
    is_cut: Bools
    is_unsupported: Bools

    def pick(self, rows: Bools) -> ReferenceRounds:
        """Some of the rounds."""
        return ReferenceRounds(*(getattr(self, field.name)[rows] for field in fields(self)))


def reference_tree(support: Support) -> StaticTree:
    """The default EAGLE-2 tree, no deeper and no wider than the log."""
    default = StaticTree()
    top_k, depth = min(default.top_k, support.top_k), min(default.depth, support.depth)
    most = 1 + top_k + (depth - 1) * top_k**2
    return StaticTree(depth=depth, top_k=top_k, num_tokens=min(default.num_tokens, most))


def live_reference(rounds: RoundRows) -> ReferenceRounds:
    """The live rounds that drafted anything."""
    zeros = np.zeros(len(rounds.prompt), np.bool_)
    found = ReferenceRounds(
        rounds.prompt,
        rounds.category,
        rounds.accepted,
        rounds.num_verified,
        rounds.tcr,
        rounds.phi,
        rounds.phi_depth,
        rounds.is_cut & (rounds.accepted < rounds.offered_depth),
        zeros,
    )
    return found.pick(rounds.offered_depth > 0)


def comparable(rounds: ReferenceRounds) -> tuple[int, Bools]:
    """The most frequent depth of Φ, and the rounds that have it: others do not compare
    (`specctl.features.phi`). 0 where no round has Φ."""
    has_phi = np.isfinite(rounds.phi)
    counted = Counter(rounds.phi_depth[has_phi].tolist())
    depth = counted.most_common(1)[0][0] if counted else 0
    return depth, has_phi & (rounds.phi_depth == depth)


def replayed_reference(
    log: DenseLog,
    tree: StaticTree,
    rounds: RoundRows,
    on_positions: Callable[[int], None] = lambda _: None,
) -> ReferenceRounds:
    """The rounds that `tree` would run over a dense log.

    Args:
        rounds: of the same traces, for the codes of prompts and categories.
        on_positions: called with the positions of each finished chunk.
    """
    parts = []
    for chunk in log.chunks():
        parts.append(_of_chunk(chunk, tree, log.support, rounds))
        on_positions(chunk.positions.num_rows)
    names = [field.name for field in fields(ReferenceRounds)]
    return ReferenceRounds(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))


@torch.inference_mode()
def _of_chunk(
    chunk: LogChunk, tree: StaticTree, support: Support, rounds: RoundRows
) -> ReferenceRounds:
    positions = chunk.positions
    rule = build_shape(tree)
    parts = [
        _at(logged_draft(rule, chunk, rows))
        for rows in batches(positions.num_rows, BATCH_POSITIONS)
    ]
    on_path, *columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    accepted = np.minimum(on_path, positions.remaining)
    visited = walk(positions, accepted + 1)
    accepted, request = accepted[visited], positions.request[visited]
    submitted, tcr, phis, missing = (column[visited] for column in columns)
    prompt = _recoded(positions.prompt_ids, rounds.prompt_ids)[positions.prompt]
    category = _recoded(positions.categories, rounds.categories)[positions.category]
    return ReferenceRounds(
        prompt[request],
        category[request],
        accepted,
        submitted,
        tcr,
        phis.astype(np.float64),
        np.full(len(accepted), tree.depth, np.int32),
        (positions.remaining[visited] == accepted) & (accepted < tree.depth),
        missing > 0,
    )


def _at(draft: LoggedDraft) -> tuple[Any, ...]:
    """Accepted tokens, submitted nodes, TCR, Φ and missing expansions at some positions."""
    counts = draft.num_accepted, (draft.submitted >= 0).sum(1), draft.terminal_rank
    whole = [count.to(torch.int32).numpy() for count in (*counts, draft.expansions.missing)]
    return *whole[:3], phi(draft.pool).numpy(), whole[3]


def _recoded(names: tuple[str, ...], known: tuple[str, ...]) -> Ints:
    """Codes in `known` of each of `names`."""
    place = {name: code for code, name in enumerate(known)}
    return np.array([place[name] for name in names], np.int32)
