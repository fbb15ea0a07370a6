"""Rewrites the ladder of README.md from a finished `scripts/ladder.sh`, with all that it must name.

scripts/ladder.sh OUT && .venv/bin/python scripts/readme_ladder.py OUT
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from readme_table import ROOT, line, rewrite

BEGIN, END = "<!-- begin ladder: scripts/readme_ladder.py -->", "<!-- end ladder -->"
HEAD = ("rung", "tokens/s", "× best static", "τ", "calls", "verified tokens")
NAMES = {
    "plain": "plain decoding",
    "chain": "best static chain",
    "tree": "best static tree",
    "features": "R_feat: calibrated draft features (estimate)",
    "oracle": "R_prob: with the target's entropy (estimate)",
    "clairvoyant": "R_clair: knows the accepted path",
    "ceiling": "R_ceil: every draft accepted",
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("folder", type=Path, help="what scripts/ladder.sh wrote")
    options.add_argument("--readme", type=Path, default=ROOT / "README.md", help="page to rewrite")
    given = options.parse_args(arguments)
    block = ladder_block(given.folder)
    given.readme.write_text(rewrite(given.readme.read_text("utf-8"), block, BEGIN, END), "utf-8")
    print(f"rewrote {given.readme}")
    return 0


def ladder_block(folder: Path) -> str:
    """The table and the sentences that it may not stand without."""
    ladder = json.loads((folder / "ladder.json").read_text("utf-8"))
    cost = json.loads((folder / "cost_model.json").read_text("utf-8"))
    rows = [line(HEAD), "|---|" + "---:|" * 5, *(line(_cells(rung)) for rung in ladder["rungs"])]
    return "\n".join(rows) + "\n\n" + textwrap.fill(_facts(ladder, cost), 98) + "\n"


def _cells(rung: dict[str, Any]) -> tuple[str, ...]:
    known = rung["kind"] in ("chain", "tree", "policy")
    name = " ".join([NAMES.get(rung["kind"], ""), f"`{rung['label']}`" if known else ""]).strip()
    return (
        name,
        _span(rung["tokens_per_s"], ".0f"),
        _span(rung["against_static"], ".2f"),
        f"{rung['mean_acceptance_length']['value']:.2f}",
        f"{rung['calls']}",
        f"{rung['verified_tokens']}",
    )


def _span(interval: dict[str, float], form: str) -> str:
    value, low, high = (format(interval[name], form) for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _facts(ladder: dict[str, Any], cost: dict[str, Any]) -> str:
    machine, prompts = cost["machine"], ladder["num_prompts"]
    headroom = ladder["split"]["headroom"]
    share = " to ".join(f"{100 * headroom[side]:+.1f}%" for side in ("low", "high"))
    return (
        f"Replayed, not decoded: {ladder['target']} + {ladder['drafter']} (a fixture, no claim "
        f"about large models), greedy, batch {ladder['batch_size']}, {prompts['held_out']} "
        f"held-out prompts, {ladder['rungs'][0]['num_tokens']} tokens; static settings and "
        f"calibrations were tuned on {prompts['train']} others. Times are the cost model's, "
        f"measured on {machine['device']}, {machine['num_threads']} thread, {machine['dtype']}. "
        "95% intervals by prompt. What it means: an estimate of the best tree lies "
        f"{share} above the best static setting. That is about what a policy could still gain "
        "on this pair and machine; the rest of the way to R_clair needs to know the outcome. The "
        "published defaults are made for machines on which verifying 48 tokens costs what one "
        "does; on this one it costs 2.5 times as much, so they lose to a small tuned tree."
    )


if __name__ == "__main__":
    sys.exit(main())
