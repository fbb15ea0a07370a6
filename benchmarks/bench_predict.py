"""Predicted against measured wall time of live runs, strategy by strategy, right after profiling.

The cost model is measured first (`specctl profile`'s own code), then every strategy decodes the
same prompts live. Its rounds are recorded in a run that is not timed; the timed runs follow in
rotating order and their median is what the prediction is held against. Nothing of a live run
enters the prediction but counts.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from common import parser, report, requests_of

from specctl.policy import Chain, EntropyBins, Policy, RootOnly, StaticTree
from specctl.replay.config import ProfileGrid
from specctl.replay.cost.live import StepRecorder, predicted_us
from specctl.replay.cost.model import CostModel, Steps
from specctl.replay.cost.probe import Bench
from specctl.replay.cost.profile import profile
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.requests import Metrics, Observer, Request, pooled

REFERENCE = StaticTree(depth=6, top_k=8, num_tokens=48)
STRATEGIES = {
    "ar": Policy(shape=RootOnly()),
    "chain 4": Policy(shape=Chain(num_draft_tokens=4)),
    "eagle2 6-8-48": Policy(shape=REFERENCE),
    "eagle2 4-4-12": Policy(shape=StaticTree(depth=4, top_k=4, num_tokens=12)),
    "hetero": Policy(shape=EntropyBins(base=REFERENCE, edges=(3.0, 4.5, 6.0))),
}
BATCH_SIZES, PROFILED = (1, 4), (1, 2, 4)
"""Requests decoded together, and measured: a batch of 4 ends as one of 3, 2 and 1."""


@dataclass
class Run:
    """One strategy at one batch size: its rounds, and each timed run of it."""

    policy: Policy
    batch_size: int
    steps: Steps
    walls_us: list[float] = field(default_factory=list)


def decode(
    pair: Pair,
    policy: Policy,
    batch_size: int,
    requests: list[Request],
    observer: Observer | None = None,
) -> Metrics:
    """Decodes all requests; their pooled metrics."""
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    loop = DecodeLoop(
        pair.target.model,
        pair.drafter,
        policy,
        batch_size=batch_size,
        max_text_tokens=longest,
        eos_ids=pair.target.eos_ids,
        observer=observer,
        graphs=None,  # the cost model is of the ordinary loop
    )
    return pooled(done.metrics for done in loop.run(requests))


def recorded(pair: Pair, policy: Policy, batch_size: int, requests: list[Request]) -> Run:
    recorder = StepRecorder()
    decode(pair, policy, batch_size, requests, recorder)
    return Run(policy, batch_size, recorder.steps())


def time_runs(pair: Pair, runs: list[Run], requests: list[Request], repeats: int) -> None:
    """Times every run `repeats` times, in rotating order."""
    for number in range(repeats):
        start = number % len(runs)
        for run in runs[start:] + runs[:start]:
            began = time.perf_counter()
            decode(pair, run.policy, run.batch_size, requests)
            if pair.target.model.device.type == "cuda":
                torch.cuda.synchronize()
            run.walls_us.append(1e6 * (time.perf_counter() - began))


def row(name: str, run: Run, model: CostModel, requests: list[Request]) -> dict[str, Any]:
    """Predicted against measured; an error above 0 means that the prediction is too long."""
    drafts = not isinstance(run.policy.shape, RootOnly)
    predicted = predicted_us(model, run.steps, [len(r.prompt_ids) for r in requests], drafts=drafts)
    measured = statistics.median(run.walls_us)
    return {
        "system": f"{name}, batch {run.batch_size}",
        "measured_ms": measured / 1e3,
        "predicted_ms": predicted / 1e3,
        "error": predicted / measured - 1,
        "spread": (max(run.walls_us) - min(run.walls_us)) / measured,
        "rounds": len(run.steps.num_tokens),
    }


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--repeats", type=int, default=5, help="timed runs of a strategy")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    pair = load_pair("embedded", "embedded", device=chosen.device, dtype=chosen.dtype)
    requests = requests_of(pair, chosen)
    began = time.perf_counter()
    model = profile(Bench(pair), ProfileGrid(batch_sizes=PROFILED))
    profile_s = time.perf_counter() - began
    named = [
        (n, recorded(pair, p, b, requests)) for b in BATCH_SIZES for n, p in STRATEGIES.items()
    ]
    time_runs(pair, [run for _, run in named], requests, chosen.repeats)
    rows = [row(name, run, model, requests) for name, run in named]
    worst = max(rows, key=lambda r: abs(r["error"]))
    note = (
        f"embedded pair, {chosen.dtype}, {chosen.device}, {chosen.threads} threads, "
        f"{len(requests)} prompts, {chosen.max_new_tokens} new tokens, {chosen.repeats} runs each; "
        f"profile {profile_s:.0f} s, held-out MAPE {model.held_out_text}; "
        f"load {os.getloadavg()[0]:.2f}; worst {worst['error']:+.1%} ({worst['system']})"
    )
    report("predict", rows, chosen, note)


if __name__ == "__main__":
    main()
