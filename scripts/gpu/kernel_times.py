"""Every kernel beside torch: `benchmarks/kernels` in one process, those first that count most.

    export PYTHONPATH=.:benchmarks/kernels
    python scripts/gpu/kernel_times.py --seconds 65 --out DIR    on CUDA
    python scripts/gpu/kernel_times.py --small --device cpu      small sizes

Each benchmark is printed and written when it is done; none is begun when the time is up.
"""

from __future__ import annotations

import argparse
import json
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
    for name in NAMES:
        if time.time() > until:
            print(f"-- {name}: no time left")
            failed = True
            continue
        began = time.time()
        try:
            rows = import_module(f"bench_{name}").rows(device, small=given.small)
        except Exception:  # the other benchmarks go on
            print(f"-- {name}: failed\n{traceback.format_exc(limit=-3)}", flush=True)
            failed = True
            continue
        print(f"-- {name}, {time.time() - began:.0f} s")
        print_table(rows)
        sys.stdout.flush()
        if given.out is not None:
            given.out.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"machine": machine(device), "rows": rows}, indent=1)
            (given.out / f"kernel-{name}-{device.type}.json").write_text(text + "\n", "utf-8")
    return int(failed)


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--device", default="cuda", help="cuda or cpu")
    options.add_argument("--small", action="store_true", help="sizes that a CPU gets through")
    options.add_argument("--seconds", type=float, default=65.0, help="nothing is begun later")
    options.add_argument("--out", type=Path, help="folder for the JSON")
    return options.parse_args()


if __name__ == "__main__":
    sys.exit(main())
