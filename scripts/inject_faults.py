"""The long campaigns of fault injection on trace sets, to benchmarks/results/faults-traces.json.

    python -m scripts.inject_faults --num-kills 500

tests/collect/test_faults.py runs some of each. A broken promise ends the script with an
AssertionError; the results are the sizes of the campaigns.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import random
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specctl.collect.trace_writer import TraceWriter
from specctl.errors import OutputError
from specctl.logs.trace_set import read_listing
from tests.collect.faults import (
    Campaign,
    check_set,
    damage_everywhere,
    fail_everywhere,
    finish,
    forkserver,
    run_life,
    survive_power_loss,
)
from tests.collect.rounds import header
from tests.collect.sets import collect, tables_of
from tests.servers import S3_ENVIRONMENT, make_bucket, s3_server

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "faults-traces.json"
TMPFS_BYTES = 8 << 20
KILLS_OF_SET = 25
NONE = {"num_lost": 0, "num_doubled": 0, "num_unreadable": 0}
"""Of a campaign that ended: each of its checks raises at the first row that is lost or doubled."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--num-kills", type=int, default=500)
    options.add_argument("--num-flips", type=int, default=10_000)
    options.add_argument("--num-s3-commits", type=int, default=100, help="of each writer")
    options.add_argument("--only", help="one campaign by name; the others keep their results")
    given = options.parse_args()
    sizes = {
        "random_kills": {"num_kills": given.num_kills},
        "damaged_bytes": {"num_flips": given.num_flips},
        "s3": {"num_commits": given.num_s3_commits},
    }
    for name, campaign in CAMPAIGNS.items():
        if given.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                start = time.monotonic()
                found = campaign(Path(folder), **sizes.get(name, {}))
            note(name, {**found, "seconds": round(time.monotonic() - start, 1)})


def note(name: str, found: dict[str, Any]) -> None:
    """Adds a campaign to the results; to be read only where none failed."""
    print(name, json.dumps(found))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    results |= {name: {**found, "machine": machine}}
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


def every_operation(folder: Path) -> dict[str, Any]:
    """Real processes that die before, or half way through, each operation of their life."""
    context, found = forkserver(), {}
    for mode in ("die", "die in write", "EIO", "ENOSPC", "EINTR"):
        life = functools.partial(run_life, context, mode=mode)
        there = folder / mode.replace(" ", "-")
        found[mode] = fail_everywhere(there, lambda root, at, life=life: life(root, at=at))
    return {"num_operations": found, **NONE}


def random_kills(folder: Path, num_kills: int = 500) -> dict[str, Any]:
    """Sets of 25 kills each: one that grew for an hour would be opened for longer than it lives."""
    campaigns = [Campaign(folder / str(seed), 4, seed) for seed in range(num_kills // KILLS_OF_SET)]
    for campaign in campaigns:
        campaign.run(KILLS_OF_SET, check_every=5)
    done = sum(campaign.num_kills for campaign in campaigns)
    within = sum(campaign.num_within for campaign in campaigns) / done
    assert within >= 0.3, f"{within:.0%} of the kills hit a commit: nothing is shown"
    return {
        "num_writers": 4,
        "num_sets": len(campaigns),
        "num_kills": done,
        "within_a_commit_frac": round(within, 3),
        "num_acked": sum(len(campaign.acked) for campaign in campaigns),
        "num_repeats": sum(campaign.num_repeats for campaign in campaigns),
        **NONE,
    }


def full_disk(folder: Path) -> dict[str, Any]:
    """A tmpfs of 8 MiB, filled to the brim and to a few KiB below it."""
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(folder)], check=False
    )
    if mounted.returncode:
        return {"skipped": "mounting a tmpfs needs root"}
    try:
        num_refused = sum(_fill(folder / str(left), left) for left in range(0, 64 << 10, 2 << 10))
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert num_refused > 5
    return {"size_bytes": TMPFS_BYTES, "num_tried": 32, "num_refused": num_refused, **NONE}


def _fill(root: Path, left_bytes: int) -> bool:
    """Commits with so much room; whether that was refused. With room again it must go on."""
    with TraceWriter.open(root, header()) as writer:
        writer.commit(["a"], tables_of(["a"]))
        filler = root.parent / "filler"
        free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
        filler.write_bytes(bytes(max(free - left_bytes, 0)))
        try:
            writer.commit(["b"], tables_of(["b"]))
            refused = False
        except OutputError:
            refused = True
    filler.unlink()
    check_set(root, {"a"} if refused else {"a", "b"})
    finish(root)
    return refused


def damaged_bytes(folder: Path, num_flips: int = 10_000) -> dict[str, Any]:
    """Every truncation of six files, and so many flips of them together."""
    told = damage_everywhere(collect(folder / "set", "a", "b"), random.Random(0), num_flips // 6)
    return {"num_refused": told, "num_unnoticed": 0}


def power_loss(folder: Path) -> dict[str, Any]:
    """Of a longer life than the suite's: four segments."""
    return {"num_states": survive_power_loss(folder, segments=4), **NONE}


def s3(folder: Path, num_writers: int = 8, num_commits: int = 100) -> dict[str, Any]:
    """Writers on a real server (moto), of which each two take the same prompts."""
    with s3_server(folder) as endpoint, _environment(endpoint):
        bucket = f"faults-{uuid.uuid4().hex[:12]}"
        make_bucket(endpoint, bucket)
        url = f"s3://{bucket}/set"
        threads = [
            threading.Thread(target=_commit, args=(url, index // 2, num_commits))
            for index in range(num_writers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        listing = read_listing(url)
    wanted = {
        f"{i}-{number}" for i in range((num_writers + 1) // 2) for number in range(num_commits)
    }
    assert sorted(listing.prompt_ids) == sorted(wanted)
    return {
        "num_writers": num_writers,
        "num_segments": len(listing.segments),
        "num_repeats": listing.num_repeats,
        **NONE,
    }


def _commit(url: str, index: int, num_commits: int) -> None:
    with TraceWriter.open(url, header(), resume=True) as writer:
        for number in range(num_commits):
            prompt = f"{index}-{number}"
            if prompt not in writer.finished:
                writer.commit([prompt], tables_of([prompt]) if number % 10 == 0 else {})


CAMPAIGNS: dict[str, Callable[..., dict[str, Any]]] = {
    "every_operation": every_operation,
    "random_kills": random_kills,
    "full_disk": full_disk,
    "damaged_bytes": damaged_bytes,
    "power_loss": power_loss,
    "s3": s3,
}


@contextmanager
def _environment(endpoint: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update({**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    main()
