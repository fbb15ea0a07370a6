"""Results on disk: `results.json`, and the texts of each policy as JSONL."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specctl.runtime.compare import RunResult
from specctl.runtime.conversations import Conversation, DecodeSettings
from specctl.runtime.hardware import hardware_name
from specctl.runtime.load import Pair
from specctl.runtime.output import json_bytes, write_whole
from specctl.runtime.runnable import Decisions

WHAT = "results"


def write_results(
    folder: Path,
    results: Sequence[RunResult],
    pair: Pair,
    settings: DecodeSettings,
    batch_size: int,
    decisions: Decisions = "auto",
) -> None:
    """Writes `results.json` (a list, one object a policy), `run.json` and `<policy>.jsonl`.

    Raises:
        OutputError: a file cannot be written.
    """
    num_prompts = max((len(result.conversations) for result in results), default=0)
    facts = describe_run(pair, settings, batch_size, num_prompts) | {"decisions": decisions}
    write_whole(folder / "results.json", json_bytes([r.summary() for r in results]), WHAT)
    write_whole(folder / "run.json", json_bytes(facts), WHAT)
    for result in results:
        lines = [json.dumps(_texts(c), ensure_ascii=False) for c in result.conversations]
        name = re.sub(r"[^A-Za-z0-9._=-]+", "_", result.named.label)
        write_whole(folder / f"{name}.jsonl", ("\n".join(lines) + "\n").encode(), WHAT)


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
