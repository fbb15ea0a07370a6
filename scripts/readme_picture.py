"""Draws docs/settings.svg, the picture of README.md, from a finished `scripts/ladder.sh`.

scripts/ladder.sh OUT && .venv/bin/python scripts/readme_picture.py OUT
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "settings.svg"
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#666666"
"""Okabe and Ito's, distinct without colour vision."""
DEFAULTS = {
    "ar": "no drafts",
    "chain": "chain of 4",
    "eagle2": "EAGLE-2's default tree",
    "eagle2:depth=9": "its larger tree",
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("folder", type=Path, help="what scripts/ladder.sh wrote")
    options.add_argument("-o", "--out", type=Path, default=PICTURE, help="picture to write")
    given = options.parse_args(arguments)
    scores = json.loads((given.folder / "replay.json").read_text("utf-8"))
    ladder = json.loads((given.folder / "ladder.json").read_text("utf-8"))
    draw(scores["policies"], ladder["rungs"], given.out)
    print(f"wrote {given.out}")
    return 0


def tokens_per_s(pooled: dict[str, Any]) -> float:
    return 1e6 * float(pooled["num_tokens"]) / float(pooled["time_us"])


def draw(policies: Sequence[dict[str, Any]], rungs: Sequence[dict[str, Any]], out: Path) -> None:
    """Settings by acceptance length and speed, the best marked, and what is possible beyond.

    Args:
        policies: of `replay.json`. rungs: of `ladder.json`.
    """
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    figure.patch.set_facecolor("white")
    axes = figure.subplots()
    figures = {one["policy"]: one["pooled"] for one in policies}
    place = {
        name: (found["ratios"]["mean_acceptance_length"]["value"], tokens_per_s(found))
        for name, found in figures.items()
        if not found["is_marked"]  # the log lacks some of it
    }
    chains = sorted(at for name, at in place.items() if name.startswith("chain:"))
    trees = [
        at for name, at in place.items() if name.startswith("eagle2:") and name not in DEFAULTS
    ]
    axes.plot(*zip(*chains, strict=True), "-o", color=BLUE, ms=5, label="chains of 1 to 8 tokens")
    axes.plot(*zip(*trees, strict=True), "s", color=ORANGE, ms=5, alpha=0.75, label="trees")
    for name, words in ((n, w) for n, w in DEFAULTS.items() if n in place):
        axes.plot(*place[name], "D", color=GREY, ms=7)
        axes.annotate(words, place[name], (8, -13), textcoords="offset points", color="#333333")
    best = max(place, key=lambda name: place[name][1])
    axes.plot(*place[best], "*", color="black", ms=17, zorder=3)
    size = best.replace("eagle2:", "").replace(":", ", ").replace("_", " ")
    axes.annotate(
        f"best here: {size}",
        place[best],
        (0, 13),
        textcoords="offset points",
        ha="center",
        weight="bold",
    )
    for rung in rungs:
        if rung["kind"] == "oracle":
            rate = rung["tokens_per_s"]["value"]
            axes.axhline(rate, color=GREEN, ls="--", lw=1.4)
            words = "best tree at every token, chosen with knowledge of the target (estimate)"
            axes.annotate(words, (1, rate), (2, 4), textcoords="offset points", color=GREEN)
    axes.set_xlabel("tokens per call of the target (acceptance length)")
    axes.set_ylabel("tokens per second, replayed")
    axes.margins(x=0.09, y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    FigureCanvasSVG(figure)
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    sys.exit(main())
