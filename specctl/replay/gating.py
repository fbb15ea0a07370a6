"""What `fit echo` reads from dense traces: the confidence of every level, and replayed gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specctl.features import DraftPool
from specctl.logs.logged_draft import BATCH_POSITIONS, batches, logged_draft
from specctl.logs.tree_log import DenseLog, LogChunk, Support, map_ordered
from specctl.policy import Policy, build_shape
from specctl.policy.records import SparseGates
from specctl.policy.rules import ShapeRule
from specctl.replay.rounds import Rounds, replay
from specctl.replay.score import Clock

if TYPE_CHECKING:  # slow to import
    import polars as pl


@dataclass(frozen=True)
class GateRows:
    """Positions as if no gate ever closed.

    Attributes:
        rows: columns `prompt_id`, `accepted` (draft tokens) and `level_1` to `level_D`, the
            log-probability of the likeliest path to each level, nats.
        num_left_out: positions that cannot be labelled: the log lacks nodes of the tree, or the
            text ends inside the accepted path.
    """

    rows: pl.DataFrame
    num_left_out: int


def gate_rows(
    log: DenseLog,
    shape: SparseGates,
    *,
    num_threads: int = 1,
    on_positions: Callable[[int], None] | None = None,
) -> GateRows:
    """The tree of a shape without its gates, drafted at every position of a log."""
    import polars as pl

    rule = build_shape(without_gates(shape))

    def label(chunk: LogChunk) -> tuple[pl.DataFrame, int]:
        return _labelled(rule, chunk, log.support), chunk.positions.num_rows

    frames, num_positions = [], 0
    for frame, height in map_ordered(label, log.chunks(with_entropy=False), num_threads):
        frames.append(frame)
        num_positions += height
        if on_positions is not None:
            on_positions(height)
    rows = pl.concat(frames)
    return GateRows(rows, num_positions - rows.height)


def without_gates(shape: SparseGates) -> SparseGates:
    """The same shape with gates that never close."""
    never = tuple(0.0 for _ in shape.thresholds)
    return shape.model_copy(update={"thresholds": never})


@torch.inference_mode()
def _labelled(rule: ShapeRule, chunk: LogChunk, support: Support) -> pl.DataFrame:
    import polars as pl

    positions = chunk.positions
    parts = []
    for rows in batches(positions.num_rows, BATCH_POSITIONS):
        draft = logged_draft(rule, chunk, rows)
        accepted = draft.num_accepted
        found = accepted, draft.expansions.missing, level_confidence(draft.pool, rule.max_depth)
        parts.append([tensor.numpy() for tensor in found])
    accepted, missing, level_logp = (np.concatenate(column) for column in zip(*parts, strict=True))
    names = np.array(positions.prompt_ids)[positions.prompt][positions.request]
    is_cut = (accepted >= positions.remaining) & (accepted < rule.max_depth)
    levels = {f"level_{d}": level_logp[:, d - 1] for d in range(1, rule.max_depth + 1)}
    frame = pl.DataFrame({"prompt_id": names, "accepted": accepted.astype(np.int32), **levels})
    return frame.filter((missing == 0) & ~is_cut)


def level_confidence(pool: DraftPool, depth: int) -> Tensor:
    """`[B, D]` float32, nats: the likeliest node of every level (ECHO, Eq. 6)."""
    best = torch.full((len(pool.joint_logp), depth + 1), -torch.inf)
    return best.scatter_reduce(1, pool.tree.depth, pool.joint_logp, "amax")[:, 1:]


@dataclass(frozen=True)
class Replayed:
    """What a policy's rounds add up to.

    Attributes:
        utilisation: u, accepted draft tokens over drafted levels, defined per round and averaged.
        time_us: of a cost model; None without one.
    """

    calls: int
    tokens: int
    accepted: int
    verified: int
    levels: int
    utilisation: float
    time_us: float | None


@dataclass(frozen=True)
class Replayer:
    """Replays policies over some prompts of a log, one request at a time."""

    log: DenseLog
    clock: Clock | None = None
    num_threads: int = 1

    def __call__(self, policies: Sequence[Policy], prompts: Sequence[str]) -> list[Replayed]:
        runs = replay(
            self.log.only(prompts), policies, with_bounds=False, num_threads=self.num_threads
        )
        return [self._added_up(run) for run in runs]

    def _added_up(self, run: Rounds) -> Replayed:
        outcomes = run.outcomes
        return Replayed(
            calls=len(run.request),
            tokens=int(run.emitted.sum()),
            accepted=int(outcomes.accepted.sum()),
            verified=int(outcomes.verified.sum()),
            levels=int(outcomes.levels.sum()),
            utilisation=float(np.mean(outcomes.accepted / np.maximum(outcomes.levels, 1))),
            time_us=None if self.clock is None else float(self.clock(run).sum()),
        )
