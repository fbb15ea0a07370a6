"""Rounds that copy the text, from the log: a copy is taken as far as the text goes on like it.

What a copy drafts need not be in the log's trees, and a copy has no probability; how much of it the
target takes is in the text alone, so these rounds are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from specctl.lazy import inference, torch
from specctl.logs.logged_draft import BATCH_POSITIONS, batches, recent_text, text_behind
from specctl.logs.positions import Bools, Ints
from specctl.logs.tree_log import LogChunk
from specctl.policy import Policy
from specctl.policy.copying import CopyText
from specctl.replay.outcomes import Outcomes


@dataclass(frozen=True)
class CopiedRounds:
    """Rounds at R positions, `[R]`; those of rows that do not copy mean nothing."""

    rows: Bools
    outcomes: Outcomes

    def over(self, drafted: Outcomes) -> Outcomes:
        """The shape's outcomes, `[R]`, copies in their place where there are some."""
        names = [field.name for field in fields(Outcomes)]
        pairs = ((getattr(self.outcomes, name), getattr(drafted, name)) for name in names)
        return Outcomes(*(np.where(self.rows, own, theirs) for own, theirs in pairs))

    def bounds(self, span: Ints) -> Ints:
        """The same of a bound of the accepted tokens: of a copy nothing is unknown."""
        return np.where(self.rows, self.outcomes.accepted, span)


@inference
def copied_rounds(policy: Policy, chunk: LogChunk) -> CopiedRounds | None:
    """Where a policy copies, and what becomes of it; None for one that never does.

    Raises:
        TraceError: the chunk holds no text.
    """
    copies = policy.copies
    if copies is None:
        return None
    lengths = np.diff(chunk.positions.start)
    window = min(copies.window, int(lengths.max(initial=1)))
    found = [
        _copied(copies, chunk, rows, window)
        for rows in batches(chunk.positions.num_rows, BATCH_POSITIONS)
    ]
    is_copy, accepted = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return CopiedRounds(is_copy, Outcomes.of(accepted, verified=1 + copies.max_draft_tokens))


def _copied(copies: CopyText, chunk: LogChunk, rows: slice, window: int) -> tuple[Bools, Ints]:
    """Of some positions, whether they copy, and the copied tokens that the text takes."""
    copy = copies.find(recent_text(chunk, rows, window))
    agrees = copy.token_ids == text_behind(chunk, rows, copies.max_draft_tokens)
    accepted = agrees.cumprod(1).sum(1).to(torch.int32)
    return (copy.length > 0).numpy(), accepted.numpy()
