"""Rewrites the figures of README.md from a finished `make demo`, with all that a figure must name.

    make demo && .venv/bin/python -m scripts.readme_table

`scripts/smollm2/publish.py` writes SmolLM2's figures into the same place.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.pages import interval, table, with_part
from specctl.cli.running import equality_line

ROOT = Path(__file__).parents[1]
FIGURES = ("figures", "scripts/readme_table.py or scripts/smollm2/publish.py")
"""Name of the part of the page, and the scripts that write it."""
PICTURE = """\
![Settings by acceptance length and speed](docs/settings.svg)

Every point is one setting, computed from one log without the models. The most tokens a call are not
the fastest, as drafting and checking take time; the green line is the gain that is left. The pair
is that of the package, a fixture of 6.6 million parameters, no evidence about large models. `make
demo` tunes it for your machine and decodes other prompts:

"""
MEANING = """
`ar` is plain decoding, `chain` a chain of 4 tokens, `eagle2` EAGLE-2's tree of 48. `hetero` and
`c2t` are policies of two papers, fitted to this pair. `best` is the choice of `specctl tune`.
"""
HEAD = (
    "policy",
    "tokens/s",
    "× plain",
    "tokens a call",
    "calls",
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--demo", type=Path, default=ROOT / ".demo", help="folder of the demo")
    options.add_argument("--readme", type=Path, default=ROOT / "README.md", help="page to rewrite")
    parsed = options.parse_args(arguments)
    page = parsed.readme.read_text("utf-8")
    parsed.readme.write_text(with_part(page, *FIGURES, demo_block(parsed.demo)), "utf-8")
    print(f"rewrote {parsed.readme}")
    return 0


def demo_block(demo: Path) -> str:
    """The picture, the table and the sentences around them."""
    rows = json.loads((demo / "results.json").read_text("utf-8"))
    run = json.loads((demo / "run.json").read_text("utf-8"))
    facts = textwrap.fill(_facts(rows, run), 98)
    return f"{PICTURE}{table(HEAD, map(_cells, rows))}\n\n{facts}\n{MEANING}"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"`{row['policy']}`",
        f"{row['tokens_per_s']:.0f}",
        interval(row["paired"]["speedup"]).text(".2f") if row["paired"] else "1",
        f"{row['mean_acceptance_length']:.2f}",
        f"{row['calls']}",
    )


def _facts(rows: Sequence[dict[str, Any]], run: dict[str, Any]) -> str:
    pair, sampling = run["pair"], run["sampling"]
    law = "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']}"
    target, drafter = (
        f"{name} ({digest.removeprefix('sha256:')[:12]})"
        for name, digest in (
            (pair["target"], pair["target_digest"]),
            (pair["drafter"], pair["drafter_digest"]),
        )
    )
    note = ", a fixture" if pair["target"] == "embedded" else ""
    return (
        f"Measured on {run['device']} ({run['num_cpus']} cores, torch {run['torch']} on "
        f"{run['num_threads']} of them), "
        f"{run['dtype']}. Pair: {target} + {drafter}{note}. "
        f"n = {run['num_prompts']} prompts, {rows[0]['num_tokens']} tokens a policy "
        f"({run['max_new_tokens']} a turn at most), {law}, "
        f"batch {run['batch_size']}. "
        "tokens/s is Σ tokens / Σ time, policies in turns, prompt by prompt, in shuffled order; "
        f"95% intervals over prompts. {run['verdict']} {equality_line(rows)}"
    )


if __name__ == "__main__":
    sys.exit(main())
