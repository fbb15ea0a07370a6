"""Systems beside the tuned static setting, on held-out prompts of one dense log, by the verbs.

    python benchmarks/bench_systems.py TRACES... --cost-models cost_model.json line --requests 1 8

Each system is fitted once to the training half (`specctl fit`) and has its setting chosen there on
every clock and load (`specctl tune`), as the tuned static setting has; the other half is measured.
Of a log without C2T's children or ECHO's levels their fits say so and are left out. Shared budgets
need more than one request.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common

HELD_OUT = ("--held-out", "0.5")
FITS = {
    "HeteroSpec": ["cart"],
    "C2T, paper": ["c2t", "--preset", "c2t-paper"],
    "ECHO, paper": ["echo", "--preset", "echo-paper"],
    "survival table": ["survival"],
}
"""A system, and how it is fitted; MARS and AdaSD's acceptance change the text: no log tells."""
UNFITTED = {"threshold": "threshold", "AdaSD's stop": "adasd_stop"}
SHARED = {"survival budget": "eagle2+survival", "ECHO's budget": "eagle2+echo_budget"}


def main() -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("traces", nargs="+", type=Path, help="dense folders of one pair")
    options.add_argument("--cost-models", nargs="+", default=["line"], help="files or named clocks")
    options.add_argument("--requests", nargs="+", type=int, default=[1], help="at a time")
    options.add_argument("--work", type=Path, help="keep fits here; default: made anew")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(measured(given, given.work or Path(folder)))
    common.report("systems", rows, given, "time: over the tuned static setting's, held-out prompts")


def measured(given: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """A row for each clock, load and system."""
    named = {name: fitted(words, given.traces, work) for name, words in FITS.items()}
    families = {name: str(place) for name, place in named.items() if place} | UNFITTED
    for clock in given.cost_models:
        for requests in given.requests:
            asked = families | (SHARED if requests > 1 else {})
            yield from tuned(asked, clock, requests, given.traces, work)


def fitted(words: Sequence[str], traces: Sequence[Path], work: Path) -> Path | None:
    """The artifact's folder, made unless it is there; None where the fit refuses the log."""
    out = work / words[0]
    command = ["fit", words[0], *map(str, traces), *words[1:], *HELD_OUT, "-o", str(out)]
    return out if out.exists() or specctl(command) is not None else None


def tuned(
    families: dict[str, str], clock: str, requests: int, traces: Sequence[Path], work: Path
) -> Iterator[dict[str, Any]]:
    """The best setting of every family by the training prompts, measured on the others."""
    words = [word for family in families.values() for word in ("--family", family)]
    command = ["tune", *map(str, traces), "--cost-model", clock, *words, *HELD_OUT]
    found = specctl([*command, "--batch-size", str(requests), "--json"])
    if found is None:
        raise SystemExit(1)
    names = {family: name for name, family in families.items()}
    for row in json.loads(found)["policies"]:
        rate, held_out = row["held_out"]["against"], row["held_out"]
        yield {
            "clock": common.named(clock),
            "requests": requests,
            "system": names.get(row["family"], f"static: {row['family']}"),
            "setting": row["policy"].replace(f"{work}/", ""),
            "time": change(rate),
            "tau": held_out["mean_acceptance_length"]["value"],
            "verified": held_out["verified_per_call"]["value"],
            "support": held_out["support"],
        }


def change(rate: dict[str, float]) -> str:
    """`-10.5 % [-11.3, -9.8]` of time, from a ratio of rates."""
    value, high, low = (100 / rate[name] - 100 for name in ("value", "low", "high"))
    return f"{value:+.1f} % [{low:+.1f}, {high:+.1f}]"


def specctl(words: Sequence[str]) -> str | None:
    """Standard output of a command; None, with its refusal printed, where it failed."""
    print("specctl", *words, file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "specctl", *words], capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    return done.stdout if done.returncode == 0 else None


if __name__ == "__main__":
    main()
