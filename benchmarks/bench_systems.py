"""The five systems beside the strong controls, on one dense log, held-out prompts, paired.

Fits on one half of the prompts, five times, chooses settings there, measures on the other half, and
writes docs/systems.md, .csv and .json. Without `--traces` the packaged prompts are collected first;
with `--parts` and nothing behind it the page is written again from systems.json.
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
from systems.fits import SEEDS, TrainingHalf, fitted
from systems.loads import budget_rows
from systems.long_texts import long_rows
from systems.page import write_page
from systems.papers import EAGLE3, paper_rows, policy_of
from systems.roster import Roster
from systems.shapes import equal_depth_rows
from systems.speed import speed_rows
from systems.tables import PARTS, write_csv

from specctl.replay.cost.files import load_cost_model
from specctl.stats import Interval

DOCS = Path(__file__).parents[1] / "docs"
COST_MODEL = common.RESULTS / "ladder-cost-model-cpu.json"
Row = dict[str, Any]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--traces", nargs="+", type=Path, help="dense folders of one pair")
    options.add_argument("--long", type=Path, help="dense traces of chains, of 512 tokens or more")
    options.add_argument("--cost-model", type=Path, default=COST_MODEL, help="of that pair")
    options.add_argument("--work", type=Path, help="keep fits and sums here; empty after changes")
    options.add_argument("--no-fits", action="store_true", help="use the fits in --work alone")
    options.add_argument("--threads", type=int, default=1, help="chunks of the log at a time")
    options.add_argument(
        "--parts", nargs="*", default=PARTS, choices=PARTS, help="to measure; others stay"
    )
    options.add_argument("--out", type=Path, default=DOCS, help="folder for JSON, CSV and page")
    given = options.parse_args()
    torch.set_num_threads(1)
    if given.parts:
        with tempfile.TemporaryDirectory() as folder:
            measured(given, given.work or Path(folder))
    result = json.loads((given.out / "systems.json").read_text("utf-8"))
    write_csv(given.out / "systems.csv", result)
    write_page(given.out / "systems.md", result, common.RESULTS)


def measured(given: argparse.Namespace, work: Path) -> None:
    """Measures the parts that were asked for, each written as it is done."""
    traces = given.traces or [collected(work)]
    clocks = {"measured": load_cost_model(given.cost_model)}
    bench = Bench.open(traces, clocks, given.threads, work / "sums")
    half = TrainingHalf(bench.traces, bench.log.only(bench.train), bench.train)
    who = Roster(fitted(half, work, may_fit=not given.no_fits))
    path = given.out / "systems.json"
    before = json.loads(path.read_text("utf-8")) if path.exists() else {}
    settings = {name: common.named(value) for name, value in vars(given).items()}
    found, paired = Found(bench), Paired.of(len(bench.held_out), SEED)
    result = {
        "machine": common.machine("cpu"),
        "settings": settings,
        "data": facts(bench, found),
        **{part: before.get(part, []) for part in PARTS},
    }
    for part in given.parts:
        result[part] = timed(part, makers(bench, found, who, paired, given.long)[part])
        write_json(path, result)


def collected(work: Path) -> Path:
    """Dense traces of the packaged prompts."""
    folder = work / "traces"
    specctl = Path(sys.executable).with_name("specctl")
    command = [specctl, "collect", "embedded", "-o", folder, "--dense", "--resume"]
    subprocess.run([*command, "--max-new-tokens", "64"], check=True)
    return folder


def makers(
    bench: Bench, found: Found, who: Roster, paired: Paired, long: Path | None
) -> dict[str, Callable[[], Iterable[Row]]]:
    """What measures each part."""
    return {
        "papers": lambda: paper_rows(found, who, paired),
        "shapes": lambda: equal_depth_rows(found, who, paired),
        "speed": lambda: speed_rows(bench, who, paired),
        "budgets": lambda: budget_rows(bench, found, paired),
        "long": lambda: long_rows(long) if long else [],
    }


def timed(name: str, rows: Callable[[], Iterable[Row]]) -> list[Row]:
    start = time.perf_counter()
    made = list(rows())
    print(f"{name}: {len(made)} rows in {time.perf_counter() - start:.0f} s", flush=True)
    return made


def facts(bench: Bench, found: Found) -> dict[str, Any]:
    """What the figures are of."""
    headers, eagle3 = bench.traces.headers, found.one(EAGLE3, policy_of(EAGLE3))
    return {
        "trace_digest": bench.log.digest,
        "clocks": {name: clock.digest for name, clock in bench.clocks.items()},
        "cost_device": bench.clocks["measured"].machine.device,
        "cost_measured": str(bench.clocks["measured"].measured)[:10],
        "num_folders": len(headers),
        "num_train": len(bench.train),
        "num_held_out": len(bench.held_out),
        "num_tokens": int(figure(eagle3.pooled, "tokens")[0]),
        "num_categories": len(bench.categories()),
        "categories": bench.categories(),
        "held_out_frac": SHARE,
        "seed": SEED,
        "fit_seeds": SEEDS,
    }


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Writes the result; an interval is `{value, low, high}`, with `by_fit` of its fits."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def plain(value: Any) -> Any:
        return value.to_json() if isinstance(value, Interval) else str(value)

    text = json.dumps(result, indent=1, ensure_ascii=False, default=plain).replace("NaN", "null")
    path.write_text(text + "\n", "utf-8")
    print(f"wrote {path}", flush=True)


if __name__ == "__main__":
    main()
