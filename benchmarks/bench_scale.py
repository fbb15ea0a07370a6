"""What grows with the number of rows, segments, artifacts, readers and watched policies.

    python benchmarks/bench_scale.py CHAIN LIVE --dense SMALL LARGE --work DIR

Measures small sizes of each, one after another, and fits a line: docs/scale.md counts with its
slope. Requests to a bucket are counted on a folder, where their number is the same.
"""

from __future__ import annotations

import argparse
import resource
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import common
import numpy as np
from bench_memory import POLICIES, with_names

from specctl.artifacts.manifest import digest_of
from specctl.collect.trace_writer import TraceWriter
from specctl.logs.parquet import join_tables
from specctl.logs.trace_set import Listing, TraceSet, read_listing
from specctl.registry.listing import name_rows
from specctl.registry.log import Log, Move, Publish, Writer
from specctl.registry.names import parse_reference
from specctl.registry.opening import Registry, init_registry, open_registry
from specctl.registry.resolving import resolve
from specctl.registry.trust import Trust
from specctl.runtime.policy_spec import resolve_policy
from specctl.stores import open_store
from specctl.watch.alarm import p_values, wealth
from specctl.watch.drift import watch
from specctl.watch.signals import Prompts, read_prompts

Row = dict[str, Any]
LIST_PAGE = 1000
"""Keys that S3 lists with one request."""


def main() -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("chain", type=Path, help="dense trace set of one child a level")
    options.add_argument("live", type=Path, help="live trace set of --policy")
    options.add_argument("--dense", type=Path, nargs=2, help="dense sets of trees, of two sizes")
    options.add_argument("--policy", default="threshold", help="that `live` was served by")
    options.add_argument("--work", type=Path, required=True, help="folder for what is made")
    options.add_argument("--versions", type=int, nargs="+", default=[1, 100, 1000])
    options.add_argument("--names", type=int, nargs="+", default=[10, 100, 1000])
    options.add_argument("--watched", type=int, nargs="+", default=[1000, 10_000, 50_000])
    given = options.parse_args()
    given.segments = ((100, 1), (1500, 1), (100, 42))
    given.work.mkdir(parents=True, exist_ok=True)
    rows = [
        *sizes(given),
        *segments(given),
        *replaying(given),
        *histories(given),
        *many_names(given),
        *watching(given),
        *delays(),
    ]
    common.report(
        "scale",
        rows,
        given,
        "one process; seconds are of CPU time, which other work on the machine does not move much",
    )


def row(subject: str, size: float, **figures: Any) -> Row:
    """One measurement, printed as soon as it is there."""
    found = {"subject": subject, "size": size, **figures}
    print(found, flush=True)
    return found


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of the faster of two calls, and what it gave."""
    times = []
    for _ in range(2):
        began = time.process_time()
        found = action()
        times.append(time.process_time() - began)
    return min(times), found


# ------------------------------------------------------------------ trace sets


def sizes(given: argparse.Namespace) -> Iterator[Row]:
    """Bytes on disk of a round, of a node and of a segment."""
    for name, folder in (("trees", given.dense[0]), ("chains", given.chain), ("live", given.live)):
        listing = read_listing(folder)
        files = [(one, table) for one in listing.segments for table in one.files]
        stored: Counter[str] = Counter()
        for segment, table in files:
            stored[table] += listing.paths(segment)[table].stat().st_size
        traces = TraceSet.open(folder)
        num = {table: traces.num_rows(table) for table in stored}
        yield row(
            f"bytes of a set: {name}",
            num["rounds"],
            segments=len(listing.segments),
            prompts=len(listing.prompt_ids),
            nodes=num["nodes"],
            mb=sum(stored.values()) / 1e6,
            bytes_per_round=sum(stored.values()) / num["rounds"],
            bytes_per_node=stored["nodes"] / num["nodes"],
        )


def segments(given: argparse.Namespace) -> Iterator[Row]:
    """Seconds to open a set and to replay a chain from it, in small segments and in large ones."""
    source = read_listing(given.chain)
    for number, copies in given.segments:
        folder = given.work / f"segments-{number}-{copies}"
        if not folder.exists():
            repeat(source, folder, number, copies)
        size = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
        opening, listing = timed(lambda folder=folder: read_listing(folder))
        positions = sum(one.num_rounds for one in listing.segments)
        command = ["replay", "-p", "chain:num_draft_tokens=4", str(folder)]
        yield row(
            "open and replay chains",
            positions,
            segments=number,
            mb=size / 1e6,
            prompts=len(listing.prompt_ids),
            open_s=opening,
            seconds=cpu_seconds(command),
        )


def repeat(source: Listing, out: Path, number: int, copies: int) -> None:
    """Writes `number` segments, each of `copies` segments of a set under new prompt ids."""
    with TraceWriter.open(out, source.header) as writer:
        turns = iter(range(number * copies))
        for _ in range(number):
            names, parts = [], []
            for turn in islice(turns, copies):
                segment = source.segments[turn % len(source.segments)]
                tables = source.tables(segment)
                parts.append({key: with_names(rows, f"{turn}:") for key, rows in tables.items()})
                names += [f"{turn}:{prompt}" for prompt in segment.prompt_ids]
            writer.commit(names, join_tables(parts))


def replaying(given: argparse.Namespace) -> Iterator[Row]:
    """Seconds of verbs in processes of their own, start and opening included."""
    words = {
        "replay chain": ["replay", "-p", "chain"],
        "replay 4 policies": ["replay", *(word for name in POLICIES for word in ("-p", name))],
        "fit cart": ["fit", "cart", "-o", str(given.work / "cart")],
        "fit c2t": ["fit", "c2t", "-o", str(given.work / "c2t")],
    }
    for folder in given.dense:
        traces = TraceSet.open(folder)
        for name, command in words.items():
            seconds = cpu_seconds([*command, str(folder)])
            positions, nodes = (traces.num_rows(table) for table in ("rounds", "nodes"))
            yield row(name, positions, seconds=seconds, nodes=nodes)


def cpu_seconds(words: Sequence[str]) -> float:
    """CPU seconds of a command of specctl."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "specctl", *words], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# ------------------------------------------------------------------ registries


