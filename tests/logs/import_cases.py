"""Small logs and metrics of servers, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specctl.errors import InputError
from specctl.logs.importing import import_files
from specctl.logs.sources import Source


def imported(*texts: str | bytes | Path) -> dict[str, Any]:
    """The summary of files, or of texts that stand for files `0`, `1`, ..."""
    sources = [
        Source.of(text)
        if isinstance(text, Path)
        else Source(str(place), text if isinstance(text, bytes) else text.encode())
        for place, text in enumerate(texts)
    ]
    return import_files(sources)


def figures(*texts: str | bytes | Path) -> dict[str, Any]:
    """Figures of the only model, log or length."""
    found = imported(*texts)
    [own] = found.get("models", {"": found}).values()
    return dict(own)


def refused(*texts: str | bytes | Path) -> str:
    with pytest.raises(InputError) as refusal:
        imported(*texts)
    assert len(refusal.value.line) < 700
    return refusal.value.line


def taus(found: dict[str, Any]) -> list[list[float]]:
    """The range of τ of each length."""
    return [c["mean_acceptance_length_range"] for c in found["fixed_length_sweep"]["chains"]]


# --------------------------------------------------------------------------- vLLM

VLLM_START = (
    "(APIServer pid=7) INFO 11-24 05:00:00 [startup.py:41] "
    " ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0"
)
ROUNDS = ((3, 0, 1, 2), (3, 3, 0, 0, 1), (2, 1, 0))
"""Accepted tokens of rounds with three draft tokens, of three intervals."""


def vllm_load(running: int = 2, engine: int = 0) -> str:
    return (
        f"Engine {engine:03d}: Avg prompt throughput: 12.3 tokens/s, Avg generation throughput: "
        f"26.0 tokens/s, Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: 1.2%, "
        "Prefix cache hit rate: 0.0%"
    )


def vllm_figures(
    accepted: Sequence[int], num_positions: int = 3, drafted: Sequence[int] = (), release: str = ""
) -> str:
    """As vLLM prints an interval, given the tokens of each of its rounds.

    Args:
        release: "0.9" for its order of figures, "0.9-" with the bonus token left out of the mean.
    """
    num_rounds, total = len(accepted), sum(accepted)
    num_drafted = sum(drafted) or num_rounds * num_positions
    rates = [sum(n > place for n in accepted) / num_rounds for place in range(num_positions)]
    mean = total / num_rounds + (release != "0.9-")
    share = f"{100 * total / num_drafted:.1f}%"
    counts = f"Accepted: {total} tokens, Drafted: {num_drafted} tokens, Per-position acceptance "
    counts += f"rate: {', '.join(f'{rate:.3f}' for rate in rates)}"
    if release:
        return (
            f"SpecDecoding metrics: Draft acceptance rate: {share}, Mean acceptance length: "
            f"{mean:.2f}, {counts}"
        )
    return (
        f"SpecDecoding metrics: Mean acceptance length: {mean:.2f}, Accepted throughput: "
        f"{total / 10:.2f} tokens/s, Drafted throughput: {num_drafted / 10:.2f} tokens/s, "
        f"{counts}, "
        f"Avg Draft acceptance rate: {share}"
    )


def vllm_log(
    rounds: Sequence[Sequence[int]] = ROUNDS, process: str = "APIServer pid=7"
) -> list[str]:
    """vLLM's lines of intervals, ten seconds apart."""
    lines = []
    for place, accepted in enumerate(rounds):
        time = f"11-24 05:{place // 6:02d}:{place % 6}0"
        before = f"({process}) INFO {time} " if process else f"INFO {time} "
        lines += [f"{before}[loggers.py:310] {vllm_load()}"]
        lines += [f"{before}[metrics.py:120] {vllm_figures(accepted)}"]
    return lines


# --------------------------------------------------------------------------- SGLang


def sglang_start(
    arguments: str = "speculative_eagle_topk=1, speculative_num_draft_tokens=4",
) -> str:
    return (
        "[2026-11-25 07:00:00] server_args=ServerArgs(model_path='m', "
        f"speculative_algorithm='EAGLE3', {arguments}, port=30000)"
    )


