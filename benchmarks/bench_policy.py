"""What deciding costs, round by round, beside the drafter's forwards of the same rounds.

Every policy decodes the same prompts live. Its own calls (`begin`, `grow`, `select`, the budget's
`share`) and the drafter's forwards (`begin_round`, `expand`, `extend`) are timed inside the loop
with the thread's CPU clock, which other processes of the machine do not stretch; figures are
medians over rounds. Scorers have the sizes of fitted ones and say about what the drafter says, so
that trees are of ordinary size; what they say costs nothing. `own` is what the policy adds to
EAGLE-2's own choice of nodes.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from common import parser, report, requests_of
from decode_8b.policies import FEATURES, network

from specctl.policy import (
    EntropyBins,
    FfnScorer,
    JointThreshold,
    Policy,
    ScoredTree,
    SparseGates,
    StaticTree,
    TreesScorer,
)
from specctl.policy.scorers import build_log_odds
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.requests import Request
from specctl.runtime.runnable import Decisions

REFERENCE = StaticTree(depth=6, top_k=8, num_tokens=48)
NUM_TREES, NUM_LEAVES = 100, 31
NUM_NODES = 1000
DECIDING, DRAFTING = ("begin", "grow", "select", "share"), ("begin_round", "expand", "extend")


def trees() -> TreesScorer:
    """100 trees of 31 leaves, as LightGBM grows them by default; a first one bears the score."""
    draws = np.random.default_rng(0)
    rows: list[list[float]] = []
    roots = []
    for number in range(NUM_TREES):
        roots.append(len(rows))
        rows.append([-1, 0, -1, -1, 0])
        leaves = [(roots[-1], -20.0, 0.0)]
        while len(leaves) < NUM_LEAVES:
            place, low, high = leaves.pop(0)
            cut = (low + high) / 2
            size = 1.5 if number == 0 else 0.0
            rows[place] = [
                0 if number == 0 else draws.integers(3),
                cut,
                len(rows),
                len(rows) + 1,
                0,
            ]
            leaves += [(len(rows), low, cut), (len(rows) + 1, cut, high)]
            middle = [size * (a + b) / 2 + 1 for a, b in ((low, cut), (cut, high))]
            rows += [[-1, 0, -1, -1, value if number == 0 else 0.0] for value in middle]
    whole = [[int(row[i]) for row in rows] for i in (0, 2, 3)]
    return TreesScorer(
        features=FEATURES,
        roots=tuple(roots),
        feature=tuple(whole[0]),
        threshold=tuple(row[1] for row in rows),
        left=tuple(whole[1]),
        right=tuple(whole[2]),
        value=tuple(row[4] for row in rows),
    )


def scored(scorer: FfnScorer | TreesScorer) -> Policy:
    return Policy(shape=ScoredTree(scorer=scorer, beta=0.1, depth=6, first_top_k=8, second_top_k=8))


NETWORK = network(-13.5)
"""Of 48 hidden units."""
POLICIES = {
    "eagle2 6-8-48": Policy(shape=REFERENCE),
    "hetero, 8 bins": Policy(
        shape=EntropyBins(base=REFERENCE, edges=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0))
    ),
    "threshold": Policy(shape=JointThreshold(depth=6, top_k=8, min_prob=0.05)),
    "c2t, FFN of 48": scored(NETWORK),
    "echo, 2 gates": Policy(
        shape=SparseGates(depth=6, width=8, max_width=8, gate_levels=(1, 3), thresholds=(0.2, 0.05))
    ),
    "c2t, 100 trees": scored(trees()),
}


@dataclass
class Timed:
    """Forwards all to `inner`, and books the thread's time in some of its methods."""

    inner: Any
    methods: tuple[str, ...]
    spent_us: dict[str, float]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return self._timed(name, found) if name in self.methods else found

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            result = method(*args, **kwargs)
            spent = (time.thread_time_ns() - began) / 1e3
            self.spent_us[name] = self.spent_us.get(name, 0.0) + spent
            return result

        return call


