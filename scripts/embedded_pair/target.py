"""Language-model training for the target: Muon on matrices, AdamW on the rest, bf16 autocast."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 4096
BOS_ID, USER_ID, ASSISTANT_ID = 0, 2, 3  # see tokenizer.SPECIALS
PROMPT_WEIGHT = 0.25  # of questions, whose names and numbers nobody can predict


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


class Optimizer:
    """Muon for 2-D matrices but embeddings and heads, AdamW for everything else, one schedule."""

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        adam_names: tuple[str, ...] = ("embed_tokens", "lm_head"),
    ) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if p.ndim == 2 and not any(a in n for a in adam_names)]
        rest = [p for n, p in named if all(p is not m for m in matrices)]
        self.schedule = schedule
        self.parts = [
            torch.optim.Muon(
                matrices, lr=schedule.muon_lr, weight_decay=0.01, adjust_lr_fn="original"
            ),
            torch.optim.AdamW(
                rest, lr=schedule.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
            ),
        ]

    def step(self, step: int) -> None:
        """One update at the schedule's rate, gradients cleared."""
        for part, base in zip(
            self.parts, (self.schedule.muon_lr, self.schedule.adam_lr), strict=True
        ):
            part.param_groups[0]["lr"] = base * self.schedule.scale(step)
            part.step()
            part.zero_grad(set_to_none=True)

    def state(self) -> list[dict]:
        """State of both parts, for a checkpoint."""
        return [part.state_dict() for part in self.parts]

    def restore(self, state: list[dict]) -> None:
        """Inverse of `state`."""
        for part, saved in zip(self.parts, state, strict=True):
            part.load_state_dict(saved)


def lm_loss(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Mean next-token cross-entropy in nats over `tokens` [B, T]."""
    return token_losses(model, tokens).mean()


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
    return {domain: round(float(lm_loss(model, tokens)), 4) for domain, tokens in rows.items()}


@dataclass
class Progress:
    """Where a run stands; `wall_s` and `cpu_s` add up over resumes."""

    step: int = 0
    num_tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0


def save_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer, progress: Progress) -> None:
    """Written beside and renamed, so that a crash leaves the previous checkpoint whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state(), "progress": asdict(progress)},
        beside,
    )
    beside.replace(path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer | None = None) -> Progress:
    """Restores in place and returns where the run stood."""
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    if optimizer is not None:
        optimizer.restore(saved["optimizer"])
    return Progress(**saved["progress"])


def run(
    model: nn.Module,
    schedule: Schedule,
    losses: Callable[[int], Iterable[Callable[[], Tensor]]],
    *,
    checkpoint: Path,
    log: Path,
    is_resumed: bool = False,
    evaluate: Callable[[], dict[str, float]] = dict,
    eval_every: int = 150,
    save_every: int = 60,
) -> Progress:
    """Trains over `losses(first step)`, one deferred loss a step, with log and checkpoints."""
    optimizer, progress = Optimizer(model, schedule), Progress()
    if is_resumed and checkpoint.exists():
        progress = load_checkpoint(checkpoint, model, optimizer)
    wall, cpu = time.time() - progress.wall_s, time.process_time() - progress.cpu_s
    for step, loss_fn in enumerate(losses(progress.step), start=progress.step):
        loss = loss_fn()
        loss.backward()
        progress_loss = float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(step)
        rows, length = schedule.shape(step)
        progress = Progress(
            step + 1,
            progress.num_tokens + rows * length,
            time.time() - wall,
            time.process_time() - cpu,
        )
        is_last = progress.step == schedule.num_steps
        if progress.step % 10 == 0 or is_last:
            write_line(
                log,
                {
                    "loss": round(progress_loss, 4),
                    "tokens_per_s": round(progress.num_tokens / progress.wall_s),
                    **asdict(progress),
                },
            )
        if progress.step % eval_every == 0 or is_last:
            write_line(log, {"step": progress.step, "validation": evaluate()})
        if progress.step % save_every == 0 or is_last:
            save_checkpoint(checkpoint, model, optimizer, progress)
        if is_last or not math.isfinite(progress_loss):
            break
    return progress


def write_line(log: Path, values: dict) -> None:
    """One JSON line, flushed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(json.dumps(values) + "\n")
