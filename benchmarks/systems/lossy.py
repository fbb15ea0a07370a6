"""MARS and AdaSD: their text is their own, so their rows come from paired live runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BENCHES = {"MARS": "mars-cpu.json", "AdaSD": "adasd-cpu.json"}


def lossy_results(folder: Path) -> dict[str, Any]:
    """What the benchmarks of the lossy systems wrote; None where one has not run."""
    return {
        name: json.loads(path.read_text("utf-8")) if (path := folder / file).exists() else None
        for name, file in BENCHES.items()
    }
