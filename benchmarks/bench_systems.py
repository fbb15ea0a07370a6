"""The five systems beside the strong controls, on one dense log, held-out prompts, paired.

Fits on one half of the prompts, chooses settings there, measures on the other half. Without
`--traces` the packaged prompts are collected first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import common
import torch
from systems.bench import SEED, SHARE, Bench
from systems.choosing import Found
from systems.curves import Paired, figure
from systems.loads import budget_rows, composition_rows
from systems.roster import Roster, roster
from systems.shapes_table import equal_depth_rows, learned, system_rows
from systems.speed import speed_rows
from systems.tables import PARTS, write_csv
from systems.targets import target_rows

from specctl.replay.cost.files import load_cost_model
from specctl.stats import Interval

DOCS = Path(__file__).parents[1] / "docs"
COST_MODEL = common.RESULTS / "ladder-cost-model-cpu.json"
Row = dict[str, Any]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--traces", nargs="+", type=Path, help="dense folders of one pair")
    options.add_argument("--cost-model", type=Path, default=COST_MODEL, help="of that pair")
    options.add_argument("--work", type=Path, help="keep fits and sums here; empty after changes")
    options.add_argument("--no-fits", action="store_true", help="use the fits in --work alone")
    options.add_argument("--threads", type=int, default=1, help="chunks of the log at a time")
    options.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="of the table")
    options.add_argument("--out", type=Path, default=DOCS, help="folder for JSON and CSV")
    given = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        work = given.work or Path(folder)
        traces = given.traces or [collected(work)]
        clocks = {"measured": load_cost_model(given.cost_model)}
        bench = Bench.open(traces, clocks, given.threads, work / "sums")
        result = measure(bench, roster(traces, work, may_fit=not given.no_fits), given.parts)
    result["settings"] = {name: str(value) for name, value in vars(given).items()}
    result = write_json(given.out / "systems.json", result)
    write_csv(given.out / "systems.csv", result)


def collected(work: Path) -> Path:
    """Dense traces of the packaged prompts."""
    folder = work / "traces"
    specctl = Path(sys.executable).with_name("specctl")
    command = [specctl, "collect", "embedded", "-o", folder, "--dense", "--resume"]
    subprocess.run([*command, "--max-new-tokens", "64"], check=True)
    return folder


def measure(bench: Bench, who: Roster, parts: Iterable[str]) -> dict[str, Any]:
    """All parts of the table that were asked for; the others are empty."""
    found, paired = Found(bench), Paired.of(len(bench.held_out), SEED)
    makers: dict[str, Callable[[], Iterable[Row]]] = {
        "shapes": lambda: equal_depth_rows(found, learned(who), paired),
        "systems": lambda: system_rows(found, who, paired),
        "budgets": lambda: budget_rows(bench, found, who, paired),
        "compositions": lambda: composition_rows(bench, found, who, paired),
        "speed": lambda: speed_rows(bench, who, paired),
    }
    rows = {name: timed(name, makers[name]) if name in parts else [] for name in PARTS}
    order = ("shapes", "systems", "budgets", "compositions", "speed")  # of `target_rows`
    return {
        "machine": common.machine("cpu"),
        "data": facts(bench, found),
        "absent": who.absent,
        **rows,
        "targets": list(target_rows(*(rows[name] for name in order))),
    }


def timed(name: str, rows: Callable[[], Iterable[Row]]) -> list[Row]:
    start = time.perf_counter()
    made = list(rows())
    print(f"{name}: {len(made)} rows in {time.perf_counter() - start:.0f} s", flush=True)
    return made


def facts(bench: Bench, found: Found) -> dict[str, Any]:
    """What the figures are of."""
    headers, eagle2 = bench.traces.headers, found.eagle2()
    return {
        "trace_digest": bench.log.digest,
        "clocks": {name: clock.digest for name, clock in bench.clocks.items()},
        "cost_device": bench.clocks["measured"].machine.device,
        "cost_measured": str(bench.clocks["measured"].measured)[:10],
        "num_folders": len(headers),
        "num_train": len(bench.train),
        "num_held_out": len(bench.held_out),
        "num_tokens": int(figure(eagle2.pooled, "tokens")[0]),
        "num_categories": len(bench.categories()),
        "categories": bench.categories(),
        "held_out_frac": SHARE,
        "seed": SEED,
    }


def write_json(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Writes the result; gives it as the file has it."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def plain(value: Any) -> Any:
        return value.to_json() if isinstance(value, Interval) else str(value)

    text = json.dumps(result, indent=1, ensure_ascii=False, default=plain).replace("NaN", "null")
    path.write_text(text + "\n", "utf-8")
    print(f"wrote {path}")
    written: dict[str, Any] = json.loads(text)
    return written


if __name__ == "__main__":
    main()
