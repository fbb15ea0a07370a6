"""What paired runs note of every round, beside the text that it emits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specctl.runtime.observe import RoundRecord
from specctl.tree import gather


@dataclass(frozen=True)
class Opening:
    """How near each request of a round came to a relaxation that its policy did not allow.

    Attributes:
        measure: names what the numbers mean, so that no others are taken for them.
        of_round: `[B]` float, -inf where no threshold would have changed the round.
    """

    measure: str
    of_round: Callable[[RoundRecord], Tensor]


@dataclass
class Watch:
    """Counts admitted draft tokens that are not the target's own, and notes openings, by prompt."""

    opening: Opening | None
    relaxed: dict[str, int] = field(default_factory=dict)
    openings: dict[str, float] = field(default_factory=dict)

    def on_round(self, record: RoundRecord) -> None:
        followed, before = record.path[:, 1:], record.path[:, :-1]
        own = gather(record.target_ids, before, -1)
        emitted = torch.arange(own.shape[1], device=own.device) < record.num_emitted[:, None]
        other = (gather(record.tree.token_ids, followed, -1) != own) & (followed >= 0) & emitted
        for request, count in zip(record.requests, other.sum(1).tolist(), strict=True):
            self.relaxed[request.prompt_id] = self.relaxed.get(request.prompt_id, 0) + count
        if self.opening is not None:
            # Behind the end of a text nothing can change it any more.
            is_cut = record.path_length >= record.num_emitted
            values = self.opening.of_round(record).masked_fill(is_cut, float("-inf"))
            self._note(record, values.tolist())

    def _note(self, record: RoundRecord, values: list[float]) -> None:
        for request, value in zip(record.requests, values, strict=True):
            if value > self.openings.get(request.prompt_id, float("-inf")):
                self.openings[request.prompt_id] = value
