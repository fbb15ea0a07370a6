"""A process that runs a verb on a large set with little memory, and again with all there is.

    python -m tests.replay.limited WORK ALLOWED replay

`WORK/warm` is a small set, which a first run loads code and fills caches with; `WORK/large` the one
that is read under a limit of ALLOWED bytes above what is held then. The last line says what came
out: exit code, standard error and answer of both runs, and whether the set fits under the limit.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np

from specctl.logs import logged_draft, tree_log
from specctl.replay import static
from tests.cli.command import COST, specctl

DATA = resource.RLIMIT_DATA


def held() -> int:
    """Bytes that count against the limit."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData"))


def answer(verb: str, folder: Path, out: Path) -> tuple[int, str, Any]:
    """Exit code, refusal, and figures without the names of places and artifacts."""
    words = ["--cost-model", str(out.with_suffix(".json")), "--threads", "1", "--json"]
    if verb == "tune":
        words += ["-o", str(out), "--held-out", "0.5"]
    else:
        words += ["-p", "ar", "-p", "chain", "-p", "eagle2:depth=3:top_k=2:num_tokens=6"]
    Path(out.with_suffix(".json")).write_text(json.dumps(COST), "utf-8")
    found = specctl(verb, folder, *words)
    told = json.loads(found.out) if found.code == 0 else {}
    told.pop("artifact_digest", None)  # of a manifest that says when it was written
    return found.code, found.err, told


def main() -> None:
    work, allowed, verb = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    # Parts so small that a small set is many of them.
    tree_log.CHUNK_NODES = 1 << 13
    logged_draft.BATCH_POSITIONS = static.BATCH_POSITIONS = 16
    answer(verb, work / "warm", work / "warm-out")
    np.ones((2000, 400)) @ np.ones((400, 12))  # OpenBLAS takes room for itself once
    most = resource.getrlimit(DATA)[1]
    resource.setrlimit(DATA, (held() + allowed, most))
    limited = answer(verb, work / "large", work / "limited-out")
    try:
        np.empty(8 * allowed, np.uint8)
        fits = True
    except MemoryError:
        fits = False
    resource.setrlimit(DATA, (most, most))
    whole = answer(verb, work / "large", work / "whole-out")
    sys.stdout.write(json.dumps({"limited": limited, "whole": whole, "fits": fits}))


if __name__ == "__main__":
    main()
