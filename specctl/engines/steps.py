"""Steps of an engine on their way to a trace: with logits, and after these were read.

engine's thread    Step: the logits as they are, a few numbers
writing thread     read_steps ──► ReadStep: on the host, a few numbers per token
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.collect.transfer import Event, Lane
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
    """A step of the engine.

    Attributes:
        answered: the R requests of the step that are recorded.
        sampled: `[R, S]`, their new tokens, -1 padded.
        drafted: drafts of the previous step, which this one verified.
        logits: `[T, V]`, the target's, a row per verified token, request by request from the root.
            None if the step records only ends of requests.
        awaited: `[T, K]` int64, -1 padded: the draft tokens to look up in each row. None in a live
            log, which looks up the next draft token (K = 1); a dense log looks up the tokens of all
            drafts that reach the position, by their depth.
        mark: the device has made all of these.
        columns: columns of the step that all its rows share.
        ended: names of requests that have ended.
    """

    answered: list[Answered]
    sampled: Tensor
    drafted: Drafted
    logits: Tensor | None
    mark: Event
    awaited: Tensor | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """Memory of the logits."""
        own = 0 if self.logits is None else self.logits.nbytes
        return own + sum(one.nbytes for one in self.drafted.logits)


class Ranks(NamedTuple):
    """The target's view of K draft tokens in each of T rows of logits."""

    logp: NDArray[np.float32]  # `[T, K]`, of the sampled distribution
    rank: NDArray[np.int64]  # `[T, K]`, from 1, in the raw logits
    top_two: NDArray[np.float32]  # `[T, 2]`, raw logits
    entropy: NDArray[np.float32]  # `[T]`, nats, of the sampled distribution; NaN in live logs


class Chains(NamedTuple):
    """Columns of drafted tokens, `[B, L]` each, as in `DraftedLevel`."""

    token_ids: NDArray[np.int64]
    logp: NDArray[np.float32]
    entropy: NDArray[np.float32]
    topk_entropy: NDArray[np.float32]


@dataclass
class ReadStep:
    """A `Step` on the host, whose logits have been read."""

    answered: list[Answered]
    tokens: list[list[int]]  # R lists of new tokens, -1 padded
    chains: Chains
    offered: NDArray[np.int64]  # `[B]`
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
        token_ids = [one.token_ids.cpu().numpy() for one in drafts]
        offered = [one.offered.cpu().numpy() for one in drafts]
        tokens = [step.sampled.tolist() for step in steps]
        # Level by level, as the engine drafted them.
        features: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * 3
        if levels := [level for one in drafts for level in one.logits]:
            found = node_features(torch.cat(levels), 1, ENTROPY_TOP_K)
            kept = (found.top_logp[..., 0], found.entropy, found.topk_entropy)
            features = [one.cpu().numpy() for one in kept]
        awaited = [
            _next_drafts(*of_step) if of_step[0].awaited is None else of_step[0].awaited.numpy()
            for of_step in zip(steps, token_ids, offered, strict=True)
            if of_step[0].logits is not None
        ]
        ranks = None
        if answers := [step.logits for step in steps if step.logits is not None]:
            is_dense = any(step.awaited is not None for step in steps)
            asked = torch.from_numpy(np.concatenate(awaited))
            ranks = _ranks(torch.cat(answers), asked, sampling, with_entropy=is_dense)
    found_steps, first_draft, first_answer = [], 0, 0
    for step, ids, own, given in zip(steps, token_ids, offered, tokens, strict=True):
        end, (size, depth) = first_draft + ids.size, ids.shape
        floats = [one[first_draft:end].reshape(depth, size).T for one in features]
        first_draft, mine = end, None
        if ranks is not None and step.logits is not None:
            last = first_answer + len(step.logits)
            columns: Any = (one[first_answer:last] for one in ranks)
            mine = Ranks(*columns)
            first_answer = last
        facts = (step.drafted.policy, step.drafted.digest, mine, step.columns, step.ended)
        found_steps.append(ReadStep(step.answered, given, Chains(ids, *floats), own, *facts))
    return found_steps


def _next_drafts(
    step: Step, token_ids: NDArray[np.int64], offered: NDArray[np.int64]
) -> NDArray[np.int64]:
    """`[T, 1]`: the draft token offered after each verified token, -1 for none."""
    size, depth = token_ids.shape
    # One more row for no chain, and one more column after the last level.
    table = np.full((size + 1, depth + 1), -1)
    is_own = np.arange(depth) < offered[:, None]
    table[:size, :depth][is_own] = token_ids[is_own]
    return np.concatenate([table[one.draft_row, : one.num_drafted + 1] for one in step.answered])[
        :, None
    ]


def _ranks(logits: Tensor, tokens: Tensor, sampling: Sampling, *, with_entropy: bool) -> Ranks:
    drawn, tokens = process_logits(logits, sampling), tokens.to(logits.device)
    raw = of_drawn = token_ranks(logits, tokens)
    if drawn is not logits:
        of_drawn = token_ranks(drawn, tokens)
    logp = of_drawn.logits - of_drawn.log_sum_exp[:, None]
    entropy = torch.full_like(raw.log_sum_exp, torch.nan)
    if with_entropy:
        entropy = torch.special.entr(drawn.float().softmax(-1)).sum(-1)
    found = (logp, raw.num_larger + 1, raw.top_two, entropy)
    return Ranks(*(one.cpu().numpy() for one in found))
