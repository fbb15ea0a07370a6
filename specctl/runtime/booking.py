"""What a round is booked as: the counters of its requests, and the record that observers get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specctl.runtime.active import Active
from specctl.runtime.observe import RoundRecord, RoundTimes
from specctl.runtime.round import BatchState, Verdict


class Counts(NamedTuple):
    """What a round came to, request by request.

    Attributes:
        emitted: tokens kept. accepted: draft tokens admitted, before the end of a text cut them.
        verified: nodes that the target saw, root counted. levels: drafted.
        fallback: a static plan chose what was verified.
    """

    emitted: Sequence[int]
    accepted: Sequence[int]
    verified: Sequence[int]
    levels: Sequence[int]
    fallback: Sequence[bool]


def book(actives: Sequence[Active], counts: Counts, times: RoundTimes) -> None:
    """Adds a round to the counters of its requests, which share its time."""
    for active, emitted, accepted, verified, levels, fallback in zip(actives, *counts, strict=True):
        active.metrics.add_round(
            verified=verified,
            accepted=min(accepted, emitted),
            emitted=emitted,
            levels=levels,
            times=times,
            share=len(actives),
            is_fallback=fallback,
        )


def counts_of(verdict: Verdict, emitted: Sequence[int], *, is_fallback: bool) -> Counts:
    """Of a round of the ordinary loop; asks the device."""
    return Counts(
        emitted,
        [len_ - 1 for len_ in (verdict.path >= 0).sum(1).tolist()],
        (verdict.submitted >= 0).sum(1).tolist(),
        verdict.offered_depth.tolist(),
        [is_fallback] * len(emitted),
    )


def record_of(
    actives: Sequence[Active],
    state: BatchState,
    verdict: Verdict,
    emitted: Sequence[int],
    times: RoundTimes,
) -> RoundRecord:
    """A round of the ordinary loop for observers."""
    device, shape = state.root_ids.device, verdict.rules.shape
    return RoundRecord(
        requests=[active.request for active in actives],
        round_idx=torch.tensor([a.metrics.calls for a in actives], device=device),
        position=state.positions,
        context_tokens=torch.tensor(state.offsets, device=device) + 1,
        pool=verdict.pool,
        offered_depth=verdict.offered_depth,
        offered_width=shape.width,
        top_k=shape.top_k,
        submitted=verdict.submitted,
        tree=verdict.tree,
        target_logits=verdict.logits,
        target_logp_source=verdict.warped,
        target_ids=verdict.target_ids,
        path=verdict.path,
        num_emitted=torch.tensor(emitted, device=device),
        times=times,
        policy_digest=verdict.rules.digest,
    )
