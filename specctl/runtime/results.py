"""Results on disk: `results.json`, and the texts of each policy as JSONL."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specctl.errors import OutputError
from specctl.runtime.compare import RunResult
from specctl.runtime.conversations import Conversation, DecodeSettings
from specctl.runtime.hardware import hardware_name
from specctl.runtime.jsonable import finite
from specctl.runtime.load import Pair


def check_results_folder(folder: Path | None) -> None:
    """Creates the folder, before any work is done for it."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".specctl-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unwritable(folder, error) from error


def write_results(
    folder: Path,
    results: Sequence[RunResult],
    pair: Pair,
    settings: DecodeSettings,
    batch_size: int,
) -> None:
    """Writes `results.json` (a list, one object a policy), `run.json` and `<policy>.jsonl`."""
    num_prompts = max((len(result.conversations) for result in results), default=0)
    try:
        _write_json(folder / "results.json", [result.summary() for result in results])
        _write_json(folder / "run.json", describe_run(pair, settings, batch_size, num_prompts))
        for result in results:
            lines = [json.dumps(_texts(c), ensure_ascii=False) for c in result.conversations]
            name = re.sub(r"[^A-Za-z0-9._=-]+", "_", result.named.label)
            (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    except OSError as error:
        raise _unwritable(folder, error) from error


def describe_run(
    pair: Pair, settings: DecodeSettings, batch_size: int, num_prompts: int
) -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "pair": pair.fingerprint.model_dump(),
        "num_prompts": num_prompts,
        "dtype": str(pair.target.model.dtype).removeprefix("torch."),
        "device": hardware_name(pair.target.model.device),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "batch_size": batch_size,
        "max_new_tokens": settings.max_new_tokens,
        "sampling": vars(settings.sampling),
    }


def _texts(conversation: Conversation) -> dict[str, Any]:
    done = conversation.completions
    return {
        "prompt_id": conversation.prompt.prompt_id,
        "category": conversation.prompt.category,
        "texts": conversation.texts,
        "token_ids": [list(completion.token_ids) for completion in done],
        "finish_reasons": [completion.finish_reason for completion in done],
        "accepted_lengths": [completion.metrics.accepted_lengths for completion in done],
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n", "utf-8")


def _unwritable(folder: Path, error: OSError) -> OutputError:
    return OutputError(
        f"results folder {folder}",
        expected="a folder that can be written",
        found=error.strerror or type(error).__name__,
        fix="choose another --out",
    )
