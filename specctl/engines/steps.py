"""Steps of an engine on their way to a trace: with logits, and after these were read.

engine's thread    Step: the logits as they are, a few numbers
writing thread     read_steps ──► ReadStep: on the host, a few numbers per token
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specctl.collect.transfer import Event, Lane
from specctl.engines.chains import DraftedTokens
from specctl.features import ENTROPY_TOP_K
from specctl.kernels.node_features import node_features
from specctl.kernels.token_ranks import token_ranks
from specctl.policy import Policy
from specctl.runtime.requests import Sampling
from specctl.runtime.sampling import process_logits


@dataclass(frozen=True)
class Drafted:
    """Chains that a step drafted for B requests."""

    request_ids: list[str]
    token_ids: Tensor  # `[B, L]` int64, of the target's vocabulary
    logits: list[Tensor]  # the drafter's, `[B, V]` over target ids, for each of L levels
    offered: Tensor  # `[B]` int64, levels offered to each request
    policy: Policy  # that decided
    digest: str

    @classmethod
    def nothing(cls, policy: Policy, digest: str) -> Drafted:
        """The result of a step without drafts."""
        token_ids = torch.zeros(0, 0, dtype=torch.int64)
        return cls([], token_ids, [], torch.zeros(0, dtype=torch.int64), policy, digest)


class TextEnd(NamedTuple):
    """The conditions under which a text ends."""

    room: int  # tokens that may still be emitted
    stop_ids: Collection[int]

    def kept(self, token_ids: Sequence[int]) -> tuple[list[int], bool]:
        """The tokens of a step, -1 padded, that the text keeps, and whether it ends with them."""
        given = [one for one in token_ids if one >= 0]
        ends = (i + 1 for i, one in enumerate(given) if one in self.stop_ids)
        size = min(next(ends, self.room), self.room)
        return given[:size], size <= len(given)


class Answered(NamedTuple):
    """A request that a step gave tokens to."""

    request_id: str  # its name in the set
    root_id: int  # the last token before the new ones
    position: int  # tokens emitted before
    context: int  # length of the text with the root
    end: TextEnd
    draft_row: int  # in the step's `Drafted`; -1 for none
    num_drafted: int  # draft tokens verified
    prompt: tuple[int, ...] | None = None  # if the step read its end, and so is no round


@dataclass
class Step:
    """A step of the engine."""

    answered: list[Answered]  # its R recorded requests
    sampled: Tensor  # `[R, S]`, their new tokens, -1 padded
    drafted: Drafted  # in the previous step, which this one verified
    logits: Tensor | None
    """`[T, V]`, the target's, a row per verified token, request by request from the root. None if
    the step records only ends of requests."""
    mark: Event  # the device has made all of these
    awaited: Tensor | None = None
    """`[T, K]` int64, -1 padded: the draft tokens to look up in each row. None in a live log, which
    looks up the next draft token (K = 1); a dense log looks up the tokens of all drafts that reach
    the position, by their depth."""
    columns: dict[str, Any] = field(default_factory=dict)  # that all its rows share
    ended: list[str] = field(default_factory=list)  # names of requests that have ended

    @property
    def size_bytes(self) -> int:
        """Memory of the logits."""
        own = 0 if self.logits is None else self.logits.nbytes
        return own + sum(one.nbytes for one in self.drafted.logits)


class Ranks(NamedTuple):
    """The target's view of K draft tokens in each of T rows of logits."""

    logp: Tensor  # `[T, K]` float32, of the sampled distribution
    rank: Tensor  # `[T, K]` int64, from 1, in the raw logits
    top_two: Tensor  # `[T, 2]` float32, raw logits
    entropy: Tensor  # `[T]` float32, nats, of the sampled distribution; NaN in live logs


@dataclass
class ReadStep:
    """A `Step` on the host, whose logits have been read."""

    answered: list[Answered]
    tokens: list[list[int]]  # R lists of new tokens, -1 padded
    chains: DraftedTokens  # `[B, L]`
    offered: Tensor  # `[B]` int64
    policy: Policy
    digest: str
    ranks: Ranks | None  # None if the step records only ends of requests
    columns: dict[str, Any]
    ended: list[str]


def read_steps(steps: Sequence[Step], sampling: Sampling, lane: Lane) -> list[ReadStep]:
    """Reads the logits of some steps together, in few calls; waits for the device.

    Args:
        sampling: the target's.
    """
    with lane.after([step.mark for step in steps]):
        drafts = [step.drafted for step in steps]
        token_ids = [one.token_ids.cpu() for one in drafts]
        offered = [one.offered.cpu() for one in drafts]
        tokens = [step.sampled.tolist() for step in steps]
        # Level by level, as the engine drafted them.
        features = [torch.zeros(0)] * 3
        if levels := [level for one in drafts for level in one.logits]:
            found = node_features(torch.cat(levels), 1, ENTROPY_TOP_K)
            kept = (found.top_logp[..., 0], found.entropy, found.topk_entropy)
            features = [one.cpu() for one in kept]
        awaited = [
            _next_drafts(*of_step) if of_step[0].awaited is None else of_step[0].awaited
            for of_step in zip(steps, token_ids, offered, strict=True)
            if of_step[0].logits is not None
        ]
        ranks = [torch.zeros(0)] * 4
        if answers := [step.logits for step in steps if step.logits is not None]:
            is_dense = any(step.awaited is not None for step in steps)
            ranks = _ranks(torch.cat(answers), torch.cat(awaited), sampling, with_entropy=is_dense)
    num_drafted = [ids.numel() for ids in token_ids]
    num_read = [0 if step.logits is None else len(step.logits) for step in steps]
    of_drafts = zip(*(one.split(num_drafted) for one in features), strict=True)
    of_target = zip(*(one.split(num_read) for one in ranks), strict=True)
    found_steps = []
    for step, ids, own, given, floats, views in zip(
        steps, token_ids, offered, tokens, of_drafts, of_target, strict=True
    ):
        chains = DraftedTokens(ids, *(one.reshape(ids.T.shape).T for one in floats))
        mine = None if step.logits is None else Ranks(*views)
        facts = (step.drafted.policy, step.drafted.digest, mine, step.columns, step.ended)
        found_steps.append(ReadStep(step.answered, given, chains, own, *facts))
    return found_steps


def _next_drafts(step: Step, token_ids: Tensor, offered: Tensor) -> Tensor:
    """`[T, 1]`: the draft token offered after each verified token, -1 for none."""
    size, depth = token_ids.shape
    # One more row for no chain, and one more column after the last level.
    table = torch.full((size + 1, depth + 1), -1)
    is_own = torch.arange(depth) < offered[:, None]
    table[:size, :depth] = token_ids.masked_fill(~is_own, -1)
    return torch.cat([table[one.draft_row, : one.num_drafted + 1] for one in step.answered])[
        :, None
    ]


def _ranks(
    logits: Tensor, tokens: Tensor, sampling: Sampling, *, with_entropy: bool
) -> list[Tensor]:
    """The columns of `Ranks`, on the host."""
    drawn, tokens = process_logits(logits, sampling), tokens.to(logits.device)
    raw = of_drawn = token_ranks(logits, tokens)
    if drawn is not logits:
        of_drawn = token_ranks(drawn, tokens)
    logp = of_drawn.logits - of_drawn.log_sum_exp[:, None]
    entropy = torch.full_like(raw.log_sum_exp, torch.nan)
    if with_entropy:
        entropy = torch.special.entr(drawn.float().softmax(-1)).sum(-1)
    return [one.cpu() for one in (logp, raw.num_larger + 1, raw.top_two, entropy)]
