"""What every benchmark shares: options, machine, results on disk and as a table.

Needs what the runtime needs and nothing else: on the machine with the GPU there is no more.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from kernels.timing import print_table

from specctl.runtime.identity import hardware_name

RESULTS = Path(__file__).parent / "results"


def parser(description: str) -> argparse.ArgumentParser:
    """Options that all benchmarks take."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--device", default="cpu", help="cpu or cuda")
    options.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16")
    options.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    options.add_argument("--prompts", default="embedded", help="prompt file, or 'embedded'")
    options.add_argument("--num-prompts", type=int, default=24, help="prompts, evenly spread")
    options.add_argument("--max-new-tokens", type=int, default=64, help="tokens per prompt")
    options.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    return options


def machine(device: str) -> dict[str, Any]:
    """Where the figures were measured."""
    return {
        "device": hardware_name(torch.device(device)),
        "num_threads": torch.get_num_threads(),
        "num_cpus": torch.multiprocessing.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "measured": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def report(
    name: str, rows: Sequence[dict[str, Any]], options: argparse.Namespace, note: str
) -> None:
    """Prints the table and writes `<out>/<name>-<device>.json`."""
    print(note)
    print_table(rows)
    write(name, rows, options, note)


def write(
    name: str, rows: Sequence[dict[str, Any]], options: argparse.Namespace, note: str
) -> None:
    """Writes `<out>/<name>-<device>.json`."""
    settings = {key: named(value) for key, value in vars(options).items() if key != "out"}
    value = {"machine": machine(options.device), "settings": settings, "note": note, "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}-{options.device.partition(':')[0]}.json"
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def named(value: object) -> str:
    """A setting in words; of files their names, since folders are of one machine alone."""
    if isinstance(value, list | tuple):
        return ", ".join(map(named, value))
    text = str(value)
    return Path(text).name if "/" in text else text
