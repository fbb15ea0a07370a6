"""Some prompts of a log: whoever holds the part cannot look at the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from specctl.replay.ladder.tally import rows_of, take_requests
from specctl.replay.log import DenseLog, LogChunk


@dataclass(frozen=True)
class PromptLog(DenseLog):
    """The requests of `prompts` alone; everything that reads a `DenseLog` takes it."""

    prompts: frozenset[str]

    @classmethod
    def of(cls, log: DenseLog, prompts: Sequence[str]) -> PromptLog:
        """A part of a log; nothing is read yet."""
        return cls(log.support, log.digest, log.files, frozenset(prompts), tokens=log.tokens)

    def chunks(
        self, *, with_entropy: bool = True, extra: tuple[str, ...] = ()
    ) -> Iterator[LogChunk]:
        """As of `DenseLog`; chunks without any of the prompts are left out."""
        whole = DenseLog(self.support, self.digest, self.files, tokens=self.tokens)
        for chunk in whole.chunks(with_entropy=with_entropy, extra=extra):
            names = chunk.positions.prompt_ids
            wanted = np.array([name in self.prompts for name in names])[chunk.positions.prompt]
            if wanted.any():
                yield _requests_of(chunk, wanted)


def _requests_of(chunk: LogChunk, wanted: np.ndarray) -> LogChunk:
    """The trees of the other requests stay where they are; no root leads to them any more."""
    rows = rows_of(chunk.positions, wanted)
    part: LogChunk = take_requests(chunk, wanted)
    return replace(part, root=chunk.root[torch.from_numpy(rows)])
