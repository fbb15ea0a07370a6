"""A process that loads the artifacts named on standard input, watched by an audit hook.

Says of each load in JSON what was refused and why, what it cost, and what it did but read.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from specctl.artifacts import load_artifact
from specctl.errors import ArtifactError

FORBIDDEN = ("pickle", "subprocess", "socket", "os.system", "os.exec", "os.posix_spawn")
LIBRARIES = ("joblib", "onnx", "onnxruntime")
HEAVY = (*LIBRARIES, "polars", "pyarrow", "sklearn", "lightgbm", "rich", "matplotlib")
"""Libraries of others than the loader."""
FACTS = ("code", "field", "artifact", "problem", "hint", "exit_code")
did: list[list[str]] = []
swaps: list[Any] = []


def hook(event: str, args: tuple[Any, ...]) -> None:
    """Notes what a load may not do; the attacker of a race strikes as its file is opened."""
    if event == "open" and not isinstance(args[0], int):  # else a handle that is open already
        if swaps and str(args[0]) == swaps[0]["file"]:
            _swap(swaps.pop())
        if args[1] not in (None, "r", "rb") and "/proc/self" not in str(args):
            did.append([event, str(args[0])[:200]])
    if event.startswith(FORBIDDEN) or (event == "import" and args[0] in LIBRARIES):
        did.append([event, str(args[0])[:200]])


def _swap(race: dict[str, Any]) -> None:
    """Puts a link in the place of a file, to a file with the same bytes."""
    path, outside = Path(race["folder"]) / race["file"], Path(race["folder"]).parent / "outside"
    path.unlink()
    if race["kind"] == "link":
        path.symlink_to(outside)
    elif race["kind"] == "hard link":
        os.link(outside, path)
    else:
        os.mkfifo(path)


def peak_mib() -> float:
    """Largest resident size since `forget_peak`."""
    with open("/proc/self/status") as file:
        [line] = [line for line in file if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def load(asked: dict[str, Any]) -> dict[str, Any]:
    if asked["race"]:
        swaps.append({**asked["race"], "folder": asked["folder"]})
    forget_peak()
    did.clear()
    before, start = peak_mib(), time.process_time()
    told: dict[str, Any] = {"code": "loaded"}
    try:
        load_artifact(asked["folder"])
    except ArtifactError as error:
        told = {name: getattr(error, name) for name in FACTS} | {"line": str(error)}
    except Exception as error:  # a fault of the loader, told of this artifact alone
        told = {"code": repr(error)}
    told |= {"cpu_s": time.process_time() - start, "grown_mib": peak_mib() - before}
    return {**told, "did": [list(one) for one in did]}


def main() -> None:
    logging.disable()
    asked = json.load(sys.stdin)
    first = sys.argv[1]
    told = {first: load(asked.pop(first))}
    sys.addaudithook(hook)
    told |= {name: load(one) for name, one in asked.items()}
    told["loaded"] = {"libraries": [name for name in HEAVY if sys.modules.get(name)]}
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
