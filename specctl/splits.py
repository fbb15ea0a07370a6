"""Train and held-out prompts: split by prompt, never by row, and the same on every machine.

Rounds of one prompt resemble each other; a split by row would test on what it has seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from specctl.errors import TraceEmptyError


@dataclass(frozen=True)
class Split:
    """Prompt ids on each side, sorted; both are non-empty and share none."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def split_prompts(prompt_ids: Iterable[str], *, held_out_frac: float, seed: int) -> Split:
    """Splits by a hash of (seed, prompt id), so that adding prompts moves no other one.

    A prompt is held out when its hash, read as a number in [0, 1), is below `held_out_frac`;
    only if that leaves a side empty does the nearest prompt change sides.

    Args:
        held_out_frac: expected share of prompts held out, between 0 and 1.

    Raises:
        TraceEmptyError: fewer than two prompts.
    """
    ordered = sorted(set(prompt_ids), key=lambda prompt_id: _position(prompt_id, seed))
    if len(ordered) < 2:
        raise TraceEmptyError(
            "split by prompt",
            expected="rounds of at least 2 prompts",
            found=f"{len(ordered)}",
            fix="collect traces of more prompts",
        )
    wanted = sum(_position(prompt_id, seed) < held_out_frac for prompt_id in ordered)
    cut = min(max(wanted, 1), len(ordered) - 1)
    return Split(train=tuple(sorted(ordered[cut:])), held_out=tuple(sorted(ordered[:cut])))


def _position(prompt_id: str, seed: int) -> float:
    digest = hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
