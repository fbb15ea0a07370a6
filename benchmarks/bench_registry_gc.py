"""Every interleaving of a user and a garbage collector with up to so many passes of the turn.

The suite runs two passes (tests/registry/test_garbage.py); this is the same with more.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import common  # noqa: E402

from tests.registry.races import USERS, races  # noqa: E402


def main() -> None:
    options = common.parser((__doc__ or "").splitlines()[0])
    options.add_argument("--num-passes", type=int, default=3, help="of the turn, at most")
    given = options.parse_args()
    rows = [
        measure(user, marks_first=marks_first, num_passes=given.num_passes)
        for user in USERS
        for marks_first in (True, False)
    ]
    result = {"machine": common.machine("cpu"), "num_passes": given.num_passes, "rows": rows}
    (given.out / "registry-interleavings.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(rows, indent=2))


def measure(user: Any, *, marks_first: bool, num_passes: int) -> dict[str, Any]:
    """Schedules, losses (which must be none) and how the user ended."""
    begun, ends, num_lost = time.perf_counter(), dict[str, int](), 0
    for race in races(user, marks_first=marks_first, num_passes=num_passes):
        ended = race.refused or "done"
        ends[ended] = ends.get(ended, 0) + 1
        num_lost += race.is_lost()
    assert num_lost == 0
    return {
        "user": user.__name__,
        "marks_first": marks_first,
        "num_schedules": sum(ends.values()),
        "num_lost": num_lost,
        "ends": ends,
        "wall_s": round(time.perf_counter() - begun, 1),
    }


if __name__ == "__main__":
    main()
