"""The rounds of a batch: what is verified, and what that emits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from specctl.logs.positions import Ints, Longs, Positions
from specctl.policy.build import build_budget
from specctl.policy.records import Budget, PerRequest
from specctl.replay.batch.submissions import Submissions, kept_nodes

Verify = Callable[[Longs], tuple[Longs, Longs]]
"""From positions `[A]` to nodes verified, root included, and draft tokens accepted, `[A]` each."""


@dataclass(frozen=True)
class BatchRounds:
    """L rounds of requests in S steps, step after step.

    Attributes:
        serial: `[L]` int64, number of the request in the queue. row: `[L]` int64, its position
            in the log.
        verified: `[L]` int64, nodes, root included. accepted: `[L]` int64, draft tokens accepted
            and emitted.
        first: `[S]` int64, where each step's rounds begin.
    """

    serial: Longs
    row: Longs
    verified: Longs
    accepted: Longs
    first: Longs

    @cached_property
    def batch_sizes(self) -> Longs:
        """`[S]` requests in each step."""
        return np.append(self.first[1:], len(self.row)) - self.first

    @property
    def step(self) -> Longs:
        """`[L]` step of each round."""
        return np.repeat(np.arange(len(self.first)), self.batch_sizes)

    def per_step(self, values: Ints | Longs) -> Longs:
        """`[S]` sums of values of rounds, `[L]`."""
        total: Longs = np.add.reduceat(values, self.first, dtype=np.int64)
        return total


def join_rounds(parts: Sequence[BatchRounds]) -> BatchRounds:
    """The rounds of all parts, one step each."""
    sizes = [len(part.row) for part in parts]
    return BatchRounds(
        serial=np.concatenate([part.serial for part in parts]),
        row=np.concatenate([part.row for part in parts]),
        verified=np.concatenate([part.verified for part in parts]),
        accepted=np.concatenate([part.accepted for part in parts]),
        first=np.cumsum([0, *sizes[:-1]]),
    )


def verification(submissions: Submissions, budget: Budget, batch_size: int) -> Verify:
    """What a budget verifies of the requests that stand at given positions.

    Raises:
        UsageError: see `build_budget`; or the trees that the budget looks at were not kept.
    """
    rule = build_budget(budget, batch_size=batch_size, max_tokens=submissions.max_tokens)
    if isinstance(budget, PerRequest) or not submissions.drafts:
        verified, accepted = (
            values.astype(np.int64) for values in (submissions.verified, submissions.accepted)
        )
        return lambda rows: (verified[rows], accepted[rows])
    nodes, remaining = kept_nodes(submissions), torch.tensor(submissions.positions.remaining)

    @torch.inference_mode()
    def verify(rows: Longs) -> tuple[Longs, Longs]:
        where = torch.from_numpy(rows)
        batch = nodes.batch(where)
        kept = rule.share(batch.plan, batch.pool, batch.submitted)
        accepted = (batch.on_path.gather(1, kept.clamp(min=0)) & (kept >= 0)).sum(1) - 1
        return (kept >= 0).sum(1).numpy(), torch.minimum(accepted, remaining[where]).numpy()

    return verify


def emitted_tokens(positions: Positions, row: Longs, accepted: Longs) -> Longs:
    """`[L]` tokens that rounds emit: the accepted and one more, cut where the text ends."""
    return np.minimum(accepted + 1, positions.remaining[row])
