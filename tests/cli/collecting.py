"""The process that test_interrupt.py kills: the real `specctl collect`, started quickly.

It tells its parent when decoding starts and how many prompts each commit acknowledged, and goes on
when the parent answers. Commits come more often than by default, so that a kill has something to
hit, and no machine is too fast for it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from specctl import cli, console
from specctl.collect import recorder

STARTED = "started"


def collect(arguments: list[str], acks: Connection) -> None:

    @contextmanager
    def progress(label: str, total: int | None) -> Iterator[Any]:
        if total is not None:  # else the models are loaded
            acks.send(STARTED)

        def tick(num_prompts: int) -> None:
            acks.send(num_prompts)
            acks.recv()

        yield tick

    torch.set_num_threads(1)
    console.progress = progress  # type: ignore[assignment]
    eager = functools.partial(recorder.RecorderConfig, flush_s=0.1)
    recorder.RecorderConfig = eager  # type: ignore[assignment,misc]
    sys.argv = ["specctl", "collect", *arguments]
    cli.main()
