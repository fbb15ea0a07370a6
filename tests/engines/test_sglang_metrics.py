"""SGLang's own code writes its log and its metrics; `specctl import` reads them.

Of the wheel that SPECCTL_SGLANG_WHEEL names, whose package needs a GPU's libraries to be imported:
the functions that count and format are taken out of its files, and given what they ask for.
"""

from __future__ import annotations

import ast
import sys
import time
import zipfile
from dataclasses import dataclass, field, make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from specctl.errors import InputError
from specctl.logs.importing import import_files
from specctl.logs.sources import Source
from tests.engines.sglang_wheel import WHEEL, needs_wheel

pytestmark = needs_wheel
NUM_DRAFT_TOKENS, BATCH_SIZE, INTERVAL = 4, 2, 40
ROUNDS = [(3, 0), (1, 2), (0, 0), (3, 3), (2, 0)] * 16
"""Draft tokens that both requests of a step accept; two intervals of steps."""
MOCKED = ("GaugeHistogram", "get_observability", "get_parallel", "logger")
SPEC_COUNTERS = (
    "spec_num_accept_tokens",
    "spec_num_correct_drafts",
    "spec_num_forward_ct",
    "spec_total_num_accept_tokens",
    "spec_total_num_forward_ct",
    "spec_num_block_accept_tokens",
    "spec_num_cap_tokens",
)
QUEUE = make_dataclass("QueueCount", [("total", int), ("by_priority", Any, None)])
SPEC = SimpleNamespace(speculative_num_draft_tokens=NUM_DRAFT_TOKENS, speculative_num_steps=3)


def sglang(path: str, *names: str, **given: Any) -> SimpleNamespace:
    """Classes and functions of a file, and methods as `Class.method`, in a namespace of `given`."""
    text = zipfile.ZipFile(WHEEL).read(f"sglang/srt/{path}").decode()
    found = {
        f"{outer.name}.{inner.name}": inner
        for outer in ast.parse(text).body
        if isinstance(outer, ast.ClassDef)
        for inner in outer.body
        if isinstance(inner, ast.FunctionDef)
    } | {
        node.name: node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    body: list[Any] = [*ast.parse("from __future__ import annotations").body]
    body += [found[name] for name in names]
    space: dict[str, Any] = {"get_spec": lambda: SPEC, "time": time, **given}
    exec(compile(ast.Module(body=body, type_ignores=[]), path, "exec"), space)
    return SimpleNamespace(**{node.name: space[node.name] for node in body[1:]})


def decode(
    monkeypatch: pytest.MonkeyPatch, *, speculates: bool = True, collector: Any = None
) -> str:
    """The log of a scheduler that decodes `ROUNDS`; `collector` is given its statistics."""
    ragged: Any = ModuleType("sglang.srt.speculative.ragged_verify")
    ragged.RaggedVerifyMode = SimpleNamespace(CAP_ACCEPT="cap_accept")
    ragged.read_ragged_verify_mode = lambda: "none"
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, ragged.__name__, ragged)
    place, lines = "managers/scheduler_components/", list[str]()
    pools = sglang(f"{place}pool_stats_observer.py", "PoolStats.get_decode_usage_msg_parts")
    pool = MagicMock(full_num_used=300, full_token_usage=0.03)
    pool.is_hybrid_swa = pool.is_hybrid_ssm = pool.is_hisparse = False
    pool.get_decode_usage_msg_parts = lambda: pools.get_decode_usage_msg_parts(pool)
    functions = sglang(
        f"{place}metrics_reporter.py",
        "SchedulerMetricsReporter.update_spec_metrics",
        "SchedulerMetricsReporter.report_decode_stats",
        RECORD_STEP_TIME=False,
        LOG_FORWARD_ITERS=False,
        ENABLE_METRICS_DEVICE_TIMER=False,
        DisaggregationMode=SimpleNamespace(DECODE="decode", PREFILL="prefill"),
        QueueCount=MagicMock(from_reqs=lambda reqs, _: QUEUE(len(reqs))),
        get_disagg=lambda: SimpleNamespace(language_only=False),
        compute_routing_key_stats=lambda keys: (0, []),
        _decode_total_seq_lens=lambda batch: 300,
        logger=SimpleNamespace(info=lines.append),
    )
    reporter = MagicMock(
        current_scheduler_metrics_enabled=collector is not None,
        metrics_collector=collector,
        enable_mfu_metrics=False,
        scheduler_status_logger=None,
        decode_log_interval=INTERVAL,
        last_decode_stats_tic=time.perf_counter(),
        _graph_backend_label="cuda graph",
        _active_spec_config_snapshot=lambda: {
            "num_steps": SPEC.speculative_num_steps,
            "num_draft_tokens": NUM_DRAFT_TOKENS,
        },
    )
    if collector is not None:
        reporter.stats = collector.no_stats
    for counted in ("num_generated_tokens", "forward_ct_decode", *SPEC_COUNTERS):
        setattr(reporter, counted, 0)
    reporter.scheduler.waiting_queue = []
    reporter.scheduler.grammar_manager = []
    reporter.scheduler.pool_stats_observer.get_pool_stats = lambda: pool
    reporter.scheduler.spec_algorithm.is_none = lambda: not speculates
    reporter.scheduler.spec_algorithm.is_dspark = lambda: False
    requests = [MagicMock(routing_key=None)] * BATCH_SIZE
    batch = MagicMock(reqs=requests, dp_cooperation_info=None)
    for accepted in ROUNDS:
        tokens = sum(accepted) + BATCH_SIZE
        reporter.forward_ct_decode += 1
        reporter.num_generated_tokens += tokens
        functions.update_spec_metrics(reporter, BATCH_SIZE, sum(accepted), tokens)
        functions.report_decode_stats(reporter, True, batch, tokens)
    # As `configure_logger` (utils/common.py) has a scheduler's lines.
    return "".join(f"[2026-11-25 07:00:01 TP0] {line}\n" for line in lines)


