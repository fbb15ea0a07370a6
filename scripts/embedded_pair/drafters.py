"""Training runs of the two drafters, on corpus rows and on the target's own text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from specctl.runtime.eagle3 import Eagle3Head

from .batches import Mixture
from .generate import Sample, SampleRows
from .head import SOFT_FRAC, annotate, choose_slots, head_loss
from .target import Progress, Schedule, run, write_line

SELF_FRAC = 0.75  # share of batches made of the target's own text
SLOT_FRAC = 0.44  # share of a row's slots that the head trains at


class MixedRows:
    """Batches of the target's own text, or of the corpus where there is none or by chance."""

    def __init__(self, mixture: Mixture, samples: list[Sample], seed: int) -> None:
        self.mixture = mixture
        self.own = SampleRows(samples, seed) if samples else None
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Token ids `[rows, length]` and where text of interest stands, bool."""
        if self.own is not None and float(torch.rand((), generator=self.generator)) < SELF_FRAC:
            return self.own.batch(rows, length)
        ids = self.mixture.batch(rows, length)
        return ids, torch.ones_like(ids, dtype=torch.bool)


def train_head(
    head: Eagle3Head,
    target: LlamaForCausalLM,
    rows: MixedRows,
    schedule: Schedule,
    *,
    checkpoint: Path,
    log: Path,
    is_resumed: bool,
) -> Progress:
    """Trains the head in place; the log also holds top-1 agreement by step."""

    def losses(first: int) -> Iterator[Callable[[], Tensor]]:
        for step in range(first, schedule.num_steps):
            ids, marks = rows.batch(*schedule.shape(step))
            yield lambda ids=ids, marks=marks, step=step: _head_step(
                head, target, rows, ids, marks, step, log
            )

    return run(head, schedule, losses, checkpoint=checkpoint, log=log, is_resumed=is_resumed)


def _head_step(
    head: Eagle3Head,
    target: LlamaForCausalLM,
    rows: MixedRows,
    ids: Tensor,
    marks: Tensor,
    step: int,
    log: Path,
) -> Tensor:
    slots = choose_slots(marks, int(SLOT_FRAC * ids.shape[1]), rows.generator)
    loss, agreements = head_loss(head, annotate(target, head, ids), slots)
    if step % 10 == 9:
        write_line(log, {"agreement": [round(a, 3) for a in agreements]})
    return loss


def small_loss(small: LlamaForCausalLM, target: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Cross-entropy in nats against the target's argmax, with a share of its distribution."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            teacher = target(ids, use_cache=False).logits.float().flatten(0, 1)
        logits = small(ids, use_cache=False).logits.float().flatten(0, 1)
    hard = F.cross_entropy(logits, teacher.argmax(-1))
    soft = F.cross_entropy(logits, teacher.softmax(-1))
    return (1 - SOFT_FRAC) * hard + SOFT_FRAC * soft


def train_small(
    small: LlamaForCausalLM,
    target: LlamaForCausalLM,
    rows: MixedRows,
    schedule: Schedule,
    *,
    checkpoint: Path,
    log: Path,
    is_resumed: bool,
) -> Progress:
    """Trains the small drafter in place."""

    def losses(first: int) -> Iterator[Callable[[], Tensor]]:
        for step in range(first, schedule.num_steps):
            ids, _ = rows.batch(*schedule.shape(step))
            yield lambda ids=ids: small_loss(small, target, ids)

    return run(small, schedule, losses, checkpoint=checkpoint, log=log, is_resumed=is_resumed)
