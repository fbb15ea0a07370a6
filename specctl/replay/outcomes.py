"""A policy's outcome at every position of a log: the runtime's rules, positions as the batch.

A shape that learns from a request's earlier rounds is walked instead: the requests of a chunk step
together, one round a step, each with its own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from specctl.errors import UsageError
from specctl.lazy import inference, torch
from specctl.logs.logged_draft import LoggedDraft, logged_draft
from specctl.logs.positions import Bools, Ints, Longs, join_rows
from specctl.logs.tree_log import ENTROPIES, TEXT_COLUMNS, DenseLog, LogChunk, map_chunks
from specctl.policy import PerRequest, Policy, Ratio, Strict, build_shape
from specctl.policy.families import shape_family
from specctl.policy.rules import RoundStart, ShapeRule
from specctl.policy.verification import Outcome
from specctl.tree import take

T = TypeVar("T")


@dataclass(frozen=True)
class Outcomes:
    """One policy at R positions; int32 arrays `[R]`, 24 bytes a position."""

    accepted: Ints  # draft tokens accepted and emitted
    verified: Ints  # nodes submitted, root included
    levels: Ints  # drafted
    # wanted, missing: expansions that the policy wanted, and those that the log lacks
    wanted: Ints
    missing: Ints
    censored: Ints  # 1 where the accepted path reaches what the log lacks

    @classmethod
    def of(cls, accepted: Ints, **known: ArrayLike) -> Outcomes:
        """Columns `[R]`, or one number for all rows; missing ones are 0."""
        columns: dict[str, Any] = {field.name: 0 for field in fields(cls)} | known
        columns["accepted"] = accepted
        return cls(
            **{
                name: np.broadcast_to(np.asarray(values, np.int32), accepted.shape)
                for name, values in columns.items()
            }
        )

    @property
    def expanded(self) -> Ints:
        """`[R]` nodes that the drafter evaluated, roots excluded."""
        return np.maximum(self.wanted - 1, 0)

    @property
    def support(self) -> float:
        """The share of the wanted expansions or of the rounds, the lesser, that the log holds."""
        return min(self.expansion_support, 1 - float(self.censored.mean()))

    @property
    def expansion_support(self) -> float:
        """The share of the wanted expansions that the log holds."""
        return 1 - float(self.missing.sum()) / max(1.0, float(self.wanted.sum()))

    def at(self, rows: Bools | Longs) -> Outcomes:
        """Some rows, by index or mask."""
        index = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return Outcomes(*(getattr(self, field.name)[index] for field in fields(self)))

    def spread(self, visited: Bools) -> Outcomes:
        """These rows at the visited ones of R positions, 0 elsewhere."""
        columns = np.zeros((len(fields(self)), len(visited)), np.int32)
        columns[:, visited] = [getattr(self, field.name) for field in fields(self)]
        return Outcomes(*columns)


# ----------------------------------------------------------------- replayable policies


def check_replayable(policy: Policy) -> None:
    """Refuses policies whose outcome a log of the target's own text does not determine."""
    if isinstance(policy.acceptance, Ratio):
        raise UsageError(
            f"{policy.name} cannot be replayed: its text depends on drafts that are drawn, and the "
            "log holds no distributions to draw them from",
            hint="compare it live, on the same prompts: specctl run --compare",
        )
    if not isinstance(policy.acceptance, Strict):
        raise UsageError(
            f"{policy.name} cannot be replayed: it is not lossless (acceptance "
            f"{policy.acceptance.kind}), so its text is not the logged one",
            hint="compare it live, on the same prompts: specctl run --compare",
        )
    if not isinstance(policy.budget, PerRequest):
        raise UsageError(
            f"{policy.name} cannot be replayed position by position: a batch shares its budget, "
            f"+{policy.budget.kind}",
            hint=(
                "add --in-order for one request at a time, or --batch-size above 1 and "
                "--cost-model for several"
            ),
        )


def text_columns(policies: Iterable[Policy]) -> tuple[str, ...]:
    """Columns of the nodes table for policies that compare tokens with the text."""
    reads = any(build_shape(policy.shape).needs_text for policy in policies)
    return TEXT_COLUMNS if reads else ()


def is_online(policy: Policy) -> bool:
    """Whether a policy's shape learns from a request's earlier rounds."""
    return build_shape(policy.shape).memory_size > 0


