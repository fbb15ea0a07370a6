"""What Ray costs a collection, and what a second worker gives: the same prompts, in turns.

    python benchmarks/bench_ray.py        # the embedded pair, 25 minutes on 2 busy cores

Every turn collects them in this process, by one Ray worker and by two. `wall_s` is from the first
batch to the last segment, without loading; `cpu_ms` is the processor time of a prompt where it is
collected, which a busy machine changes least. This process is warm after its first turn; workers
start anew in each, so what a process does for the first time counts in theirs.

Prediction: a worker does what one process does, with a batch every 15 s in the place of a segment
every 30 s: 1 to 3 % more processor time. Two workers on two idle cores: 1.9 times the prompts.
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

from specctl.collect import workers
from specctl.collect.config import CollectConfig
from specctl.collect.prompts import Prompt, load_prompts
from specctl.collect.tokens import KEEP
from specctl.collect.workers import Crew, Work
from specctl.ray_cluster import cluster
from specctl.runtime.config import DecodingConfig
from specctl.runtime.policy_spec import resolve_policy


class Worker(workers.Worker):
    """Gives seconds of processor time, of all its threads, in the place of those of a clock."""

    def collect(self, *given: Any) -> tuple[workers.Summary, float]:
        begun = time.process_time()
        return super().collect(*given)[0], time.process_time() - begun


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--turns", type=int, default=4, help="of one process, one worker and two")
    options.set_defaults(num_prompts=96, max_new_tokens=32)
    given = options.parse_args()
    workers.Worker = Worker  # type: ignore[misc]
    models = DecodingConfig(threads=given.threads, max_new_tokens=given.max_new_tokens)
    prompts = load_prompts(given.prompts, limit=given.num_prompts)
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster(2, None, threads=given.threads, gpus=0, device="cpu") as ray,
    ):
        for kind in ("dense", "eagle2"):
            dense: dict[str, Any] = {"dense": True, "depth": 5, "children": 4}
            policy = None if kind == "dense" else resolve_policy(kind)
            alone = None
            for turn in range(given.turns):
                for number in (0, 1, 2):
                    settings = CollectConfig(**({} if policy else dense), workers=number or None)
                    out = Path(folder, f"{kind}-{turn}-{number}")
                    work = Work(settings, models, str(out), KEEP, policy)
                    if number:
                        row = by_workers(Crew(ray, work, prompts, None, print_none, print))
                    else:
                        alone = alone or work.decoder(models.load_pair())
                        row = by_this_process(work, alone, prompts)
                    row |= {"load": os.getloadavg()[0]}
                    print(kind, turn, number, row, file=sys.stderr, flush=True)
                    found.setdefault((kind, number), []).append(row)
    rows = [summed(kind, number, found, len(prompts)) for kind, number in found]
    note = (
        f"{len(prompts)} prompts, {given.turns} turns, medians; batches of {workers.BATCH_S:g} s; "
        "load: of the whole machine, 1 minute, lowest and highest"
    )
    report("ray", rows, given, note)


def print_none(_: int) -> None:
    """No progress bar."""


def by_this_process(work: Work, decoder: Any, prompts: Sequence[Prompt]) -> dict[str, float]:
    begun, cpu = time.perf_counter(), time.process_time()
    work.collect(decoder, prompts)
    cpu_s = time.process_time() - cpu
    return {"wall_s": time.perf_counter() - begun, "cpu_s": cpu_s, "loading_s": 0.0}


def by_workers(crew: Crew) -> dict[str, float]:
    found = crew.run()
    cpu_s = sum(hand.seconds for hand in found.hands)
    return {
        "wall_s": found.seconds - found.loading_s,
        "cpu_s": cpu_s,
        "loading_s": found.loading_s,
    }


def summed(
    kind: str, number: int, found: dict[tuple[str, int], list[dict[str, float]]], num_prompts: int
) -> dict[str, Any]:
    """A row: medians over the turns, and of the ratio to one process in the same turn."""
    turns, alone = found[kind, number], found[kind, 0]
    speed_ups = [one["wall_s"] / row["wall_s"] for row, one in zip(turns, alone, strict=True)]
    costs = [row["cpu_s"] / one["cpu_s"] for row, one in zip(turns, alone, strict=True)]
    loads = [row["load"] for row in turns]
    return {
        "collects": kind,
        "by": f"{number} by Ray" if number else "one process",
        "prompts_per_s": num_prompts / median(row["wall_s"] for row in turns),
        "speed_up": median(speed_ups),
        "cpu_ms": 1e3 * median(row["cpu_s"] for row in turns) / num_prompts,
        "cpu_ratio": median(costs),
        "loading_s": median(row["loading_s"] for row in turns),
        "load": f"{min(loads):.1f} to {max(loads):.1f}",
    }


if __name__ == "__main__":
    main()
