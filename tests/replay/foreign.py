"""Small foreign files, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specctl.replay.foreign.importer import Imported, ImportOptions, import_file
from specctl.replay.foreign.traces import ImportedTraces


def write_rows(path: Path, *rows: Any) -> Path:
    """One JSON value a line; text is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return path


def request(name: str, generated: int, prompt: int = 3, **lists: Any) -> dict[str, Any]:
    """One line of per-position acceptance; `eagle=[...]` becomes `acc_eagle`."""
    return {
        "id": name,
        "prompt_token_ids": [5] * prompt,
        "generated_token_ids": [7] * generated,
        **{f"acc_{key}": {"acc_len": values} for key, values in lists.items()},
    }


def import_rows(folder: Path, *rows: Any, **options: Any) -> ImportedTraces:
    """Writes rows, imports them, gives the traces."""
    source = write_rows(folder / "source.jsonl", *rows)
    traces = imported(source, folder / "out", **options).traces
    assert traces is not None
    return traces


def imported(source: Path, out: Path | None = None, **options: Any) -> Imported:
    return import_file(source, out, ImportOptions(**options))