class Counted:
    """A store that counts the requests that a bucket would get."""

    def __init__(self, store: Any) -> None:
        self.store, self.asked = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        self.asked["GET"] += 1
        return self.store.get(key, max_bytes=max_bytes)

    def objects(self, prefix: str) -> Iterator[Any]:
        found = list(self.store.objects(prefix))
        self.asked["LIST"] += len(found) // LIST_PAGE + 1
        return iter(found)

    def children(self, prefix: str) -> list[str]:
        found = self.store.children(prefix)
        self.asked["LIST"] += len(found) // LIST_PAGE + 1
        return found


def histories(given: argparse.Namespace) -> Iterator[Row]:
    """A first look at an alias behind many versions, and a look that finds nothing new."""
    for number in given.versions:
        place = given.work / f"versions-{number}"
        if not place.exists():
            fill(init_registry(place), ["llama+eagle3"], number)
        reference = parse_reference("llama+eagle3@prod")
        store = Counted(open_store(place))
        registry = Registry(str(place), store, open_registry(place).marker)
        began = time.process_time()
        resolve(registry, reference, Trust())
        first, asked = time.process_time() - began, dict(store.asked)
        store.asked.clear()
        again, _ = timed(lambda at=(registry, reference): resolve(*at, Trust()))
        yield row(
            "resolve an alias",
            number,
            seconds=first,
            requests=sum(asked.values()),
            again_s=again,
            again_requests=sum(store.asked.values()) / 2,
            entry_bytes=np.mean(
                [len(one.envelope) for one in registry.log("llama+eagle3").entries]
            ),
        )


def many_names(given: argparse.Namespace) -> Iterator[Row]:
    """`registry list`, by the number of names."""
    for number in given.names:
        place = given.work / f"names-{number}"
        if not place.exists():
            fill(init_registry(place), [f"llama-{n}+eagle3" for n in range(number)], 1)
        store = Counted(open_store(place))
        registry = Registry(str(place), store, open_registry(place).marker)
        began = time.process_time()
        found = name_rows(registry, Trust())
        seconds = time.process_time() - began
        assert len(found) == number
        yield row("registry list", number, seconds=seconds, requests=sum(store.asked.values()))


def fill(registry: Registry, names: Sequence[str], num_versions: int) -> None:
    """Histories of made-up digests, the alias `prod` at the last one of each."""
    writer = Writer(registry, Trust(), "bench")
    for name in names:
        log = Log(registry, name)
        log.refresh()
        for _ in range(num_versions):
            digest = digest_of(secrets.token_bytes(16))
            log.append(log.draft(Publish(digest=digest), writer))
        move = Move(
            kind="alias",
            alias="prod",
            digest=digest,
            expected_generation=None,
            expected_digest=None,
        )
        log.append(log.draft(move, writer))


# ------------------------------------------------------------------ drift


def watching(given: argparse.Namespace) -> Iterator[Row]:
    """Seconds to read a watch's prompts, and of its bets by the number of prompts."""
    traces = TraceSet.open(given.live)
    policy = resolve_policy(given.policy).policy
    seconds, prompts = timed(lambda: read_prompts(traces, policy))
    yield row("read watched prompts", len(prompts), seconds=seconds)
    random = np.random.default_rng(0)
    for number in given.watched:
        rows = random.integers(len(prompts), size=number + 300)
        drawn: Prompts = prompts.take(rows)
        reference, stream = drawn.take(slice(300)), drawn.take(slice(300, None))
        seconds, found = timed(lambda at=(reference, stream): watch(*at))
        yield row("bets of a watch", number, seconds=seconds, signals=len(found.signals))


def delays(num_streams: int = 100, change: int = 500, length: int = 2500) -> Iterator[Row]:
    """Prompts from a change to the alarm, in one of 8 groups, at two bounds on false alarms."""
    random, num_reference = np.random.default_rng(0), 300
    for shift in (0.3, 0.6, 1.0):
        groups = []
        for group in range(8):
            values = random.normal(size=(num_streams, num_reference + length))
            values[:, num_reference + change :] += shift * (group == 0)
            ranks = [p_values(*np.split(one, [num_reference]), random) for one in values]
            groups.append(wealth(np.stack(ranks, 1)))
        evidence = np.mean(groups, 0)
        for alpha in (0.05, 0.05 / 10_000):
            rings = [np.flatnonzero(one >= 1 / alpha) for one in evidence.T]
            found = [int(of[0]) - change if len(of) else length - change for of in rings]
            low, middle, high = np.percentile(found, [10, 50, 90])
            yield row("prompts to the alarm", shift, alpha=alpha, p10=low, p50=middle, p90=high)


if __name__ == "__main__":
    main()
