"""Timing what the decode loop does around the models, and how it reads prompts."""

from __future__ import annotations

import time

import torch

from specctl.policy import Policy
from specctl.replay.cost.probe import random_tokens
from specctl.runtime.active import Completion
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair
from specctl.runtime.metrics import pooled
from specctl.runtime.observe import Request


def loop_us(
    pair: Pair, policy: Policy, batch_size: int, prompt_tokens: int, max_new_tokens: int
) -> float:
    """Host work of one step: what steps take beyond drafting, verification and decisions."""
    start = time.perf_counter()
    finished, num_steps = _decode(
        pair, policy, batch_size, batch_size, prompt_tokens, max_new_tokens
    )
    wall_us = 1e6 * (time.perf_counter() - start)
    total = pooled(done.metrics for done in finished)
    models_us = total.draft_us + total.verify_us + total.policy_us + total.prefill_us
    return (wall_us - models_us) / num_steps


def prefill_us(pair: Pair, policy: Policy, prompt_tokens: int, num_prompts: int) -> list[float]:
    """Reading prompts, one at a time, after one that warms up."""
    finished, _ = _decode(pair, policy, 1, num_prompts + 1, prompt_tokens, max_new_tokens=1)
    return [done.metrics.prefill_us for done in finished[1:]]


def _decode(
    pair: Pair,
    policy: Policy,
    batch_size: int,
    num_requests: int,
    prompt_tokens: int,
    max_new_tokens: int,
) -> tuple[list[Completion], int]:
    """Decodes random prompts to their full length; completions, and the steps taken."""
    loop = DecodeLoop(
        pair.target.model,
        pair.drafter,
        policy,
        batch_size=batch_size,
        max_text_tokens=prompt_tokens + max_new_tokens,
        eos_ids=(),
    )
    for row in range(num_requests):
        ids = tuple(random_tokens(pair, prompt_tokens, seed=row))
        loop.submit(Request(str(row), ids, max_new_tokens))
    finished: list[Completion] = []
    num_steps = 0
    while loop.busy:
        finished += loop.step()
        num_steps += 1
    if pair.target.model.device.type == "cuda":
        torch.cuda.synchronize()
    return finished, num_steps