def sglang_line(
    running: int, length: float, rate: float | None = None, second: int = 5, rank: str = " TP0"
) -> str:
    shown = "" if rate is None else f"accept rate: {rate:.2f}, "
    return (
        f"[2026-11-25 07:00:{second:02d}{rank}] Decode batch, #running-req: {running}, "
        f"#token: 300, token usage: 0.03, accept len: {length:.2f}, {shown}cuda graph: True, gen "
        "throughput (token/s): 812.10, #queue-req: 0"
    )


INTERVALS = ((4, 2.5, 0.5), (8, 2.35, 0.45), (6, 2.2, 0.4))


def sglang_log(
    intervals: Sequence[tuple[int, float, float | None]] = INTERVALS, arguments: str | None = None
) -> list[str]:
    start = [] if arguments == "" else [sglang_start(arguments) if arguments else sglang_start()]
    prefill = "[2026-11-25 07:00:01 TP0] Prefill batch, #new-seq: 4, #new-token: 52, #queue-req: 0"
    lines = [sglang_line(*one, second=5 + place) for place, one in enumerate(intervals)]
    return [*start, prefill, *lines]


# --------------------------------------------------------------------------- llama.cpp


def llamacpp_log() -> list[str]:
    """Two requests of build 11549: 13 rounds with 38 draft tokens, and 14 with 42."""
    lines = []
    for task, time, sums, rates in (
        (
            0,
            "0.00.978.611",
            "34 accepted /    38 generated), mean len =  3.62",
            "0.923, 0.923, 0.769",
        ),
        (
            15,
            "0.01.978.611",
            "25 accepted /    42 generated), mean len =  2.79",
            "0.714, 0.571, 0.500",
        ),
    ):
        before = f"{time} I slot print_timing: id  0 | task {task} | "
        lines += [f"{before}draft acceptance = 0.89474 (   {sums}"]
        lines += [f"{before}     acc per pos = ({rates})"]
    return lines


# --------------------------------------------------------------------------- metrics

COUNTERS = (
    "num_drafts 10.0",
    "num_draft_tokens 30.0",
    "num_accepted_tokens 12.0",
    "per_pos 0 7.0",
    "per_pos 1 4.0",
    "per_pos 2 1.0",
)


def scrape(
    *lines: str,
    stem: str = "vllm:",
    suffix: str = "_total",
    created: float | None = 1.7e9,
    labels: str = 'engine="0",model_name="m"',
) -> str:
    """Lines such as `num_drafts 4` or `per_pos 0 3` as vLLM exposes them."""
    text = [f"# HELP {stem}spec_decode_num_drafts_total Drafts.", "process_cpu_seconds_total 1.5"]
    for line in lines or COUNTERS:
        name, *position, value = line.split()
        more = f',position="{position[0]}"' if position else ""
        name = "num_accepted_tokens_per_pos" if name == "per_pos" else name
        text.append(f"{stem}spec_decode_{name}{suffix}{{{labels}{more}}} {value}")
    if created is not None:
        text.append(f"{stem}spec_decode_num_drafts_created{{{labels}}} {created}")
    return "\n".join(text) + "\n"


def scrape_sglang(stem: str = "sglang:", **changes: Any) -> str:
    """SGLang's metrics of model m; a value of None leaves the name out."""
    gauges = {
        "spec_accept_length": 2.4,
        "spec_accept_rate": 0.4667,
        "spec_num_steps": 3.0,
        "spec_num_draft_tokens": 4.0,
    }
    counters = {
        "generation_tokens": 15000.0,
        "num_requests": 100.0,
        "num_aborted_requests": 0.0,
        "spec_verify_calls": 7000.0,
    }
    text = ["# HELP sglang:spec_accept_length Mean acceptance length of speculative decoding"]
    for name, value in ({**gauges, **counters} | changes).items():
        suffix = "_total" if name in counters else ""
        if value is not None:
            text.append(f'{stem}{name}{suffix}{{engine_type="unified",model_name="m"}} {value}')
    text.append(f'{stem}generation_tokens_total{{model_name="m",is_streaming="true"}} 3000.0')
    return "\n".join(text) + "\n"
