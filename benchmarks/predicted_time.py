"""Predicted wall time of live rounds: recorded counts under a cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specctl.replay.cost.model import CostModel, Steps
from specctl.runtime.requests import RoundRecord


@dataclass(frozen=True)
class Prediction:
    """Wall time of a run by part, us; parts as in `Metrics`, decisions counted as drafting."""

    prefill_us: float
    draft_us: float
    verify_us: float
    loop_us: float

    @property
    def wall_us(self) -> float:
        """All parts together."""
        return self.prefill_us + self.draft_us + self.verify_us + self.loop_us


def predict(
    model: CostModel, steps: Steps, prompt_tokens: Sequence[int], *, drafts: bool
) -> Prediction:
    """Time of a run: its prompts, then the sum over its rounds.

    Args:
        steps: every round of the batch. prompt_tokens: length of each prompt read.
        drafts: the drafter reads the prompts too.
    """
    counts = (steps.num_tokens, steps.batch_size, steps.context_tokens)
    verify = model.verify_us(*counts, steps.max_tokens)
    return Prediction(
        prefill_us=float(model.prefill_us(prompt_tokens, drafts=drafts).sum()),
        draft_us=float(model.draft_us(steps).sum()),
        verify_us=float(verify.sum()),
        loop_us=float(model.loop_us(steps).sum()),
    )


class StepRecorder:
    """An observer that keeps the counts that a cost model needs of each round."""

    def __init__(self) -> None:
        self._requests: list[set[str]] = []
        self._rows: list[tuple[float, ...]] = []
        self._most = 1

    def on_round(self, record: RoundRecord) -> None:
        sizes = (record.submitted >= 0).sum(1).tolist()
        self._most = max(self._most, *sizes)
        self._requests.append({request.request_id for request in record.requests})
        self._rows.append(
            (
                len(sizes),
                sum(sizes),
                float(record.context_tokens.double().mean()) - 1,  # the root is not cached yet
                int(record.offered_depth.max()),
                record.offered_width,
                int((record.path_length + 1).sum()) / len(sizes),
            )
        )

    def steps(self) -> Steps:
        """The rounds so far; one whose requests all ended has nothing more to read."""
        columns = np.array(self._rows, np.float64).T
        following = [*self._requests[1:], set[str]()]
        goes_on = [bool(a & b) for a, b in zip(self._requests, following, strict=True)]
        batch, tokens, context, levels, width, read = columns
        read = np.where(goes_on, read, 0)
        return Steps(batch, tokens, context, levels, width, read, self._most)
