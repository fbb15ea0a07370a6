"""What a ladder is made with: its sizes, its labels, and how its progress is shown."""

from __future__ import annotations

from dataclasses import dataclass

from specctl.errors import UsageError
from specctl.replay.ladder.rungs import Kind

BOUNDS: dict[Kind, str] = {
    "features": "R_feat",
    "oracle": "R_prob",
    "clairvoyant": "R_clair",
    "ceiling": "R_ceil",
}
"""Labels of the rungs that are no policies; notes/state-of-the-art.md, section 2.3."""


@dataclass(frozen=True)
class LadderConfig:
    """How a ladder is made.

    Attributes:
        held_out_frac: share of prompts that it is measured on; the others tune and calibrate.
        seed: of the split, the folds, the sample of nodes and the bootstrap.
        num_kept: draft nodes of a tree at most, in every rung that is tuned here.
        num_nodes: labelled nodes that the estimates are fitted on at most.
        num_folds: of the oracle's cross-fitting.
    """

    held_out_frac: float = 0.5
    seed: int = 0
    num_kept: int = 63
    num_nodes: int = 200_000
    num_folds: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.held_out_frac < 1:
            raise UsageError(
                "--held-out",
                expected="a share of prompts between 0 and 1, both excluded",
                found=str(self.held_out_frac),
                fix="leave prompts on both sides",
            )
