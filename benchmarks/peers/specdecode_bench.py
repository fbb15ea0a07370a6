"""SpecDecode-Bench's speed-ups of fixed lengths and of its oracle (arXiv:2601.11580).

    python -m benchmarks.peers.specdecode_bench combined_gsm8k.jsonl combined_cnn.jsonl

Reads the published files (`data/` of github.com/SpecDecode-Bench/simulator): a request a line, with
`prompt_token_ids` and, for each drafter, the list `acc_<name>.acc_len`. Entry i is the number of
tokens that a round emits once i + 1 tokens are out, the target's own token counted, as
`simulator.py` reads it. A chain of K tokens accepts the lesser of K and what the list accepted; the
oracle drafts exactly what will be accepted.

The figures are defined as there:

- A request's rate is its tokens over its time. The speed-up is the mean of the requests' rates over
  that of plain decoding; `specctl replay` otherwise gives sums of tokens over sums of time.
- Reading the prompt is part of the time, and the token that it gives is one of the tokens.
- A batch is one request, as often as the batch's size says. Its prompts are read in one forward.
- The oracle pays a draft in every round, also where none of it will be accepted.
- Of more than 300 requests Python's generator draws 300.
- The last token of the text counts as cached.

Left out: n-gram drafters, which the simulator leaves without a draft at random and charges a share
of the verification; adaptive lengths; two drafters combined.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specctl.logs.positions import Floats, Ints, Positions
from specctl.policy import Chain, Policy, RootOnly
from specctl.replay.batch_simulation import prompt_tokens
from specctl.replay.cost.files import load_cost_model
from specctl.replay.cost.model import CostModel, steps_of
from specctl.replay.metrics import LoadClock
from specctl.replay.outcomes import Outcomes
from specctl.replay.rounds import Rounds, walk_outcomes
from specctl.stats import Interval, ratio_of_sums

LENGTHS = (1, 3, 5)
NUM_DRAWN, DRAW_SEED = 300, 42


@dataclass(frozen=True)
class Acceptance:
    """One drafter's accepted draft tokens `[R]` at the positions of the texts."""

    positions: Positions
    accepted: Ints


def read(path: Path, drafter: str) -> Acceptance:
    """The lists of a published file, of the requests that the simulator draws."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    if len(rows) > NUM_DRAWN:
        rows = random.Random(DRAW_SEED).sample(rows, NUM_DRAWN)
    emitted = [np.array(row[f"acc_{drafter}"]["acc_len"], np.int32) for row in rows]
    if any(len(one) < 2 or one.min() < 1 for one in emitted):
        raise SystemExit(f"{path}: a list of {drafter} with fewer than 2 entries, or one below 1")
    sizes = np.array([len(one) - 1 for one in emitted])
    remaining = np.concatenate([np.arange(size, 0, -1) for size in sizes]).astype(np.int32)
    prompts = np.array([len(row["prompt_token_ids"]) for row in rows])
    out = np.concatenate([np.arange(1, size + 1) for size in sizes])
    positions = Positions(
        start=np.append(0, np.cumsum(sizes)),
        prompt=np.arange(len(rows), dtype=np.int32),
        prompt_ids=tuple(map(str, range(len(rows)))),
        category=np.zeros(len(rows), np.int32),
        categories=("",),
        remaining=remaining,
        context_tokens=(np.repeat(prompts, sizes) + out).astype(np.int32),
    )
    accepted = np.concatenate([one[:-1] - 1 for one in emitted])
    return Acceptance(positions, np.minimum(accepted, remaining))


def rounds_of(found: Acceptance, length: int | None) -> Rounds:
    """The rounds of chains of a length, 0 for plain decoding; None for the oracle."""
    drafted = found.accepted if length is None else np.full_like(found.accepted, length)
    outcomes = Outcomes.of(
        np.minimum(found.accepted, drafted), verified=drafted + 1, levels=drafted, wanted=drafted
    )
    longest = int(drafted.max())
    shape = Chain(num_draft_tokens=longest) if longest else RootOnly()
    return walk_outcomes(Policy(shape=shape), found.positions, outcomes, longest + 1)


def tokens_per_s(run: Rounds, model: CostModel, batch_size: int) -> Floats:
    """`[Q]` tokens per second of a batch of copies of each request, reading prompts included."""
    positions, drafts = run.positions, not isinstance(run.policy.shape, RootOnly)
    steps = steps_of(run)
    steps = replace(steps, context_tokens=np.asarray(steps.context_tokens) + 1)
    if drafts:
        steps = replace(steps, levels=np.maximum(steps.levels, 1))
    step_us = LoadClock(model, batch_size).share_us(steps) * batch_size
    prompts = prompt_tokens(positions, np.arange(positions.num_requests))
    rounds_us = np.bincount(run.request, np.broadcast_to(step_us, run.request.shape))
    spent = rounds_us + model.prefill_us(prompts * batch_size, drafts=drafts)
    return np.asarray(1e6 * batch_size * (positions.num_tokens + 1) / spent, np.float64)


def speed_ups(found: Acceptance, model: CostModel, batch_size: int) -> Iterator[Interval]:
    """Of each of `LENGTHS`, then of the oracle, over plain decoding, with intervals by request."""
    plain = tokens_per_s(rounds_of(found, 0), model, batch_size)
    for length in (*LENGTHS, None):
        yield ratio_of_sums(tokens_per_s(rounds_of(found, length), model, batch_size), plain)


def table(
    paths: list[Path], drafter: str, model: CostModel, batch_sizes: list[int]
) -> list[dict[str, Any]]:
    """A row for each file and batch size: speed-ups by name."""
    names = [*(f"fixed {length}" for length in LENGTHS), "oracle"]
    rows = []
    for path in paths:
        found = read(path, drafter)
        for size in batch_sizes:
            of = zip(names, speed_ups(found, model, size), strict=True)
            row = {"file": path.stem, "requests": found.positions.num_requests, "batch": size}
            rows.append(row | {name: one.text(".2f") for name, one in of})
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("files", type=Path, nargs="+", help="published files, JSON lines")
    options.add_argument("--drafter", default="eagle", help="NAME of acc_NAME; default: eagle")
    options.add_argument("--cost-model", type=Path, default=Path("h100-llama-3.1-8b-eagle"))
    options.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 32])
    given = options.parse_args()
    model = load_cost_model(given.cost_model)
    rows = table(given.files, given.drafter, model, given.batch_sizes)
    for row in (rows[0], ["---"] * len(rows[0]), *map(dict.values, rows)):
        print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
