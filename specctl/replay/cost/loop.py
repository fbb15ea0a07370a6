"""Timing what the decode loop does around the models, and how it reads prompts."""

from __future__ import annotations

import time

import torch

from specctl.policy import Policy, build_shape
from specctl.replay.cost.graphed import WARM_UPS, check_captured, not_in_graphs
from specctl.replay.cost.probe import LapClock, random_tokens
from specctl.runtime.active import Completion
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.graphs import GraphSettings
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


def graphed_loop_us(
    pair: Pair,
    policy: Policy,
    batch_size: int,
    prompt_tokens: int,
    max_new_tokens: int,
    graphs: GraphSettings,
) -> float:
    """The same of captured rounds: wall time of a step beyond the parts that a table names.

    While the host keeps its books the device is still at the commit, so host work cannot simply
    be added. What the device did is taken from the loop's own rounds, all of them warm, with no
    request joining or leaving.
    """
    loop = _loop(pair, policy, batch_size, prompt_tokens + max_new_tokens, graphs)
    rounds, clocks = loop.device_rounds, list[LapClock]()
    if rounds is None:
        raise not_in_graphs(f"policy {policy.name}, which decodes without")

    def new_watch() -> LapClock:
        clocks.append(LapClock(pair.target.model.device))
        return clocks[-1]

    _submit(loop, pair, batch_size, prompt_tokens, max_new_tokens)
    most = build_shape(policy.shape).max_depth + 1
    for _ in range(WARM_UPS):
        loop.step()
    rounds.new_watch = new_watch
    num_steps = (max_new_tokens - 1) // most - WARM_UPS
    wall_us = _steps_us(loop, num_steps)
    check_captured(loop.graph_counters)
    return (wall_us - sum(_charged_us(clock.laps()) for clock in clocks)) / num_steps


def _steps_us(loop: DecodeLoop, num_steps: int) -> float:
    """Wall time of so many steps, the device's included."""
    _wait(loop)
    start = time.perf_counter()
    for _ in range(num_steps):
        loop.step()
    _wait(loop)
    return 1e6 * (time.perf_counter() - start)


def _charged_us(laps: dict[str, list[float]]) -> float:
    """What a table charges by name: of a plain round the verification alone."""
    verified, committed, _ = laps["verify"]
    if "draft" not in laps:
        return verified
    return sum(laps["draft"]) + sum(laps["policy"]) + verified + committed


def prefill_us(
    pair: Pair,
    policy: Policy,
    prompt_tokens: int,
    num_prompts: int,
    graphs: GraphSettings | None = None,
) -> list[float]:
    """Reading prompts, one at a time, after one that warms up."""
    finished, _ = _decode(pair, policy, 1, num_prompts + 1, prompt_tokens, 1, graphs)
    return [done.metrics.prefill_us for done in finished[1:]]


def _decode(
    pair: Pair,
    policy: Policy,
    batch_size: int,
    num_requests: int,
    prompt_tokens: int,
    max_new_tokens: int,
    graphs: GraphSettings | None = None,
) -> tuple[list[Completion], int]:
    """Decodes random prompts to their full length; completions, and the steps taken."""
    loop = _loop(pair, policy, batch_size, prompt_tokens + max_new_tokens, graphs)
    _submit(loop, pair, num_requests, prompt_tokens, max_new_tokens)
    finished: list[Completion] = []
    num_steps = 0
    while loop.busy:
        finished += loop.step()
        num_steps += 1
    _wait(loop)
    return finished, num_steps


def _loop(
    pair: Pair, policy: Policy, batch_size: int, max_text_tokens: int, graphs: GraphSettings | None
) -> DecodeLoop:
    return DecodeLoop(
        pair.target.model,
        pair.drafter,
        policy,
        batch_size=batch_size,
        max_text_tokens=max_text_tokens,
        eos_ids=(),
        graphs=graphs,
    )


def _submit(
    loop: DecodeLoop, pair: Pair, num_requests: int, prompt_tokens: int, max_new_tokens: int
) -> None:
    for row in range(num_requests):
        ids = tuple(random_tokens(pair, prompt_tokens, seed=row))
        loop.submit(Request(str(row), ids, max_new_tokens))


def _wait(loop: DecodeLoop) -> None:
    """For the device, where there is one."""
    if loop.target.device.type == "cuda":
        torch.cuda.synchronize()
