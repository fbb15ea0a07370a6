"""Training runs (Muon on matrices, AdamW on the rest, bf16 autocast), and the target's loss."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 4096
BOS_ID, USER_ID, ASSISTANT_ID = 0, 2, 3  # see tokenizer.SPECIALS
EVAL_EVERY, SAVE_EVERY = 150, 60  # steps
PROMPT_WEIGHT = 0.25  # of questions, whose names and numbers nobody can predict
ADAM_NAMES = ("embed_tokens", "lm_head")  # matrices that AdamW trains all the same


@dataclass(frozen=True)
class Schedule:
    """Steps of a warm-up, constant, decay run; lengths in tokens."""

    num_steps: int
    rows: int = 16
    length: int = 256
    long_frac: float = 0.15  # last share of the steps, run at twice the length and half the rows
    warmup: int = 40
    decay_frac: float = 0.45
    muon_lr: float = 0.011
    adam_lr: float = 2e-3

    def scale(self, step: int) -> float:
        """Learning-rate factor: linear up, flat, linear down to 2 %."""
        down = (self.num_steps - step) / max(1, self.num_steps * self.decay_frac)
        return min(1.0, (step + 1) / self.warmup, max(0.02, down))

    def shape(self, step: int) -> tuple[int, int]:
        """(rows, length) of the batch at a step."""
        is_long = step >= self.num_steps * (1 - self.long_frac)
        return (self.rows // 2, self.length * 2) if is_long else (self.rows, self.length)


def target_config(
    layers: int = 8, hidden: int = 256, intermediate: int = 640, heads: int = 4, kv_heads: int = 2
) -> LlamaConfig:
    """The target's shape; special ids follow `tokenizer.SPECIALS`."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=intermediate,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=4,
        initializer_range=0.02,
    )


def optimizers(model: nn.Module, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for 2-D matrices but embeddings and heads, AdamW for everything else."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    is_matrix = [p.ndim == 2 and not any(a in n for a in ADAM_NAMES) for n, p in named]
    matrices = [p for (_, p), chosen in zip(named, is_matrix, strict=True) if chosen]
    rest = [p for (_, p), chosen in zip(named, is_matrix, strict=True) if not chosen]
    adam = {"betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
    return [
        torch.optim.Muon(matrices, schedule.muon_lr, 0.01, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, schedule.adam_lr, **adam),
    ]


def token_losses(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Next-token cross-entropy in nats, `[B, T - 1]`."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens, use_cache=False).logits[:, :-1]
    flat = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return flat.view(len(tokens), -1)


def training_loss(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Weighted mean of `token_losses`: what a user says counts `PROMPT_WEIGHT`."""
    weights = 1 - (1 - PROMPT_WEIGHT) * is_user_text(tokens)[:, 1:].float()
    return (token_losses(model, tokens) * weights).sum() / weights.sum()


def is_user_text(tokens: Tensor) -> Tensor:
    """Where the last role token before or at a place is the user's, `[B, T]` bool."""
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    is_role = torch.isin(tokens, torch.tensor([BOS_ID, USER_ID, ASSISTANT_ID]))
    last = torch.where(is_role, places, 0).cummax(1).values
    return tokens.gather(1, last) == USER_ID


@torch.no_grad()
def validation_losses(model: LlamaForCausalLM, rows: dict[str, Tensor]) -> dict[str, float]:
    """Cross-entropy in nats by domain."""
    return {
        domain: round(float(token_losses(model, ids).mean()), 4) for domain, ids in rows.items()
    }


def run(
    model: nn.Module,
    schedule: Schedule,
    loss_at: Callable[[int], tuple[Tensor, dict[str, Any]]],
    path: Path,
    *,
    is_resumed: bool = False,
    evaluate: Callable[[], dict[str, float]] = dict,
) -> None:
    """Trains the model in place, with a checkpoint, `path`, and a log beside it, `.jsonl`.

    Args:
        loss_at: the loss of a step, and what the log says of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.with_suffix(".jsonl")
    parts, done = optimizers(model, schedule), {"step": 0, "num_tokens": 0, "wall_s": 0, "cpu_s": 0}
    rates = [part.param_groups[0]["lr"] for part in parts]
    if is_resumed and path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        for part, state in zip(parts, saved["optimizer"], strict=True):
            part.load_state_dict(state)
        done = saved["progress"]
    wall, cpu = time.time() - done["wall_s"], time.process_time() - done["cpu_s"]
    for step in range(done["step"], schedule.num_steps):
        loss, facts = loss_at(step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part, rate in zip(parts, rates, strict=True):
            part.param_groups[0]["lr"] = rate * schedule.scale(step)
            part.step()
            part.zero_grad(set_to_none=True)
        done = {
            "step": step + 1,
            "num_tokens": done["num_tokens"] + math.prod(schedule.shape(step)),
            "wall_s": time.time() - wall,
            "cpu_s": time.process_time() - cpu,
        }
        is_last = step + 1 == schedule.num_steps
        if (step + 1) % 10 == 0 or is_last:
            write_line(log, {"loss": round(float(loss.detach()), 4), **facts, **done})
        if (step + 1) % EVAL_EVERY == 0 or is_last:
            write_line(log, {"validation": evaluate(), "step": step + 1})
        if (step + 1) % SAVE_EVERY == 0 or is_last:
            states = [part.state_dict() for part in parts]
            state = {"model": model.state_dict(), "optimizer": states, "progress": done}
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)  # a crash leaves the previous one whole
        if not bool(loss.isfinite()):
            raise ValueError(f"loss {float(loss)} at step {step}; {path} has an earlier one")


def write_line(log: Path, values: dict[str, Any]) -> None:
    """One JSON line, flushed."""
    with log.open("a") as file:
        file.write(json.dumps(values) + "\n")
