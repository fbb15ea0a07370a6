"""llama.cpp's rules at the end of a text, as an option of replay's engine: `--engine llamacpp`.

They hold in its server, build 11549, to the last token (`tests/engines/test_llamacpp.py`):

- *room*: a round drafts at most the tokens that its request may still generate, less the target's
  own one, so that the last token of a text that reaches its limit is decoded plainly;
- *n-min*: a small drafter stops at the room and drops a chain that is then shorter than `n-min`; an
  EAGLE-3 head drafts on, and `n-min` counts its whole chain;
- *stop token*: an accepted stop token ends the round as the target's own token. It counts as
  accepted only where it is the last of the draft.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from specctl.errors import TraceError, UsageError
from specctl.logs.positions import Longs, Positions
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import ChainSchedule, Policy, TopProbability, as_chain, build_shape
from specctl.replay.config import Engine
from specctl.replay.outcomes import Outcomes


@dataclass(frozen=True)
class TextEnd:
    """llama.cpp's rules for the requests of a log."""

    max_new_tokens: int  # of each request
    is_small: bool | None  # the drafter is a small model, no EAGLE-3 head; None if it is not here

    @classmethod
    def of(cls, traces: TraceSet) -> TextEnd:
        """The rules for the pair of a trace set.

        Raises:
            TraceError: sets of different limits, or of engines, which do not state one.
        """
        limits = {header.collect.get("max_new_tokens") for header in traces.headers}
        if len(limits) > 1 or None in limits:
            raise TraceError(
                "llama.cpp cuts drafts at the limit of new tokens, and these traces do not state "
                "one limit",
                hint="collect them with specctl collect --dense",
            )
        return cls(int(cast(int, limits.pop())), _is_small(str(traces.header.collect["drafter"])))

    def applied(self, policy: Policy, positions: Positions, outcomes: Outcomes) -> Outcomes:
        """Outcomes `[R]` at every position, cut as llama.cpp cuts its rounds.

        Raises:
            UsageError: `n-min` with an unknown drafter.
        """
        shape = policy.shape
        total = (positions.num_tokens + 1)[positions.request]
        room: Longs = (self.max_new_tokens - total + positions.remaining - 1).clip(0)
        drafted = np.minimum(outcomes.verified - 1, room)
        if isinstance(shape, TopProbability) and shape.min_draft_tokens > 1:
            if self.is_small is None:
                raise UsageError(
                    "llama.cpp tests min_draft_tokens by the kind of the drafter, which is not on "
                    "this machine",
                    hint="download the drafter, or leave min_draft_tokens out",
                )
            if self.is_small:
                drafted = np.where(drafted < shape.min_draft_tokens, 0, drafted)
        accepted = np.minimum(outcomes.accepted, drafted)
        stops_within = (accepted == positions.remaining) & (accepted < drafted)
        most = room if self.is_small else np.where(room > 0, outcomes.levels, 0)
        columns = {
            "accepted": accepted - stops_within,
            "verified": drafted + 1,
            "levels": np.minimum(outcomes.levels, most),
        }
        return replace(outcomes, **{name: of.astype(np.int32) for name, of in columns.items()})


def log_of_engine(log: DenseLog, traces: TraceSet, engine: Engine) -> DenseLog:
    """The log with an engine's rules at the end of a text."""
    return replace(log, text_end=TextEnd.of(traces)) if engine == "llamacpp" else log


def as_llamacpp(policy: Policy) -> Policy:
    """The chain that llama.cpp drafts for a policy; its own rule stays.

    Raises:
        UsageError: a policy that llama.cpp cannot have.
    """
    if build_shape(policy.shape).memory_size or isinstance(policy.shape, ChainSchedule):
        raise UsageError(
            f"--engine llamacpp: {policy.name} changes from round to round or with the batch, and "
            "llama.cpp has one setting",
            hint="replay it without --engine",
        )
    return policy if isinstance(policy.shape, TopProbability) else as_chain(policy)


def _is_small(drafter: str) -> bool | None:
    from specctl.runtime.checkpoints import kind_of
    from specctl.runtime.identity import local_folder

    folder = local_folder(drafter, embedded_default="eagle3")
    return None if folder is None else kind_of(folder) == "draft_model"
