"""Verify-and-load of artifacts in fresh processes, split; and hostile ones refused.

Every figure is the median over fresh processes; imports are counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(Path(__file__).parents[1]))

from specctl.artifacts import save_artifact
from tests.artifacts.examples import ORIGIN, POLICIES
from tests.artifacts.hostile import families

LARGE = {
    name: hostile
    for name, hostile in families().items()
    if name.split()[0] in ("7", "12", "22", "33", "35")
}
"""Refusals of what could take memory or time."""
LOADED = {
    "chain": POLICIES["chain"],
    "hetero": POLICIES["hetero"],
    "echo": POLICIES["echo"],
    "c2t network": POLICIES["c2t_ffn"],
    "survival": POLICIES["survival"],
    "mars": POLICIES["mars"],
}
CHILD = """
import json, sys, time
from pathlib import Path
def ms(start): return 1e3 * (time.perf_counter() - start)
def memory():
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024
def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
t = time.perf_counter()
import torch
torch.set_num_threads(1)
imports = {"import_torch_ms": ms(t)}
t = time.perf_counter()
import specctl.artifacts
specctl.artifacts.load_artifact  # exported lazily: its module is an import, too
from specctl.errors import ArtifactError
imports["import_specctl_ms"] = ms(t)
def load(folder):
    forget_peak()
    before, t, cpu = memory(), time.perf_counter(), time.process_time()
    try:
        specctl.artifacts.load_artifact(folder)
        code = "loaded"
    except ArtifactError as error:
        code = error.code
    told = {"code": code, "load_ms": ms(t), "load_cpu_ms": 1e3 * (time.process_time() - cpu)}
    return {**told, "grown_mib": memory() - before, "whole_mib": memory()}
def split(folder):
    from specctl.artifacts import files, load, selftest
    told, t = {}, time.perf_counter()
    def lap(name):
        nonlocal t
        told[name] = ms(t)
        t = time.perf_counter()
    contents = files.read_folder(folder)
    lap("read_ms")
    manifest = load.parse_manifest(contents["config.json"])
    lap("manifest_ms")
    files.check_contents(manifest.files, contents)
    lap("digests_ms")
    tensors = load.read_tensors(contents["policy.safetensors"])
    stored = {n: tensors.pop(n) for n in list(tensors) if n.startswith(selftest.PREFIX)}
    policy = load.join_policy(manifest.policy, tensors)
    load.check_cost(policy)
    lap("policy_ms")
    selftest.check_selftest(policy, stored)
    lap("selftest_ms")
    return told
found = [load(Path(folder)) for folder in sys.argv[1:]]
if found[0]["code"] == "loaded":
    found[0] |= {**imports, **split(Path(sys.argv[1]))}
print(json.dumps(found))
"""


def main() -> None:
    options = common.parser((__doc__ or "").splitlines()[0])
    options.add_argument("--repeats", type=int, default=5, help="fresh processes a figure")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [*measure_sound(Path(folder), given), *measure_hostile(Path(folder), given)]
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"
    common.report("artifact_load", rows, given, f"verify-and-load, fresh processes, {load}")


def measure_sound(folder: Path, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A load and its parts."""
    for i, (name, policy) in enumerate(LOADED.items()):
        place = folder / f"sound-{i}"
        save_artifact(place, policy, ORIGIN, card=f"# {name}\n")
        size = sum(file.stat().st_size for file in place.iterdir())
        warm = median([child(place)[0] for _ in range(given.repeats)])
        yield {
            "artifact": name,
            "size_bytes": size,
            "warm_ms": warm["load_ms"],
            "warm_cpu_ms": warm["load_cpu_ms"],
            **{key: value for key, value in warm.items() if not key.startswith("load")},
        }


def measure_hostile(folder: Path, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time and memory until the refusal, one after the other in one process."""
    del given
    places = [folder / f"hostile-{i}" for i in range(len(LARGE))]
    for place, hostile in zip(places, LARGE.values(), strict=True):
        hostile.make(place)
    # The first load of a process imports on the way: one that counts for nothing.
    _, *found = child(places[0], *places)
    for (name, hostile), told in zip(LARGE.items(), found, strict=True):
        assert told["code"] == hostile.code, (name, told)
        yield {
            "artifact": f"hostile: {name}",
            "code": hostile.code,
            "refused_ms": round(told["load_ms"], 2),
            "refused_cpu_ms": round(told["load_cpu_ms"], 2),
            "grown_mib": round(told["grown_mib"], 1),
            "whole_mib": round(told["whole_mib"], 1),
        }


def child(*folders: Path) -> list[dict[str, Any]]:
    """One fresh process that loads folders in turn."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, folders)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure by itself."""
    return {
        key: round(statistics.median(run[key] for run in runs), 2)
        for key, value in runs[0].items()
        if not isinstance(value, str)
    }


if __name__ == "__main__":
    main()
