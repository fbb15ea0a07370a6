"""What Ray costs a collection, and what a second worker gives: the same prompts, in turns.

    python benchmarks/bench_ray.py        # the embedded pair, 25 minutes on 2 busy cores

Every turn collects them in this process, by one Ray worker and by two. `wall_s` is from the first
batch to the last segment, without loading. This process is warm after its first turn; workers start
anew in each, so what a process does for the first time counts in theirs.

Prediction: a worker does what one process does, with a segment a batch in the place of one every
30 s. Two workers on two idle cores: 1.9 times the prompts.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import parser, report

from specctl.collect.config import CollectConfig
from specctl.collect.prompts import Prompt, load_prompts
from specctl.collect.workers import Driver, Work, cluster
from specctl.runtime.config import DecodingConfig
from specctl.runtime.words import resolve_policy


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--turns", type=int, default=4, help="of one process, one worker and two")
    options.set_defaults(num_prompts=96, max_new_tokens=32)
    given = options.parse_args()
    models = DecodingConfig(threads=given.threads, max_new_tokens=given.max_new_tokens)
    prompts = load_prompts(given.prompts, limit=given.num_prompts)
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("dense", "eagle2"):
            dense: dict[str, Any] = {"dense": True, "depth": 5, "children": 4}
            policy = None if kind == "dense" else resolve_policy(kind)
            alone = None
            for turn in range(given.turns):
                for number in (0, 1, 2):
                    settings = CollectConfig(**({} if policy else dense), workers=number or None)
                    out = Path(folder, f"{kind}-{turn}-{number}")
                    work = Work(settings, models, str(out), policy)
                    if number:
                        row = by_workers(number, work, prompts)
                    else:
                        alone = alone or work.decoder(models.load_pair())
                        row = by_this_process(work, alone, prompts)
                    row |= {"load": os.getloadavg()[0]}
                    print(kind, turn, number, row, file=sys.stderr, flush=True)
                    found.setdefault((kind, number), []).append(row)
    rows = [summed(kind, number, found, len(prompts)) for kind, number in found]
    note = (
        f"{len(prompts)} prompts, {given.turns} turns, medians; load: of the whole machine, 1 "
        "minute, lowest and highest"
    )
    report("ray", rows, given, note)


def by_this_process(work: Work, decoder: Any, prompts: Sequence[Prompt]) -> dict[str, float]:
    begun = time.perf_counter()
    work.collect(decoder, prompts)
    return {"wall_s": time.perf_counter() - begun, "loading_s": 0.0}


def by_workers(number: int, work: Work, prompts: Sequence[Prompt]) -> dict[str, float]:
    begun = time.perf_counter()
    with cluster(number, None, threads=1, gpus=0, device="cpu") as found:
        driver = Driver(found, work)
        driver.load()
        summary, _ = driver.plan(prompts, None)
        loaded = time.perf_counter()
        driver.collect(prompts, None, summary)
        ended = time.perf_counter()
        driver.close()
    return {"wall_s": ended - loaded, "loading_s": loaded - begun}


def summed(
    kind: str, number: int, found: dict[tuple[str, int], list[dict[str, float]]], num_prompts: int
) -> dict[str, Any]:
    """A row: medians over the turns, and of the ratio to one process in the same turn."""
    turns, alone = found[kind, number], found[kind, 0]
    speed_ups = [one["wall_s"] / row["wall_s"] for row, one in zip(turns, alone, strict=True)]
    loads = [row["load"] for row in turns]
    return {
        "collects": kind,
        "by": f"{number} by Ray" if number else "one process",
        "prompts_per_s": num_prompts / median(row["wall_s"] for row in turns),
        "speed_up": median(speed_ups),
        "loading_s": median(row["loading_s"] for row in turns),
        "load": f"{min(loads):.1f} to {max(loads):.1f}",
    }


if __name__ == "__main__":
    main()
