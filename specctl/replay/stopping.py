"""What a fit of AdaSD asks of a dense log: the tokens that were tested, and what stops cost.

`train.adasd` states the two forms that it takes; the command line hands them over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specctl.logs.positions import Floats
from specctl.logs.tree_log import DenseLog, LogChunk
from specctl.policy import Policy, build_shape
from specctl.policy.records import EntropyStop
from specctl.policy.running import first_rejected
from specctl.replay.online import Step, steps
from specctl.replay.rounds import Rounds, replay
from specctl.replay.score import Clock
from specctl.stats import sums_by

DISTANCE = "js_distance"
NEVER = 1 << 40
"""More samples than any request has."""


@dataclass(frozen=True)
class TestedTokens:
    """M tokens that strict verification accepted, or rejected first, along chains.

    Attributes:
        prompt_id: `[M]` text. accepted: `[M]` bool. entropy: `[M]` nats, of the distribution that
            the token was drawn from. distance: `[M]` Jensen-Shannon, square root of bits.
    """

    prompt_id: Any
    accepted: Any
    entropy: Floats
    distance: Floats


def tokens_tested(log: DenseLog, window: int) -> TestedTokens:
    """Of all requests, decoded in chains of `window` tokens that never stop early.

    Args:
        log: with the column `js_distance`, if it holds chains alone.
    """
    rule = build_shape(EntropyStop(window=window, min_samples=NEVER))
    parts = [
        _tested(step, chunk)
        for chunk in log.chunks(extra=(DISTANCE,))
        for step in steps(rule, chunk)
    ]
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    return TestedTokens(*columns)


def _tested(step: Step, chunk: LogChunk) -> tuple[Any, Any, Floats, Floats]:
    path, positions = step.outcome.path, chunk.positions
    rejected = first_rejected(step.outcome.tree, path)
    node = torch.cat([_logged(step, path[:, 1:]), _logged(step, rejected[:, None])], 1)
    # Beyond the end of the text nothing tells what would have come: no acceptance, no rejection.
    remaining = torch.from_numpy(positions.remaining)[step.rows][:, None]
    depth = torch.arange(1, node.shape[1] + 1).expand_as(node).clone()
    depth[:, -1] = step.on_path.sum(1)
    node = node.masked_fill(depth > remaining, -1)
    row, place = (index.numpy() for index in (node >= 0).nonzero(as_tuple=True))
    found = node[node >= 0]
    names = np.array(positions.prompt_ids, object)[positions.prompt][positions.request]
    return (
        names[step.rows[row]],
        place < node.shape[1] - 1,
        chunk.entropy[found].double().numpy(),
        np.asarray(chunk.extra[DISTANCE], np.float64)[found.numpy()],
    )


def _logged(step: Step, index: Tensor) -> Tensor:
    """Log index of nodes of the submitted trees, -1 for none."""
    pool = step.draft.submitted.gather(1, index.clamp(min=0))
    node = step.draft.node.gather(1, pool.clamp(min=0))
    return node.masked_fill((index < 0) | (pool < 0), -1)


@dataclass(frozen=True)
class PromptCosts:
    """What a policy spends on P prompts, `[P]` float64 each.

    Attributes:
        time: in the unit of the clock. support: share of its rounds that the log tells whole.
    """

    prompt_ids: tuple[str, ...]
    calls: Floats
    tokens: Floats
    levels: Floats
    verified: Floats
    time: Floats
    support: float


def prompt_costs(log: DenseLog, policies: Sequence[Policy], clock: Clock) -> list[PromptCosts]:
    """Replays policies over a whole log, in one pass.

    Args:
        clock: what a round takes.
    """
    return [_costs(run, clock) for run in replay(log, policies, with_bounds=False)]


def target_steps(draft_cost: float) -> Clock:
    """Rounds in units of target forwards, each drafted level costing `draft_cost` of one."""
    return lambda run: 1.0 + draft_cost * run.outcomes.levels


def _costs(run: Rounds, clock: Clock) -> PromptCosts:
    o = run.outcomes
    columns = (np.ones(len(run.request)), run.emitted, o.levels, o.verified, clock(run))
    values = np.stack([np.asarray(column, np.float64) for column in columns], 1)
    by_prompt = sums_by(run.prompt[run.request], len(run.prompt_ids), values)
    return PromptCosts(run.prompt_ids, *by_prompt.T, support=1 - float(o.open.mean()))
