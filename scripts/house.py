"""Prints the size of every room of the package beside its budget, in lines.

    python scripts/house.py            the table
    python scripts/house.py --check    only rooms above their budget; exit code 1 if there are any

A room is a package below `specctl/`, or all its plain modules together. A budget is raised in a
commit that says why, and lowered whenever the room has become smaller.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS = {
    "plain values": 2346,
    "policy": 3881,
    "kernels": 4280,
    "stores": 1004,
    "artifacts": 2279,
    "registry": 2429,
    "runtime": 7908,
    "collect": 4672,
    "logs": 6105,
    "replay": 9159,
    "train": 4040,
    "report": 1374,
    "engines": 4459,
    "watch": 1341,
    "cli": 4001,
    "tests": 46159,
    "benchmarks, scripts": 9619,
    "files of the package": 275,
}
OF_CLI = ("console.py", "describe.py", "__main__.py", "__init__.py")


def sizes() -> Counter[str]:
    """Lines of each room, of the tests, of benchmarks and scripts; files of the package."""
    found: Counter[str] = Counter()
    names = subprocess.run(["git", "ls-files", "*.py", "*.sh"], cwd=ROOT, capture_output=True)
    for path in map(Path, names.stdout.decode().split()):
        top, *rest = path.parts
        room = "tests" if top == "tests" else "benchmarks, scripts"
        if top == "specctl":
            room = rest[0] if rest[1:] and rest[0] != "embedded" else "plain values"
            room = "cli" if rest[0] in OF_CLI else room
            found["files of the package"] += 1
        if top in ("specctl", "tests", "benchmarks", "scripts"):
            found[room] += len((ROOT / path).read_text("utf-8").splitlines())
    return found


if __name__ == "__main__":
    SIZES, CHECKS = sizes(), "--check" in sys.argv
    OVER = [room for room in SIZES if SIZES[room] > BUDGETS.get(room, 0)]
    for name in OVER if CHECKS else BUDGETS:
        print(f"{name:<22} {SIZES[name]:>6,}  budget {BUDGETS.get(name, 0):>6,}")
    raise SystemExit(int(CHECKS and bool(OVER)))
