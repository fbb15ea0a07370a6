"""Every kernel beside torch: `benchmarks/kernels` in one process, those first that count most.

    export PYTHONPATH=.:benchmarks/kernels
    python scripts/gpu/kernel_times.py --seconds 65 --out DIR    on CUDA
    python scripts/gpu/kernel_times.py --small --device cpu      small sizes

Each benchmark is printed and written when it is done; none is begun when the time is up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

import torch
from timing import machine, print_table

NAMES = (
    "tree_attention", "node_features", "tree_build", "commit_kv", "verify_tree", "bookkeeping",
    "policy_eval", "sample_tokens",
)  # fmt: skip


def main() -> int:
    given = _options()
    device, until, failed = torch.device(given.device), time.time() + given.seconds, False
    for place, name in enumerate(NAMES[given.first :], given.first):
        if time.time() > until:
            print(f"-- {name}: no time left")
            failed = True
            continue
        began = time.time()
        try:
            rows = import_module(f"bench_{name}").rows(device, small=given.small)
        except Exception:
            print(f"-- {name}: failed\n{traceback.format_exc(limit=-3)}", flush=True)
            return go_on(given, place + 1, until)
        print(f"-- {name}, {time.time() - began:.0f} s")
        print_table(rows)
        sys.stdout.flush()
        if given.out is not None:
            given.out.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"machine": machine(device), "rows": rows}, indent=1)
            (given.out / f"kernel-{name}-{device.type}.json").write_text(text + "\n", "utf-8")
    return int(failed)


def go_on(given: argparse.Namespace, first: int, until: float) -> int:
    """Runs the other benchmarks in a new process: a failed capture or launch may have spoilt this
    one. The exit code is that of a failure."""
    command = [sys.executable, __file__, "--first", str(first), "--device", given.device]
    command += ["--seconds", str(until - time.time()), *(["--small"] if given.small else [])]
    command += ["--out", str(given.out)] if given.out is not None else []
    subprocess.run(command)
    return 1


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--device", default="cuda", help="cuda or cpu")
    options.add_argument("--small", action="store_true", help="sizes that a CPU gets through")
    options.add_argument("--seconds", type=float, default=65.0, help="nothing is begun later")
    options.add_argument("--first", type=int, default=0, help="place of the first benchmark")
    options.add_argument("--out", type=Path, help="folder for the JSON")
    return options.parse_args()


if __name__ == "__main__":
    sys.exit(main())
