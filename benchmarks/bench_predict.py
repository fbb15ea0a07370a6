"""Predicted against measured wall time of live runs, strategy by strategy, right after profiling.

The cost model is measured first, then every strategy decodes the same prompts live, both by
`specctl profile`'s own code, here also in batches. Nothing of a live run enters the prediction but
counts.
"""

from __future__ import annotations

import os
import time

import torch
from common import parser, report, requests_of

from specctl.policy import Chain, EntropyBins, Policy, RootOnly, StaticTree
from specctl.replay.config import ProfileGrid
from specctl.replay.cost.live import check_live
from specctl.replay.cost.probe import Bench
from specctl.replay.cost.profile import profile
from specctl.runtime.load import load_pair

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


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--repeats", type=int, default=5, help="timed runs of a strategy")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    pair = load_pair("embedded", "embedded", device=chosen.device, dtype=chosen.dtype)
    bench, requests = Bench(pair), requests_of(pair, chosen)
    began = time.perf_counter()
    model = profile(bench, ProfileGrid(batch_sizes=PROFILED))
    profile_s = time.perf_counter() - began
    policies, rows = list(STRATEGIES.values()), []
    for batch_size in BATCH_SIZES:
        checks = check_live(bench, model, requests, policies, chosen.repeats, batch_size)
        rows += [
            {
                "system": f"{name}, batch {batch_size}",
                "measured_ms": check.measured_us / 1e3,
                "predicted_ms": check.predicted_us / 1e3,
                "error": check.predicted_us / check.measured_us - 1,
                "waited": check.waited,
            }
            for name, check in zip(STRATEGIES, checks, strict=True)
        ]
    worst = max(rows, key=lambda row: abs(row["error"]))
    note = (
        f"embedded pair, {chosen.dtype}, {chosen.device}, {chosen.threads} threads, "
        f"{len(requests)} prompts, {chosen.max_new_tokens} new tokens, {chosen.repeats} runs each; "
        f"profile {profile_s:.0f} s, held-out MAPE {model.held_out_text}; "
        f"load {os.getloadavg()[0]:.2f}; worst {worst['error']:+.1%} ({worst['system']})"
    )
    report("predict", rows, chosen, note)


if __name__ == "__main__":
    main()
