"""Training runs (Muon on matrices, AdamW on the rest) that go on where they were stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

EVAL_EVERY, SAVE_EVERY = 150, 60  # steps
ADAM_NAMES = ("embed_tokens", "lm_head")  # matrices that AdamW trains all the same


@dataclass(frozen=True)
class Schedule:
    """Steps of a warm-up, constant, decay run."""

    num_steps: int
    warmup: int = 40
    decay_frac: float = 0.45
    muon_lr: float = 0.011
    adam_lr: float = 2e-3

    def scale(self, step: int) -> float:
        """Learning-rate factor: linear up, flat, linear down to 2 %."""
        down = (self.num_steps - step) / max(1, self.num_steps * self.decay_frac)
        return min(1.0, (step + 1) / self.warmup, max(0.02, down))


def optimizers(model: nn.Module, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for 2-D matrices but embeddings and heads, AdamW for everything else."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and not any(part in name for part in ADAM_NAMES)
        (matrices if is_matrix else rest).append(parameter)
    adam = {"betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
    return [
        torch.optim.Muon(matrices, schedule.muon_lr, 0.01, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, schedule.adam_lr, **adam),
    ]


def run(
    model: nn.Module,
    schedule: Schedule,
    batches: Iterable[Any],
    loss_of: Callable[[int, Any], tuple[Tensor, dict[str, Any]]],
    path: Path,
    evaluate: Callable[[int], dict[str, Any]],
) -> None:
    """Trains the model in place from the checkpoint `path`, where there is one, to the last step.

    The log stands beside the checkpoint, `.jsonl`.

    Args:
        batches: one a step; those of the steps that were done are passed over.
        loss_of: the loss of a step and values for its line of the log, `num_tokens` among them.
        evaluate: values after a number of steps for a line of the log, every `EVAL_EVERY` steps
            and at the end.
    """
    parts, done = optimizers(model, schedule), {"step": 0, "num_tokens": 0, "cpu_s": 0}
    rates = [part.param_groups[0]["lr"] for part in parts]
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        for part, state in zip(parts, saved["optimizer"], strict=True):
            part.load_state_dict(state)
        done = saved["progress"]

    def note(values: dict[str, Any]) -> None:
        with path.with_suffix(".jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")

    cpu = time.process_time() - done["cpu_s"]
    for step, batch in islice(enumerate(batches), done["step"], schedule.num_steps):
        loss, facts = loss_of(step, batch)
        if not bool(loss.isfinite()):
            raise ValueError(f"loss {float(loss)} at step {step}; {path} has an earlier one")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part, rate in zip(parts, rates, strict=True):
            part.param_groups[0]["lr"] = rate * schedule.scale(step)
            part.step()
            part.zero_grad(set_to_none=True)
        done = {
            "step": step + 1,
            "num_tokens": done["num_tokens"] + facts.pop("num_tokens"),
            "cpu_s": time.process_time() - cpu,
        }
        is_last = step + 1 == schedule.num_steps
        if (step + 1) % 10 == 0 or is_last:
            note({"loss": round(float(loss.detach()), 4), **facts, **done})
        if (step + 1) % EVAL_EVERY == 0 or is_last:
            note({"validation": evaluate(step + 1), "step": step + 1})
        if (step + 1) % SAVE_EVERY == 0 or is_last:
            states = [part.state_dict() for part in parts]
            state = {"model": model.state_dict(), "optimizer": states, "progress": done}
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)  # a crash leaves the previous one whole