@dataclass
class RoundTimes:
    """Microseconds of every round."""

    policy_us: list[float] = field(default_factory=list)
    draft_us: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)


def timed_rounds(
    pair: Pair,
    policy: Policy,
    requests: list[Request],
    batch_size: int,
    decisions: Decisions = "torch",
) -> RoundTimes:
    """Decodes the prompts in the ordinary loop, timing every round."""
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    found, spent = RoundTimes(), {}

    class Rounds:
        def on_round(self, record: Any) -> None:
            found.num_tokens.append(int((record.submitted >= 0).sum()))

    loop = DecodeLoop(
        pair.target.model,
        pair.drafter,
        policy,
        batch_size=batch_size,
        max_text_tokens=longest,
        eos_ids=pair.target.eos_ids,
        observer=Rounds(),
        decisions=decisions,
        graphs=None,
    )
    part = loop.round
    shape, budget = (Timed(r, DECIDING, spent) for r in (part.rules.shape, part.rules.budget))
    part.rules = replace(part.rules, shape=shape, budget=budget)
    part.drafter = Timed(part.drafter, DRAFTING, spent)
    for request in requests:
        loop.submit(request)
    while loop.busy:
        before, rounds = dict(spent), len(found.num_tokens)
        loop.step()
        if len(found.num_tokens) > rounds:
            taken = {name: spent[name] - before.get(name, 0.0) for name in spent}
            found.policy_us.append(sum(taken.get(name, 0.0) for name in DECIDING))
            found.draft_us.append(sum(taken.get(name, 0.0) for name in DRAFTING))
    return found


def row(name: str, times: RoundTimes, reference: RoundTimes) -> dict[str, Any]:
    policy, draft = statistics.median(times.policy_us), statistics.median(times.draft_us)
    shares = [p / d for p, d in zip(times.policy_us, times.draft_us, strict=True)]
    own = policy - statistics.median(reference.policy_us)
    return {
        "system": name,
        "rounds": len(times.policy_us),
        "mean_verified": statistics.mean(times.num_tokens),
        "policy_us": policy,
        "draft_us": draft,
        "share": statistics.median(shares),
        "own_us": own,
        "own_share": own / draft,
    }


def scorer_us(scorer: FfnScorer | TreesScorer, repeats: int = 200) -> float:
    """Median microseconds of scoring 1000 nodes."""
    log_odds, x = build_log_odds(scorer), -5 * torch.rand(NUM_NODES, len(FEATURES))
    taken = []
    with torch.inference_mode():
        for _ in range(repeats):
            began = time.thread_time_ns()
            log_odds(x)
            taken.append((time.thread_time_ns() - began) / 1e3)
    return statistics.median(taken)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--batch-size", type=int, default=1, help="prompts decoded together")
    options.add_argument("--repeats", type=int, default=3, help="runs of every policy")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    pair = load_pair("embedded", "embedded", device=chosen.device, dtype=chosen.dtype)
    requests = requests_of(pair, chosen)
    times = {name: RoundTimes() for name in POLICIES}
    for _ in range(chosen.repeats):
        for name, policy in POLICIES.items():
            found = timed_rounds(pair, policy, requests, chosen.batch_size)
            for column in ("policy_us", "draft_us", "num_tokens"):
                getattr(times[name], column).extend(getattr(found, column))
    rows = [row(name, found, times["eagle2 6-8-48"]) for name, found in times.items()]
    note = (
        f"embedded pair, {chosen.dtype}, {chosen.device}, {chosen.threads} thread, batch "
        f"{chosen.batch_size}, {len(requests)} prompts, {chosen.max_new_tokens} new tokens, "
        f"{chosen.repeats} runs each, thread CPU time, load {os.getloadavg()[0]:.1f}; "
        f"1000 nodes: FFN of 48 {scorer_us(NETWORK):.0f} us, "
        f"100 trees of 31 leaves {scorer_us(trees()):.0f} us"
    )
    report("policy", rows, chosen, note)


if __name__ == "__main__":
    main()
