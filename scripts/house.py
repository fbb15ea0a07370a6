"""Prints how large each room of the package is beside its budget, and where it could be simpler.

    python scripts/house.py            a table, the longest functions, what is used once
    python scripts/house.py --check    only rooms that hold more than they may; exit code 1 if any

A room is a package below `specctl/`, or all its plain modules together. Budgets are those of the
design, in lines: the size at which a room was judged complete. A room may hold a tenth more, or
what `HELD` says. One that needs more raises its number here, in a commit that says why.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLAIN = "plain values"
BUDGETS = {
    PLAIN: 2000,
    "policy": 2800,
    "kernels": 4500,
    "stores": 1000,
    "artifacts": 2400,
    "registry": 1800,
    "runtime": 6000,
    "collect": 3600,
    "logs": 2600,
    "train": 3800,
    "replay": 5000,
    "report": 1000,
    "watch": 900,
    "engines": 2500,
    "cli": 2000,
}
TESTS = "tests"
TESTS_BUDGET, FILES_BUDGET = 30000, 230
SLACK = 1.1
HELD = {
    # 60 fit tables to a terminal, 45 say rules of pydantic in plain words and suggest names, 30
    # withhold intervals over few prompts, 20 state a gain over plain decoding, 65 hold what ran,
    # for a report, 30 say the system's and decoders' refusals in our words, 22 load torch where it
    # is used, so that imports need none (part 3).
    # 40 find what the text's end was followed by before (part 4).
    # 290 a Ray cluster: started, joined, refused; 78 tasks on it (part 5).
    # 38 draw resamples in blocks, 10 add to sums of groups as rows come, 30 know
    # errors of libraries that ran out of memory (part 5).
    # 55 the record of a watch (part 5).
    # 10 the GPUs of a worker, 16 what `auto` stands for where its cluster has ended (part 5).
    PLAIN: 3232,
    # Of these 90 are chains: by batch size, and in place of trees (part 2); 120 the marginal rule
    # of levels and a table of acceptance, 25 ECHO's reranked tree and words of papers,
    # 175 ratio verification of drafts that are drawn, and which stops it may have, 20 AdaEDL on a
    # tree, 90 copies of the text, a part of their own, and what they do not go with (part 4).
    "policy": 4160,
    "artifacts": 3125,  # 25 the twin and the self-test of a table of acceptance (part 4)
    "registry": 2727,  # the first digits of a digest; 12 read many histories at once (part 5)
    # 60 refuse words before models load, 35 skip prompts that are too long, 35 name a misspelt
    # setting, 40 are reprs and max_tokens, 30 say why a model cannot be loaded, 16 what public
    # fields hold (part 3).
    # 100 draw chains from the drafter and verify them whatever fails, 115 draft copies of the text
    # in some rows of a batch, and refuse to record them (part 4).
    # 72 spread a target over several GPUs, and refuse what has no room there (part 5).
    "runtime": 7904,  # 10 name the revision of a hub model that an engine loaded (part 2)
    # 40 write and verify prompts that span segments; 25 spread --limit, 70 read Parquet prompts
    # and leave out SPEED-Bench's placeholders (part 3).
    # 500 spread a collection over Ray workers that die, join and leave (part 5).
    # 20 record a run of `specctl run`, and a dense sample beside rounds (part 5).
    "collect": 4776,
    # 700 read servers' logs and metrics and say what they mean, 210 put together prompts
    # that span segments (part 2), 18 the recent part of a set (part 5).
    "logs": 4505,
    # 215 the table of acceptance, 120 presets of papers and their Eq. 2, 40 K_max by a clock,
    # 40 heat maps of scorers (part 4). 12 bounds of what is held (part 5).
    "train": 5302,
    # 300 vLLM's batches in replay and tuning, 590 its step times as a clock (part 2), 70 ranges in
    # rows of replay and the base tree of the traces (part 3), 210 a profile's check of itself,
    # 180 named clocks and what they do not know, 210 the time of policies' own decisions, 60
    # waiting told from work
    # 10 Φ of the path of highest own probability, 10 artifacts of another pair, 110 copies of the
    # text, exactly, what they cost and the search of their settings
    # (part 4). 270 keep sums by prompt in the place of rounds: scores, tallies and what lies beyond
    # a clock, added to chunk by chunk, 21 bounds of what fits and the ladder hold (part 5).
    # 5 the part of traces that fit mars reads, 9 one array for what the ladder holds (part 5).
    "replay": 9276,
    # 280 the answer in front: gains, distance, picture, engines; 45 measured runs, 50 terms that
    # are explained and text that breaks at the right places, 30 drawings for phones, less 120
    # replaced (part 3).
    # 95 the section of a watch (part 5).
    "report": 1387,
    # 65 the order of prompts and what was cut short, 155 what a change costs, 38 recall of gates
    # (part 5).
    "watch": 1202,
    # 110 lines are examples of help, 70 its groups, 60 config.toml, 100 --wide, --help-all and what
    # an interrupted verb left, 90 options of shared verbs on lines of their own, 570 quickstart and
    # doctor, 20 check choices of every verb (part 3).
    # 45 --preset, K_max by a clock, 2 a line on copied rounds (part 4).
    # 240 drift and recalibrate, 17 say what was sampled and
    # that memory ran out (part 5).
    # 240 drift and recalibrate (part 5).
    # 60 a dense sample of runs and collections, 35 --dense, report --drift (part 5).
    # 60 a dense sample of runs and collections (part 5).
    # 8 of these for what an engine serves (part 5).
    # 10 bound what fit mars reads of traces (part 5).
    "cli": 4457,  # 150 export, 40 profile --from, 25 weigh an import, 10 --unfinished (part 2)
    # 530 for prompts that span segments, 800 for what engines log, 450 for their batching, 1400 for
    # the plugin (part 2). 60 what to set, for a report (part 3).
    # 1,950 the plugin inside vLLM, 1,310 exports to four engines (part 2), 40 of drafts that are
    # drawn, 5 refuse copies (part 4).
    # 30 a dense sample beside a policy (part 5).
    "engines": 3456,
    # 450 tables at four widths, wrong inputs, settings; 410 packaging, reference; 270 the report,
    # which a browser measures too; 125 Parquet prompts; short digests, one meaning an option; 265
    # examples (part 3); 350 named clocks, deciders, the peer's simulator; 210 the table of
    # acceptance, copies, levels that stop; 720 sampled drafts by enumeration and a reference
    # 420 the papers written down, 250 copies of the text, 40 K_max of clocks with and without a
    # knee (part 4); 400 the alarm and its verbs
    # (part 5).
    # 115 memory that does not grow, and scores however rounds are grouped (part 5).
    # 520 collection on Ray (part 5).
    # 105 a dense sample beside a policy, 200 what a change costs, faults of a watch, its section
    # (part 5).
    # 105 a dense sample beside a policy (part 5).
    # 290 the loop of drift inside vLLM, and sets read from a time on (part 5).
    # 245 two devices of this process's memory, and a target over both (part 5).
    # 38 groups of prompts in a curve, what a sample of nodes holds, a ladder of some prompts
    # (part 5).
    TESTS: 47801,
}
"""What rooms above their budget may hold, since 2026-11-23: they may only shrink. Eight people who
each rewrote one or two of these rooms for two hours took 3,200 lines out of 53,000 and found no
more copies, mirrors or fragments; what remains are functions that users have, their docstrings and
their refusals (docs/LOG.md). Less takes a decision about what specctl does."""
ABOVE = {"cli", "console", "describe", "__main__", "__init__"}
"""Plain modules that belong to the command line."""


@dataclass
class Room:
    """What a room holds; functions as (lines, name, place)."""

    lines: int = 0
    files: int = 0
    classes: int = 0
    functions: list[tuple[int, str, str]] = field(default_factory=list)
    used_once: list[str] = field(default_factory=list)


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--check", action="store_true", help="only what holds too much")
    options.add_argument("--longest", type=int, default=12, help="functions to list; default: 12")
    asked = options.parse_args()
    rooms = measure(ROOT / "specctl")
    tests = sum(
        len(path.read_text("utf-8").splitlines()) for path in (ROOT / "tests").rglob("*.py")
    )
    over = list(outgrown(rooms, tests))
    if not asked.check:
        show(rooms, tests, asked.longest)
    for line in over:
        print(line)
    return 1 if over else 0


def measure(package: Path) -> dict[str, Room]:
    """Rooms by name, read from the source."""
    rooms: dict[str, Room] = {}
    words: Counter[str] = Counter()
    private: list[tuple[str, str]] = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text("utf-8")
        name = room_of(path.relative_to(package))
        room = rooms.setdefault(name, Room())
        room.lines += len(text.splitlines())
        room.files += 1
        words.update(re.findall(r"\w+", text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                room.classes += 1
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                place = f"{path.relative_to(package.parent)}:{node.lineno}"
                room.functions.append((length, node.name, place))
                if node.name.startswith("_") and not node.name.startswith("__"):
                    private.append((name, node.name))
    for name, function in private:
        if words[function] == 2:  # its definition and one use
            rooms[name].used_once.append(function)
    return rooms


def room_of(path: Path) -> str:
    top = path.parts[0]
    if top.removesuffix(".py") in ABOVE:
        return "cli"
    return PLAIN if len(path.parts) == 1 or top == "embedded" else top


def outgrown(rooms: dict[str, Room], num_test_lines: int) -> Iterator[str]:
    """Sentences on what is over its budget by more than a tenth, and over what it may hold."""
    sizes = {name: room.lines for name, room in sorted(rooms.items())} | {TESTS: num_test_lines}
    for name, lines in sizes.items():
        budget = (BUDGETS | {TESTS: TESTS_BUDGET}).get(name)
        if budget is None:
            yield f"{name}: a room without a budget; give it one in scripts/house.py, with a reason"
        elif lines > (limit := max(int(SLACK * budget), HELD.get(name, 0))):
            yield (
                f"{name}: {lines} lines, it may hold {limit} (budget {budget}); simplify it, or "
                "raise the number in scripts/house.py in a commit that says why"
            )


def show(rooms: dict[str, Room], num_test_lines: int, longest: int) -> None:
    print(
        f"{'room':14}{'lines':>7}{'budget':>8}{'':>6}{'files':>6}{'classes':>8}{'functions':>10}{'once':>6}"
    )
    for name in BUDGETS | rooms:
        room = rooms.get(name, Room())
        budget = BUDGETS.get(name, 0)
        share = f"{room.lines / budget:.0%}" if budget else ""
        print(
            f"{name:14}{room.lines:7}{budget:8}{share:>6}{room.files:6}{room.classes:8}"
            f"{len(room.functions):10}{len(room.used_once):6}"
        )
    lines, files = (
        sum(room.lines for room in rooms.values()),
        sum(room.files for room in rooms.values()),
    )
    print(f"{'specctl':14}{lines:7}{sum(BUDGETS.values()):8}{'':6}{files:6}")
    print(f"{'tests':14}{num_test_lines:7}{TESTS_BUDGET:8}")
    functions = sorted((found for room in rooms.values() for found in room.functions), reverse=True)
    print("\nLongest functions")
    for length, name, place in functions[:longest]:
        print(f"{length:5}  {name}  {place}")


if __name__ == "__main__":
    raise SystemExit(main())
