"""Small logs and metrics of servers, written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specctl.errors import InputError
from specctl.logs.importing import import_file
from tests.cli.command import write_lines


def scrape(path: Path, *lines: str, suffix: str = "_total") -> Path:
    """Lines such as `num_drafts 4` or `per_pos 0 3` as vLLM exposes them, engine 0 of model m."""
    text = ["# HELP vllm:spec_decode_num_drafts_total Drafts.", "process_cpu_seconds_total 1.5"]
    for line in lines:
        name, *position, value = line.split()
        label = f',position="{position[0]}"' if position else ""
        name = "num_accepted_tokens_per_pos" if name == "per_pos" else name
        text.append(f'vllm:spec_decode_{name}{suffix}{{engine="0",model_name="m"{label}}} {value}')
    text.append('vllm:spec_decode_num_drafts_created{model_name="m"} 1.7e+09')
    return write_lines(path, *text)


def scrape_sglang(path: Path, **changes: Any) -> Path:
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
            text.append(f'sglang:{name}{suffix}{{engine_type="unified",model_name="m"}} {value}')
    text.append('sglang:generation_tokens_total{model_name="m",is_streaming="true"} 3000.0')
    return write_lines(path, *text)


def sglang_log(
    path: Path,
    *intervals: tuple[int, float, float | None],
    arguments: str = "'speculative_eagle_topk': 1, ",
) -> Path:
    """SGLang's log: running requests, accept len and accept rate of each interval."""
    text = [
        f"[2026-11-25 07:00:00] server_args={{'model_path': 'm', {arguments}'port': 30000}}",
        "[2026-11-25 07:00:01 TP0] Prefill batch, #new-seq: 4, #new-token: 52, #cached-token: 0, "
        "token usage: 0.00, #running-req: 0, #queue-req: 0, #pending-token: 0, cuda graph: False, "
        "input throughput (token/s): 0.00",
    ]
    for running, length, rate in intervals:
        shown = "" if rate is None else f"accept rate: {rate:.2f}, "
        text.append(
            f"[2026-11-25 07:00:05 TP0] Decode batch, #running-req: {running}, #token: 300, token "
            f"usage: 0.03, accept len: {length:.2f}, {shown}cuda graph: True, gen throughput "
            "(token/s): 812.10, #queue-req: 0"
        )
    return write_lines(path, *text)


COUNTERS = (
    "num_drafts 10.0",
    "num_draft_tokens 30.0",
    "num_accepted_tokens 12.0",
    "per_pos 0 7.0",
    "per_pos 1 4.0",
    "per_pos 2 1.0",
)


def taus(figures: dict[str, Any]) -> list[list[float]]:
    """The range of τ of each length."""
    return [c["mean_acceptance_length_range"] for c in figures["fixed_length_sweep"]["chains"]]


def summary(source: Path) -> dict[str, Any]:
    found = import_file(source)
    assert found["replayable"] is False
    assert "no other policy can be replayed" in found["why_not_replayed"]
    return found


def refused(source: Path, format: str = "auto") -> str:
    with pytest.raises(InputError) as refusal:
        import_file(source, format=format)
    assert len(str(refusal.value)) < 500
    return str(refusal.value)


def engine_log(path: Path, *intervals: str) -> Path:
    other = "(APIServer pid=7) INFO 11-24 05:00:10 [loggers.py:310] Engine 000: Running: 1 reqs"
    path.write_text("\n".join((other, *intervals)) + "\n")
    return path