def read(text: str | bytes) -> dict[str, Any]:
    content = text if isinstance(text, bytes) else text.encode()
    return import_files([Source("sglang", content)])


NUM_ACCEPTED = sum(map(sum, ROUNDS))
NUM_ROUNDS = len(ROUNDS) * BATCH_SIZE


def test_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    text = decode(monkeypatch)
    assert len(text.splitlines()) == len(ROUNDS) // INTERVAL
    found = read(text)
    low, high = found["mean_acceptance_length_range"]
    assert low <= 1 + NUM_ACCEPTED / NUM_ROUNDS <= high <= low + 0.011
    assert (found["num_intervals"], found["mean_running_requests"]) == (2, BATCH_SIZE)
    assert found["num_draft_tokens_per_round"] == NUM_DRAFT_TOKENS - 1  # from both figures' digits


def test_a_log_without_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    text = decode(monkeypatch, speculates=False)
    with pytest.raises(InputError, match="2 lines `Decode batch` of SGLang, and none with"):
        read(text)


def test_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two finished requests; each emitted a first token behind its prompt."""
    prometheus = pytest.importorskip("prometheus_client")
    classes = sglang(
        "observability/metrics_collector.py",
        "QueueCount",
        "SchedulerStats",
        "_StatLoggerDIMixin",
        "SchedulerMetricsCollector",
        "TokenizerMetricsCollector",
        **{name: MagicMock() for name in MOCKED},
        exponential_buckets=lambda **_: [1.0, 2.0],
        generate_buckets=lambda *_: [1.0, 2.0],
        exports_expert_balancedness_to_prometheus=lambda *_: False,
        get_schedule=lambda: SimpleNamespace(
            prefill_delayer_max_delay_passes=30,
            prefill_delayer_forward_passes_buckets=None,
            prefill_delayer_wait_seconds_buckets=None,
        ),
        FORWARD_OVERLAP_NONE="none",
        FORWARD_OVERLAP_CATEGORIES=("none",),
        SCHEDULER_STAGE_CATEGORIES=("none",),
        ROUTING_KEY_REQ_COUNT_BUCKET_BOUNDS=[1, 2],
        dataclass=dataclass,
        field=field,
    )
    labels = {"model_name": "m", "engine_type": "unified"}
    ranks = {"tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0}
    scheduler = classes.SchedulerMetricsCollector(labels | ranks, MagicMock())
    scheduler.no_stats = classes.SchedulerStats()
    tokenizer = classes.TokenizerMetricsCollector(MagicMock(), labels)
    decode(monkeypatch, collector=scheduler)
    for accepted in zip(*ROUNDS, strict=True):
        tokens = 1 + len(ROUNDS) + sum(accepted)
        tokenizer.observe_one_finished_request(
            labels, 7, tokens, 0, 1.0, has_grammar=False, spec_verify_ct=len(ROUNDS)
        )
    # One registry serves the process: vLLM's counters may stand there too.
    lines = prometheus.generate_latest().splitlines()
    found = read(b"\n".join(line for line in lines if b"sglang:" in line))["models"]["m"]
    mean = 1 + NUM_ACCEPTED / NUM_ROUNDS
    assert (found["num_rounds"], found["num_requests"]) == (NUM_ROUNDS, BATCH_SIZE)
    assert found["mean_acceptance_length_range"] == pytest.approx([mean, mean])
    assert found["last_interval_means"] == pytest.approx([mean])
    assert found["num_draft_tokens_per_round"] == NUM_DRAFT_TOKENS - 1
