"""What decisions cost by onnxruntime, beside the torch rule: one alone, and those of a round.

`alone_us`: the scores of a level of 64 nodes for each of the batch, median over calls.
`policy_us`: all that the policy does in a live round, as `bench_policy.py` measures it. Thread CPU
time, both backends in turn in one run.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_policy import POLICIES, RoundTimes, timed_rounds
from common import parser, report, requests_of
from torch import Tensor

from specctl.features import DraftPool
from specctl.policy import Policy, ScoredTree, build_shape
from specctl.runtime.load import load_pair
from specctl.runtime.runnable import Decisions
from specctl.runtime.twins import by_twin
from specctl.tree import TokenTree

BACKENDS: tuple[Decisions, ...] = ("torch", "onnx")
ASKED = {name: policy for name, policy in POLICIES.items() if isinstance(policy.shape, ScoredTree)}
NODES = 64
"""Of a level: eight children of eight parents."""


def level_of(batch_size: int) -> DraftPool:
    """A root and one level below it, as a drafter might score them."""
    size = (batch_size, 1 + NODES)
    logp = -5 * torch.rand(size, generator=torch.Generator().manual_seed(0))
    logp[:, 0] = 0.0
    depth = torch.ones(size, dtype=torch.int64)
    depth[:, 0] = 0
    tree = TokenTree(depth, depth - 1, depth, logp)
    return DraftPool(tree, logp, -logp, -logp, depth, depth > 0)


def decision(policy: Policy, decisions: Decisions, batch_size: int) -> Callable[[], Tensor]:
    """One decision of the policy."""
    place, pool = torch.device("cpu"), level_of(batch_size)
    rule: Any = build_shape(policy.shape)
    if decisions == "onnx":
        rule = by_twin(policy.shape, rule, place)
    return lambda: rule.score(pool, 1)


@torch.inference_mode()
def alone_us(decide: Callable[[], Tensor], calls: int) -> float:
    taken = []
    for _ in range(calls):
        began = time.thread_time_ns()
        decide()
        taken.append((time.thread_time_ns() - began) / 1e3)
    return statistics.median(taken)


def row(name: str, decisions: Decisions, alone: float, times: RoundTimes) -> dict[str, Any]:
    policy, draft = statistics.median(times.policy_us), statistics.median(times.draft_us)
    return {
        "system": f"{name}, {decisions}",
        "alone_us": alone,
        "rounds": len(times.policy_us),
        "policy_us": policy,
        "draft_us": draft,
        "share": policy / draft,
    }


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--batch-size", type=int, default=1, help="prompts decoded together")
    options.add_argument("--repeats", type=int, default=3, help="runs of every policy")
    options.add_argument("--calls", type=int, default=3000, help="decisions alone")
    chosen = options.parse_args()
    if chosen.device != "cpu":
        options.error("--device cpu only: what is measured is a CPU's time")
    torch.set_num_threads(chosen.threads)
    pair = load_pair("embedded", "embedded", device="cpu", dtype=chosen.dtype)
    requests = requests_of(pair, chosen)
    cases = [(name, decisions) for name in ASKED for decisions in BACKENDS]
    times = {case: RoundTimes() for case in cases}
    for _ in range(chosen.repeats):
        for name, by in cases:
            found = timed_rounds(pair, ASKED[name], requests, chosen.batch_size, by)
            for column, values in vars(times[name, by]).items():
                values.extend(getattr(found, column))
    rows = []
    for name, by in cases:
        alone = alone_us(decision(ASKED[name], by, chosen.batch_size), chosen.calls)
        rows.append(row(name, by, alone, times[name, by]))
    note = (
        f"embedded pair, {chosen.dtype}, cpu, {chosen.threads} thread, batch {chosen.batch_size}, "
        f"{len(requests)} prompts, {chosen.max_new_tokens} new tokens, {chosen.repeats} runs each, "
        f"thread CPU time, load {os.getloadavg()[0]:.1f}"
    )
    report("decisions", rows, chosen, note)


if __name__ == "__main__":
    main()
