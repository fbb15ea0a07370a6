"""Mutates sound files a million times and looks for anything but a typed refusal.

    python scripts/fuzz_artifacts.py --executions 1000000 --out benchmarks/results

Mutations are of bytes (flips, cuts, copies, splices of two files) and of text (numbers, brackets,
keys that parsers disagree on). They follow from the seed, so that a finding can be made again.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.fuzz_targets import TARGETS, Target, run_one

WORDS = (
    *(b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-0", b"0.0", b"9" * 30, b"[", b"{"),
    *(b"}", b"]", b'"', b",", b":", b"\\u0000", b"\\ud800", b"\xff\xfe", b'"$tensor"', b"[[[[["),
    *(b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", b"\xff" * 9 + b"\x01", b"\x7f\xff\xff\xff"),
    *(b'{"a":1,"a":2}', b'"__metadata__"', b'"F64"', b'"BOOL"', b"\x6a\x02\x0a\x00", b"\x32\x00"),
    *(b"9223372036854775808", b"-9223372036854775809", b"\x00" * 8, b"\xff" * 8, b"../", b"\x1b["),
)


def mutate(data: bytes, other: bytes, draws: random.Random) -> bytes:
    """One to four changes of a file, by draws alone; `other` may lend a piece."""
    found = bytearray(data)
    for _ in range(draws.choice((1, 1, 1, 2, 2, 4))):
        _change(found, other, draws)
    return bytes(found)


def _change(data: bytearray, other: bytes, draws: random.Random) -> None:
    at, kind = draws.randint(0, len(data)), draws.randrange(8)
    to = min(len(data), at + draws.choice((1, 1, 2, 4, 16, 64)))
    if kind == 0 and at < len(data):
        data[at] ^= 1 << draws.randrange(8)
    elif kind == 1 and at < len(data):
        data[at] = draws.randrange(256)
    elif kind == 2:
        data[at:at] = draws.choice(WORDS)
    elif kind == 3:
        data[at:to] = draws.choice(WORDS)
    elif kind == 4:
        del data[at:to]
    elif kind == 5:
        data[at:at] = data[at:to] * draws.choice((1, 2, 50))
    elif kind == 6:
        start = draws.randint(0, len(other))
        data[at:at] = other[start : start + draws.choice((1, 8, 64, 512))]
    else:
        del data[at:]


class Campaign:
    """One target's run: how many, what became of them, and the slowest, in CPU time."""

    def __init__(self, name: str, target: Target, seed: int) -> None:
        self.name, self.target = name, target
        self.draws = random.Random(f"{seed}-{name}")
        self.codes: Counter[str] = Counter()
        self.findings: list[dict[str, str]] = []
        self.slowest_s, self.slowest_bytes = 0.0, 0

    def run(self, executions: int) -> None:
        """Executes so many mutants, then each sound file once: those must pass."""
        for _ in range(executions):
            one, other = (self.draws.choice(self.target.corpus) for _ in range(2))
            self._execute(mutate(one, other, self.draws))
        for sound in self.target.corpus:
            self._execute(sound)

    def _execute(self, data: bytes) -> None:
        start = time.process_time()
        finding = run_one(self.target, data)
        seconds = time.process_time() - start
        self.codes["finding" if finding else "held"] += 1
        if finding:
            self.findings.append({"what": finding, "data": data[:4096].hex()})
        if seconds > self.slowest_s:
            self.slowest_s, self.slowest_bytes = seconds, len(data)

    def row(self, executions: int) -> dict[str, Any]:
        """What a result file says of it."""
        return {
            "target": self.name,
            "executions": executions,
            "findings": self.codes["finding"],
            "slowest_cpu_ms": round(1e3 * self.slowest_s, 2),
            "slowest_bytes": self.slowest_bytes,
            "examples": self.findings[:5],
        }


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--executions", type=int, default=20_000, help="over all targets")
    options.add_argument("--seed", type=int, default=0, help="of the mutations")
    options.add_argument("--out", type=Path, help="folder for fuzz-artifacts.json")
    given = options.parse_args()
    rows = list(campaigns(given.executions, given.seed))
    told = {
        "what": "mutants of sound files; a finding is anything but a typed refusal",
        "executions": sum(row["executions"] for row in rows),
        "findings": sum(row["findings"] for row in rows),
        "slowest_cpu_ms": max(row["slowest_cpu_ms"] for row in rows),
        "seed": given.seed,
        "python": platform.python_version(),
        "measured": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "rows": rows,
    }
    text = json.dumps(told, indent=2) + "\n"
    if given.out:
        (given.out / "fuzz-artifacts.json").write_text(text)
    print(text)
    sys.exit(1 if told["findings"] else 0)


def campaigns(executions: int, seed: int) -> Any:
    """One row a target, each with its share of the executions."""
    shares = sum(target.share for target in TARGETS.values())
    for name, target in TARGETS.items():
        campaign = Campaign(name, target, seed)
        part = -(-executions * target.share // shares)  # at least as many as asked for
        start = time.process_time()
        campaign.run(part)
        row = campaign.row(part)
        print(name, part, f"{time.process_time() - start:.0f} s of CPU", file=sys.stderr)
        yield row


if __name__ == "__main__":
    main()
