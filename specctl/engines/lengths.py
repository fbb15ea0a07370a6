"""Draft lengths by load as an engine's own settings, for a server whose drafter stays as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence

from specctl.engines.sglang_flags import ADAPTIVE_FILE, slots_of
from specctl.engines.vllm_flags import triples_of

Schedule = Sequence[tuple[int, int]]
"""First batch size and draft tokens of each stretch of loads; 0 is plain decoding."""


def length_lines(engine: str, schedule: Schedule, most: int) -> list[str]:
    """What to change in the command of a server that drafts already, one sentence a line.

    Args:
        engine: `vllm`, `sglang` or `llamacpp`. schedule: of at least one stretch.
        most: the largest load that was judged.
    """
    lengths = [length for _, length in schedule]
    if not any(lengths):
        return [f"Set: start the server without {_OFF[engine]}."]
    schedule = _from_1(schedule)
    if engine == "vllm":
        return _vllm(schedule, most)
    return (_sglang if engine == "sglang" else _llamacpp)(schedule)


_OFF = {
    "vllm": "--speculative-config",
    "sglang": "--speculative-algorithm",
    "llamacpp": "--spec-type",
}


def _from_1(schedule: Schedule) -> Schedule:
    """The schedule with its first stretch from one request on, as engines want it."""
    (_, first), *rest = schedule
    return [(1, first), *rest]


def _columns(schedule: Schedule) -> tuple[list[int], list[int]]:
    return [start for start, _ in schedule], [length for _, length in schedule]


def _vllm(schedule: Schedule, most: int) -> list[str]:
    keys = {"num_speculative_tokens": max(length for _, length in schedule)}
    lines = [f"Set in --speculative-config: {json.dumps(keys)[1:-1]}."]
    if len(schedule) > 1:
        triples = triples_of(*_columns(schedule), most)
        by_load = json.dumps({"num_speculative_tokens_per_batch_size": triples})[1:-1]
        lines = [f"Set in --speculative-config: {json.dumps(keys)[1:-1]}, {by_load} (vLLM 0.24)."]
    return lines


def _sglang(schedule: Schedule) -> list[str]:
    most = max(length for _, length in schedule)
    flags = f"--speculative-num-steps {most} --speculative-eagle-topk 1 "
    flags += f"--speculative-num-draft-tokens {most + 1}"
    if len(schedule) == 1:
        return [f"Set: {flags} (the root counts as a draft token)."]
    slots = json.dumps(slots_of(*_columns(schedule)))
    flags += f" --speculative-adaptive --speculative-adaptive-config {ADAPTIVE_FILE}"
    return [f"Set: {flags} (the root counts as a draft token), with {slots} in that file (EAGLE)."]


def _llamacpp(schedule: Schedule) -> list[str]:
    by_load = [
        f"--spec-draft-n-max {length}" if length else "no --spec-type" for _, length in schedule
    ]
    starts = [f"from {start} request{'' if start == 1 else 's'} on" for start, _ in schedule]
    if len(schedule) == 1:
        return [f"Set: {by_load[0]}."]
    parts = [f"{what} {when}" for what, when in zip(by_load, starts, strict=True)]
    return [f"Set, as llama.cpp has one length for all loads: {'; '.join(parts)}."]
