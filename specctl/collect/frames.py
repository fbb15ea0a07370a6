"""Rounds as rows of tensors, before they are columns: what leaves the device, and how it is joined.

RoundRecord ─statistics─► tensors, which leave the device ─Heading─► Frame ─join, pick─► Frame
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from specctl.collect.stack import stack
from specctl.collect.target_view import view_target
from specctl.features import NODE_TENSORS
from specctl.runtime.observe import Request, RoundRecord, RoundTimes
from specctl.tree import PAD

ROW_TENSORS = ("round_idx", "position", "context_tokens", "offered_depth", "num_emitted")
SLOT_TENSORS = ("submitted", "target_ids", "path")
FILLS = {"parent": PAD, "joint_logp": float("-inf"), "submitted": -1, "path": -1}
"""Values of padding where rounds of different sizes are joined; 0 or false for the others."""


@dataclass(frozen=True)
class Facts:
    """What the rows of one round share."""

    offered_width: int
    top_k: int
    batch_size: int
    times: RoundTimes
    policy_digest: str


@dataclass(frozen=True)
class Frame:
    """R rows (a request in a round) on the CPU, without logits.

    Attributes:
        requests, facts: R of each.
        tensors: by name; the first axis is R, a second is padded.
    """

    requests: list[Request]
    facts: list[Facts]
    tensors: dict[str, Tensor]

    @cached_property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def statistics(records: Sequence[RoundRecord]) -> dict[str, Tensor]:
    """What a trace needs of rounds that are alike, by name, on their device; no logits."""
    record = stack(records)
    pool, view = record.pool, view_target(record)
    tensors = {name: getattr(record, name) for name in (*ROW_TENSORS, *SLOT_TENSORS)}
    tensors |= {field.name: getattr(pool.tree, field.name) for field in fields(pool.tree)}
    tensors |= {name: getattr(pool, name) for name in NODE_TENSORS}
    tensors |= {f"target_{field.name}": getattr(view, field.name) for field in fields(view)}
    return tensors


@dataclass(frozen=True)
class Heading:
    """What the host knows of the R rows of some rounds, while their tensors are on their way."""

    requests: list[Request]
    facts: list[Facts]

    def frame(self, tensors: dict[str, Tensor]) -> Frame:
        """With what arrived."""
        return Frame(self.requests, self.facts, tensors)


def heading_of(records: Sequence[RoundRecord]) -> Heading:
    """Requests and facts, row by row."""
    facts = [shared for one in records for shared in [facts_of(one)] * len(one.requests)]
    return Heading([request for one in records for request in one.requests], facts)


def facts_of(record: RoundRecord) -> Facts:
    """What is one for the whole batch of a round."""
    size = len(record.requests)
    return Facts(record.offered_width, record.top_k, size, record.times, record.policy_digest)


def join(frames: Sequence[Frame]) -> Frame:
    """All rows of at least one frame, second axes padded to the longest."""
    names = frames[0].tensors
    return Frame(
        [request for frame in frames for request in frame.requests],
        [facts for frame in frames for facts in frame.facts],
        {name: _cat([f.tensors[name] for f in frames], FILLS.get(name, 0)) for name in names},
    )


def _cat(tensors: list[Tensor], fill: float) -> Tensor:
    if tensors[0].dim() > 1:
        longest = max(tensor.shape[1] for tensor in tensors)
        tensors = [pad(tensor, (0, longest - tensor.shape[1]), value=fill) for tensor in tensors]
    return torch.cat(tensors)


def pick(frame: Frame, rows: Sequence[int]) -> Frame:
    """Some of the rows; the frame itself where that is all of them."""
    if len(rows) == len(frame.requests):
        return frame
    index = torch.tensor(rows, dtype=torch.int64)
    return Frame(
        [frame.requests[row] for row in rows],
        [frame.facts[row] for row in rows],
        {name: tensor[index] for name, tensor in frame.tensors.items()},
    )
