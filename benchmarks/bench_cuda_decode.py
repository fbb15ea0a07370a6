"""The decode loop at the shape of Llama-3.1-8B with an EAGLE-3 head: eager beside graphs.

    python benchmarks/bench_cuda_decode.py            # on a GPU, within --budget-s
    python benchmarks/bench_cuda_decode.py --small    # to its end on any machine

Weights are random and built on the device (`decode_8b.pair`): the latency is that of the shapes,
the text means nothing, and a round emits about one token. Every row is a policy at a batch size and
a context, by the ordinary loop and by graphs in turn.

All rows are timed first, then split by the profiler, graphs before eager, those that count most
first: batch 1, 8 and 32 behind 1,024 tokens, then plain decoding and EAGLE-2 behind 4,096. None is
begun that would not end within the budget if it took as long as the last one of its kind;
the table says what was left out. The JSON is written after every row.

Needs torch, transformers, numpy, pydantic and, on CUDA, Triton.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from decode_8b.measuring import Counts, Job, Row, profiled, timed
from decode_8b.pair import SIZES, Size, random_pair
from decode_8b.policies import policies
from decode_8b.running import Cell
from kernels.timing import machine, print_table

from specctl.runtime.load import Pair

CELLS = (Cell(1, 1024), Cell(8, 1024), Cell(32, 1024))
LONG = Cell(1, 4096)
LONG_POLICIES = ("ar", "eagle2")
SMALL_CELLS, SMALL_LONG = (Cell(1, 32), Cell(2, 32)), Cell(1, 64)
SMALL_COUNTS = Counts(warm=1, timed=4, lapped=2, learned=1, profiled=2)
BUDGET_S = 150.0
TIMES = ["policy", "batch", "context", "mode", "round_us", "min_us", "max_us", "drafting_us"]
WORK = ["verified", "levels", "emitted", "captures", "late_captures", "eager_rounds", "skipped"]
SPLIT = ["draft_us", "policy_us", "verify_us", "commit_us", "gaps_us", "policy_share"]
SPLIT += ["features_us", "deciding_us", "trees_us", "books_us", "by_graph_us", "kernels", "waits"]


@dataclass
class Budget:
    """Seconds that everything may take together.

    Attributes:
        last: seconds of the last work of each kind; the first one compiles, and says too much.
    """

    seconds: float
    began: float = field(default_factory=time.perf_counter)
    last: dict[str, float] = field(default_factory=dict)

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.began

    def run(self, kind: str, work: Callable[[], Row]) -> Row:
        """What the work found, or why it was not begun."""
        if self.spent + self.last.get(kind, 0.0) > self.seconds:
            return {"skipped": f"{kind}: {self.spent:.0f} s were spent"}
        began, is_first = self.spent, kind not in self.last
        found = work()
        self.last[kind] = 0.0 if is_first else self.spent - began
        return found


def jobs(cells: tuple[Cell, ...], long: Cell, wanted: list[str]) -> list[Job]:
    """All rows, those first that count most."""
    return [
        Job(name, policy, cell, mode)
        for cell in (*cells, long)
        for name, policy in policies(cell.batch_size).items()
        if not wanted or name.startswith(tuple(wanted))
        if cell != long or name.startswith(LONG_POLICIES)
        for mode in ("eager", "graphs")
    ]


def measure(
    todo: list[Job],
    pair: Pair,
    counts: Counts,
    budget: Budget,
    keep: Callable[[list[Row]], None],
) -> None:
    """A row for every job, times, then splits; `keep` takes all rows whenever one has changed."""
    rows: list[Row] = []
    for job in todo:
        found = budget.run(f"timing, {job.mode}", lambda job=job: timed(job, pair, counts))
        rows.append(job.label | found)
        say(rows[-1], "round_us")
        keep(rows)
    order = sorted(range(len(todo)), key=lambda place: todo[place].mode == "eager")
    for job, row in ((todo[place], rows[place]) for place in order):
        if "round_us" not in row:
            continue
        us = row["round_us"]
        row |= budget.run(
            f"split, {job.mode}", lambda job=job, us=us: profiled(job, pair, counts, us)
        )
        say(row, "policy_us")
        keep(rows)


def say(row: Row, name: str) -> None:
    """One line as soon as something is known, for whoever waits."""
    what = f"{name} {row[name]:.0f}" if name in row else row["skipped"]
    print(f"{row['policy']}, batch {row['batch']} x {row['context']}, {row['mode']}: {what}")


def main() -> None:
    given = _options()
    device, budget = torch.device(given.device), Budget(given.budget_s)
    torch.set_num_threads(given.threads)
    size = SIZES[given.shape or ("tiny" if given.small or device.type == "cpu" else "8b")]
    cells, long, counts = (
        (SMALL_CELLS, SMALL_LONG, SMALL_COUNTS) if given.small else (CELLS, LONG, Counts())
    )
    found: dict[str, Any] = {
        "machine": machine(device) | {"transformers": transformers.__version__},
        "settings": {name: str(value) for name, value in vars(given).items() if name != "out"},
        "shape": {name: str(value) for name, value in vars(size).items()},
    }

    def keep(rows: list[Row]) -> None:
        found.update(note=note(size, counts, budget), rows=rows)
        if given.out is not None:
            given.out.mkdir(parents=True, exist_ok=True)
            path = given.out / f"cuda_decode-{device.type}.json"
            path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", "utf-8")

    todo = jobs(cells, long, given.policies)
    measure(todo, random_pair(size, device), counts, budget, keep)
    show(found)


def note(size: Size, counts: Counts, budget: Budget) -> str:
    """What the figures are of."""
    return (
        f"{size.name} shape, random weights: latency alone, the text means nothing and about one "
        f"token is emitted a round; greedy; medians of {counts.timed} rounds timed, "
        f"{counts.lapped} lapped, means of {counts.profiled} profiled; {budget.spent:.0f} s in all"
    )


def show(found: dict[str, Any]) -> None:
    """The tables of times and splits."""
    rows = found["rows"]
    print(f"\n{found['note']}")
    for names in (TIMES + WORK, TIMES[:5] + SPLIT):
        print()
        print_table([{name: row.get(name, "") for name in names} for row in rows])


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--shape", choices=tuple(SIZES), help="8b on CUDA, else tiny")
    options.add_argument("--small", action="store_true", help="tiny, and few rounds")
    options.add_argument("--policies", nargs="+", default=[], help="first words of their names")
    options.add_argument("--budget-s", type=float, default=BUDGET_S, help="nothing begun beyond it")
    options.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    options.add_argument("--out", type=Path, help="folder for the JSON")
    return options.parse_args()


if __name__ == "__main__":
    main()
