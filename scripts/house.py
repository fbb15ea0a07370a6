"""Prints the size of every room of the package beside its limit and the design's budget, in lines.

    python scripts/house.py            the table
    python scripts/house.py --check    only what is above its limit; exit code 1 if anything is

A room is a package below `specctl/`, or all its plain modules together. A limit is raised in a
commit that says why, and lowered whenever the room has become smaller.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIZES = {  # room: limit, budget
    "plain values": (2065, 2150),
    "policy": (3704, 3900),
    "kernels": (4334, 4500),
    "stores": (1006, 1000),
    "artifacts": (2309, 2050),
    "registry": (2561, 2150),
    "runtime": (6900, 6800),
    "collect": (4286, 3750),
    "logs": (3529, 3300),
    "replay": (8822, 7900),
    "train": (4156, 4000),
    "report": (1411, 1150),
    "engines": (3167, 3800),
    "watch": (1446, 1050),
    "cli": (3340, 3200),
    "tests": (43659, 38000),
    "benchmarks, scripts": (9212, 9500),
    "files of the package": (254, 245),
}


ABOVE = ("console.py", "describe.py", "__main__.py", "__init__.py")
"""Plain modules that belong to the command line."""


def sizes() -> Counter[str]:
    """Lines of each room, of the tests, of benchmarks and scripts; files of the package."""
    found: Counter[str] = Counter()
    names = subprocess.run(["git", "ls-files", "*.py", "*.sh"], cwd=ROOT, capture_output=True)
    for path in map(Path, names.stdout.decode().split()):
        top, *rest = path.parts
        room = {"tests": "tests", "benchmarks": "benchmarks, scripts"}.get(
            top, "benchmarks, scripts"
        )
        if top == "specctl":
            room = rest[0] if rest[1:] and rest[0] != "embedded" else "plain values"
            room = "cli" if rest[0] in ABOVE else room
            found["files of the package"] += 1
        if top in ("specctl", "tests", "benchmarks", "scripts"):
            found[room] += len((ROOT / path).read_text("utf-8").splitlines())
    return found


def main() -> int:
    found, checks = sizes(), "--check" in sys.argv
    over = 0
    for room in sorted(SIZES.keys() | found.keys(), key=lambda room: (room not in SIZES, room)):
        limit, budget = SIZES.get(room, (0, 0))
        over += found[room] > limit
        if not checks or found[room] > limit:
            print(f"{room:<22} {found[room]:>6,}  limit {limit:>6,}  budget {budget:>6,}")
    return int(over > 0 and checks)


if __name__ == "__main__":
    raise SystemExit(main())
