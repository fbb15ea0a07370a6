"""What durability costs: commits of 100,000 rows beside a plain Parquet write of the same rows.

    python benchmarks/bench_commits.py

Both sides run in turns in one process; the bucket is a moto server on loopback, which says nothing
about a real one but the number of its round trips. Medians; results/bench_commits.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.synthetic_trace import header, write
from specctl.collect.trace_writer import TraceWriter, write_parquet
from specctl.collect.verifying import checked_tables
from specctl.logs.parquet import Tables, join_tables
from specctl.logs.trace_set import read_listing
from specctl.policy import FullTree, Policy
from tests.servers import S3_ENVIRONMENT, make_bucket, s3_server

SHAPE = FullTree(depth=8, top_k=8, nested=False)
RESULTS = Path(__file__).parent / "results" / "bench_commits.json"


def rows_of(folder: Path, num_rows: int) -> Tables:
    """Dense rows of both tables, about so many."""
    write(folder, SHAPE, num_nodes=num_rows, prompts_per_commit=1, seed=0)
    listing = read_listing(folder)
    return join_tables([checked_tables(listing, segment) for segment in listing.segments])


def plain(folder: Path, tables: Tables) -> None:
    """The least that anyone would do: no digest, no sync, no record."""
    for name, rows in tables.items():
        pq.write_table(rows, folder / f"{uuid.uuid4().hex}-{name}.parquet", compression="zstd")


def encoded(folder: Path, tables: Tables) -> None:
    """The same with the encodings that commits have."""
    for name, rows in tables.items():
        write_parquet(folder / f"{uuid.uuid4().hex}-{name}.parquet", name, rows)


def timed_s(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(folder: Path, tables: Tables, num_repeats: int, url: str) -> dict[str, list[float]]:
    """Seconds of each side, in turns."""
    names = iter(range(1_000_000))
    made = header(Policy(shape=SHAPE))
    found: dict[str, list[float]] = {
        name: [] for name in ("plain", "encoded", "local", "s3", "local_empty")
    }
    with (
        TraceWriter.open(folder / "set", made) as local,
        TraceWriter.open(url, made) as bucket,
    ):
        for _ in range(num_repeats):
            found["plain"].append(timed_s(lambda: plain(folder, tables)))
            found["encoded"].append(timed_s(lambda: encoded(folder, tables)))
            found["local"].append(timed_s(lambda: local.commit([f"p{next(names)}"], tables)))
            found["s3"].append(timed_s(lambda: bucket.commit([f"p{next(names)}"], tables)))
            found["local_empty"].append(timed_s(lambda: local.commit([f"p{next(names)}"], {})))
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--num-rows", type=int, default=100_000)
    options.add_argument("--num-repeats", type=int, default=9)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name, s3_server(Path(name)) as endpoint:
        os.environ.update({**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint})
        make_bucket(endpoint, "bench")
        folder = Path(name)
        tables = rows_of(folder / "made", given.num_rows)
        seconds = measure(folder, tables, given.num_repeats, "s3://bench/set")
    report(seconds, sum(len(rows) for rows in tables.values()), given.num_repeats)


def report(seconds: dict[str, list[float]], num_rows: int, num_repeats: int) -> None:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ms = {f"{name}_ms": round(1e3 * value, 1) for name, value in medians.items()}
    result: dict[str, Any] = {
        "num_rows": num_rows,
        "num_repeats": num_repeats,
        **ms,
        "local_over_plain": round(medians["local"] / medians["plain"], 2),
        "local_over_encoded": round(medians["local"] / medians["encoded"], 2),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, pyarrow {pyarrow.__version__}",
    }
    print(json.dumps(result, indent=2))
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
