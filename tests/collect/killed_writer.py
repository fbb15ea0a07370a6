"""The process that test_kill.py kills: it collects made-up prompts as fast as it can."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from specctl.collect.recorder import RecorderConfig, TraceRecorder
from specctl.collect.store import TraceWriter
from tests.collect.rounds import header, random_record, request

PLANNED = [f"p{number}" for number in range(20_000)]
NUM_ROUNDS = 3
EAGER = RecorderConfig(flush_s=0.0, wake_s=0.001, max_rounds=16)


def collect(root: Path, acks: Connection) -> None:
    """Collects what is pending; each prompt goes to `acks` once its commit returned."""
    torch.set_num_threads(1)
    rounds = [random_record(["x"], step, seed=step) for step in range(NUM_ROUNDS)]
    with (
        TraceWriter.open(root, header(), resume=True) as writer,
        TraceRecorder(writer, EAGER, lambda commit: acks.send(commit.prompt_ids)) as recorder,
    ):
        for prompt in writer.pending(PLANNED):
            for record in rounds:
                recorder.on_round(replace(record, requests=[request(prompt)]))
            recorder.finish_prompt(prompt)
