"""Puts the results of a GPU call where they belong: benchmarks/results, docs/gpu.md, the clocks.

    python -m scripts.gpu.publish FOLDER    the files that came back from call1.sh or call2.sh
    python -m scripts.gpu.publish           the table of docs/gpu.md anew

Figures of the page are never typed: they stand between two markers, and a test holds them to this
script.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.pages import table, with_part

ROOT = Path(__file__).parents[2]
RESULTS, CLOCKS = ROOT / "benchmarks/results", ROOT / "specctl/replay/cost/clocks"
PAGE, HEADLINE = ROOT / "docs/gpu.md", "cuda_headline-cuda.json"
PREDICTED = {
    ("ar", 1, "graphs"): ("6.5 to 7.5", "5.0"),
    ("eagle2 8-10-60", 1, "graphs"): ("10 to 12.5", "7.4"),
    ("ar", 1, "eager"): ("10 to 16", "5.0"),
    ("eagle2 8-10-60", 1, "eager"): ("18 to 28", "7.4"),
    ("transformers generate", 1, "generate"): ("22 to 30", ""),
}
"""Milliseconds a round and its floor, by system, batch size and mode: written down before any GPU
ran this, for an H100 (copy bandwidth 3.0 TB/s) and 1,024 tokens of text."""
WHOLE = ("cuda_", "cost_model-", "kernel-", "decode-", "smoke.json")
"""First letters of the files that are kept."""


def rows_of(headline: dict[str, Any] | None) -> str:
    """The rows of the headline beside the predictions; without a headline, the predictions."""
    names = ("system", "batch", "mode", "predicted ms", "measured ms", "least to most")
    lines = []
    rows = headline["rows"] if headline else [labels(key) for key in PREDICTED]
    for row in rows:
        key = (row["system"], row["batch"], row["mode"])
        predicted, floor = PREDICTED.get(key, ("", ""))
        told = [*map(str, key), predicted, row.get("skipped", "not measured"), ""]
        if "ms" in row:
            told[4:] = [f"{row['ms']:.2f}", f"{row['min_ms']:.2f} to {row['max_ms']:.2f}"]
            floor = f"{row['floor_ms']:.2f}"
        ratios = [f"{row[name]:.2f}" if name in row else "" for name in ("of_floor", "pays_from")]
        lines.append((*told, floor, *ratios))
    return table((*names, "floor ms", "× floor", "pays from"), lines)


def labels(key: tuple[str, int, str]) -> dict[str, Any]:
    return dict(zip(("system", "batch", "mode"), key, strict=True))


def caption(headline: dict[str, Any] | None) -> str:
    """The machine and the regime of the rows."""
    if headline is None:
        return "Nothing was measured yet: no GPU has run this."
    machine = headline["machine"]
    return (
        f"{machine['device']}, torch {machine['torch']}, Triton {machine['triton']}, transformers "
        f"{machine['transformers']}, {machine['measured'][:10]}; {headline['shape']} shape, random "
        f"weights, {headline['context']:,} tokens of text, greedy, medians of "
        f"{headline['rounds']} rounds; copy {headline['copy'] / 1e6:.2f} TB/s."
    )


def written(page: str, headline: dict[str, Any] | None) -> str:
    """The page with its table anew."""
    part = f"{caption(headline)}\n\n{rows_of(headline)}\n"
    return with_part(page, "headline", "scripts/gpu/publish.py", part)


def headline_of(results: Path) -> dict[str, Any] | None:
    path = results / HEADLINE
    found: dict[str, Any] | None = json.loads(path.read_text("utf-8")) if path.exists() else None
    return found


def files_of(folder: Path) -> Iterator[Path]:
    """All JSON files of a call; those of its archive first, which is as old as its last step."""
    with tempfile.TemporaryDirectory() as unpacked:
        archive = folder / "results.tgz"
        if archive.exists():
            with tarfile.open(archive) as given:
                given.extractall(unpacked, filter="data")
        for place in (Path(unpacked), folder):
            yield from (path for path in place.rglob("*.json") if path.name.startswith(WHOLE))


def clock_name(model: dict[str, Any]) -> str:
    """The name that a cost table goes by: the card's model, the pair's shape."""
    card = re.search(r"\b([ABHLV]\d{1,3}|RTX \w+)\b", model["machine"]["device"])
    word = card.group(1) if card else model["machine"]["device"]
    return re.sub(r"\W+", "-", word).lower() + "-8b-eagle3"


def main() -> None:
    if len(sys.argv) > 1:
        for path in files_of(Path(sys.argv[1])):
            text = path.read_text("utf-8")
            if path.name == "cost_model-8b-cuda.json":
                target = CLOCKS / f"{clock_name(json.loads(text))}.json"
            else:
                target = RESULTS / path.name
            target.write_text(text, "utf-8")
            print(target.relative_to(ROOT))
    PAGE.write_text(written(PAGE.read_text("utf-8"), headline_of(RESULTS)), "utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
