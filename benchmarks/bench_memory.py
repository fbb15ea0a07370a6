"""Peak memory of verbs that read trace sets, against the number of rows.

    python benchmarks/bench_memory.py SOURCE --work DIR --num-nodes 1e7 1e8 4e8

The largest set repeats the segments of a real one under new prompt ids, through the project's own
writer; smaller ones are its first segments, hard-linked. Every verb runs in a process of its own,
whose peak of resident memory the system keeps. Rows of other verbs and sizes stay in the results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

from scripts.synthetic_trace import renamed
from specctl.collect.trace_writer import TraceWriter
from specctl.logs.trace_set import TraceSet, read_listing

POLICIES = ("ar", "chain", "eagle2", "svip:window=4")
VERBS: dict[str, list[str]] = {
    "show": [],
    "replay": [word for name in POLICIES for word in ("-p", name)],
    "tune": ["--family", "svip"],
    "fit cart": [],
    "fit c2t": ["--min-steps", "1"],
    "fit survival": [],
    "fit echo": [],
    "ladder": [],
}
"""With what each is asked. C2T's training alone takes as long as wanted, at any memory."""
TIMED, WRITING = ("replay", "tune", "ladder", "fit echo"), ("tune", "ladder", "fit")
STARTER = """
import resource, subprocess, sys
quiet = subprocess.DEVNULL
code = subprocess.run(sys.argv[1:], stdout=quiet, stderr=quiet).returncode
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def main() -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("source", type=Path, help="dense trace set, of which rows are repeated")
    options.add_argument("--work", type=Path, required=True, help="folder for the grown sets")
    options.add_argument("--num-nodes", type=float, nargs="+", default=[1e7, 1e8, 4e8])
    options.add_argument("--verbs", nargs="+", default=["replay"], help="of VERBS")
    options.add_argument("--cost-model", type=Path, required=True)
    given = options.parse_args()
    found, known = given.out / f"memory-{given.device}.json", {}
    earlier = json.loads(found.read_text("utf-8"))["rows"] if found.exists() else []
    for row in (*earlier, *measured(given)):
        known[row["verb"], row["nodes"]] = row
    note = f"repeats of {given.source.name}; peak resident memory; rows of several calls"
    common.report("memory", list(known.values()), given, note)


def measured(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each set and verb."""
    whole = given.work / f"nodes-{max(given.num_nodes):.0e}"
    if not whole.exists():
        grow(given.source, whole, int(max(given.num_nodes)))
    for number in sorted(given.num_nodes):
        folder = given.work / f"nodes-{number:.0e}"
        if not folder.exists():
            link_first(whole, folder, int(number))
        traces = TraceSet.open(folder, verify=False)
        sizes = {table: traces.num_rows(table) for table in ("nodes", "rounds")}
        for verb in given.verbs:
            words = [*verb.split(), str(folder), *VERBS[verb]]
            if verb.startswith(TIMED):
                words += ["--cost-model", str(given.cost_model)]
            if verb in ("replay", "tune"):
                words += ["--threads", str(given.threads)]
            with tempfile.TemporaryDirectory(dir=given.work) as out:
                seconds, peak = run([*words, *(["-o", f"{out}/out"] * verb.startswith(WRITING))])
            row = {"verb": verb, "nodes": sizes["nodes"], "positions": sizes["rounds"]}
            row |= {"prompts": len(traces.prompt_ids), "seconds": seconds, "peak_mb": peak / 1e6}
            print(row, flush=True)
            yield row


def run(words: list[str]) -> tuple[float, int]:
    """Seconds and peak of resident bytes of a command of specctl.

    A small process starts it: the system counts the memory of whoever starts a process as its own.
    """
    began = time.perf_counter()
    command = [sys.executable, "-m", "specctl", *words]
    ended = subprocess.run(
        [sys.executable, "-c", STARTER, *command], capture_output=True, text=True
    )
    code, peak = (int(word) for word in ended.stdout.split())
    if code:
        raise SystemExit(f"{' '.join(command)}: exit code {code}")
    return time.perf_counter() - began, 1024 * peak


def grow(source: Path, out: Path, num_nodes: int) -> int:
    """Writes a set of the rows of another, over and over, every time of other prompts.

    Returns:
        The number of node rows, `num_nodes` at least.
    """
    listing, written, turn = read_listing(source, verify=False), 0, 0
    with TraceWriter.open(out, listing.header) as writer:
        while written < num_nodes:
            for segment in listing.segments:
                tables = listing.tables(segment)
                again = {name: renamed(rows, f"{turn}:") for name, rows in tables.items()}
                writer.commit([f"{turn}:{prompt}" for prompt in segment.prompt_ids], again)
                written += again["nodes"].num_rows
                if written >= num_nodes:
                    break
            turn += 1
    return written


def link_first(whole: Path, out: Path, num_nodes: int) -> None:
    """A set of the first segments of another, hard-linked, with so many node rows at least."""
    listing, number = read_listing(whole, verify=False), 0
    for folder in ("rounds", "nodes"):
        (out / folder).mkdir(parents=True)
    os.link(whole / "trace.json", out / "trace.json")
    for segment in listing.segments:
        for file in segment.files.values():
            os.link(whole / file.key, out / file.key)
        number += segment.record.nodes.num_rows if segment.record.nodes else 0
        if number >= num_nodes:
            return


if __name__ == "__main__":
    main()