def map_policies(
    log: DenseLog,
    policies: Sequence[Policy],
    work: Callable[[Policy, LogChunk], T],
    *,
    with_entropy: bool = False,
) -> Iterator[list[T]]:
    """The results of `work` for every policy, chunk by chunk, in one pass over the files.

    Args:
        with_entropy: also where no policy reads entropies.
    """
    reads_entropy = any(shape_family(policy.shape).reads_entropy for policy in policies)
    extra = text_columns(policies) + (ENTROPIES if with_entropy or reads_entropy else ())
    return map_chunks(log, lambda chunk: [work(policy, chunk) for policy in policies], extra)


# ----------------------------------------------------------------- positions by themselves


@inference
def outcomes_at(draft: LoggedDraft) -> Outcomes:
    """The outcomes of a draft."""
    tree, lacking = draft.pool, draft.expansions
    columns = (
        torch.minimum(draft.num_accepted, draft.remaining),
        (draft.submitted >= 0).sum(1),
        tree.depth.masked_fill(~tree.valid, 0).amax(1),
        lacking.wanted,
        lacking.missing,
        lacking.is_open,
    )
    return Outcomes(*(column.to(torch.int32).numpy() for column in columns))


@inference
def accepted_bounds(draft: LoggedDraft, *, by_rank: bool) -> Ints:
    """Least and most that a round can accept, `[2, B]`, over all contents of missing expansions.

    Without missing expansions both are the accepted length. A path that leaves the log may go on to
    the plan's depth. Unknown nodes are at most as likely as their parents. A shape that ranks by
    joint probability therefore keeps every known node that is at least as likely as the best
    parent with missing children; unknown nodes can push out the others. Other shapes have no such
    bound.

    Args:
        by_rank: `ShapeFamily.is_ranked` of the shape.
    """
    lacking, accepted = draft.expansions, draft.num_accepted
    joint = draft.pool.joint_logp.gather(1, draft.submitted.clamp(min=0))
    safe = (draft.on_path & (joint >= lacking.best_missing[:, None])).sum(1) - 1
    least = safe.clamp(min=0) if by_rank else torch.zeros_like(accepted)
    closed = accepted if by_rank else torch.maximum(draft.matched.long(), accepted)
    most = torch.where(lacking.is_open, draft.plan.max_depth, closed)
    most = torch.maximum(torch.minimum(most, draft.plan.max_depth), accepted)
    spans = torch.stack([least, most]).where(lacking.missing > 0, accepted)
    bounds: Ints = torch.minimum(spans, draft.remaining).to(torch.int32).numpy()
    return bounds


# ----------------------------------------------------------------- shapes that learn


@inference
def walk_online(rule: ShapeRule, chunk: LogChunk) -> tuple[Bools, Outcomes]:
    """Runs a shape over every request of a chunk, side by side, with the expansions that the log
    has.

    Returns:
        `[R]` bool, a round starts there; and the outcomes of these rows, in order.
    """
    positions, rows, found = chunk.positions, [], []
    here, end = positions.start[:-1].copy(), positions.start[1:]
    memory = torch.zeros(len(here), rule.memory_size, dtype=torch.float64)
    while len(here):
        start = RoundStart(len(here), memory)
        draft = logged_draft(rule, chunk, torch.from_numpy(here), start)
        rows.append(here)
        found.append(outcomes_at(draft))
        memory = rule.observe(memory, _outcome_of(draft))
        here = here + draft.on_path.sum(1).numpy()
        inside = here < end
        here, end, memory = here[inside], end[inside], memory[torch.from_numpy(inside)]
    order = np.concatenate(rows)
    visited = np.zeros(positions.num_rows, np.bool_)
    visited[order] = True
    return visited, join_rows(found).at(order.argsort())


def _outcome_of(draft: LoggedDraft) -> Outcome:
    """A logged round in the form of `ShapeRule.observe`; token ids are 0, as logs of replay lack
    them."""
    tree = take(draft.pool, draft.submitted)
    deepest = int(tree.depth.max())
    place = tree.depth.masked_fill(~draft.on_path, deepest + 1)
    slots = torch.arange(tree.num_slots).expand_as(place)
    path = torch.full((len(place), deepest + 2), -1).scatter(1, place, slots)
    nothing = torch.zeros_like(tree.token_ids)
    return Outcome(draft.pool, draft.submitted, tree, path[:, : deepest + 1], nothing)
