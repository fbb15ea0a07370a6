"""vLLM's own code writes its log and its metrics; `specctl import` reads them. And a server whose
metrics are those of the rows that it logs.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make engines")

from specctl.collect.verifying import verify
from specctl.engines.settings import PluginSettings, TraceSettings
from specctl.errors import SpecctlError
from specctl.logs.importing import import_files
from specctl.logs.sources import Source
from specctl.logs.trace_set import TraceSet
from specctl.runtime.load import load_pair
from tests.engines.vllm_engine import Server, ids_of, packaged, plain_texts, rows_of, server

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
"""What vLLM imports warns of."""
K = 3
EVEN = [(K, accepted) for accepted in (3, 0, 1, 2, 0, 3, 3, 1)] * 20
RAGGED = [*EVEN, *[(1, 1), (2, 0), (2, 2)] * 10]
"""Drafted and accepted tokens of rounds."""
COUNT = 24
"""Requests to the server."""


def counts(rounds: list[tuple[int, int]]) -> dict[str, Any]:
    accepted = [n for _, n in rounds]
    return {
        "num_rounds": len(rounds),
        "num_draft_tokens": sum(drafted for drafted, _ in rounds),
        "num_accepted_tokens": sum(accepted),
        "marginal_prob": [sum(n >= j for n in accepted) / len(rounds) for j in range(1, K + 1)],
    }


def read(text: bytes) -> dict[str, Any]:
    found = import_files([Source("vllm", text)])
    [figures] = found.get("models", {"": found}).values()
    return {name: figures[name] for name in counts(EVEN)} | {
        "is_exact": figures["fixed_length_sweep"]["is_exact"]
    }


def observed(rounds: list[tuple[int, int]]) -> Any:
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    stats = SpecDecodingStats.new(K)
    for drafted, accepted in rounds:
        stats.observe_draft(drafted, accepted)
    return stats


@pytest.mark.parametrize("rounds", [EVEN, RAGGED], ids=["even", "ragged"])
def test_a_log(rounds: list[tuple[int, int]]) -> None:
    """Of ragged drafts the log's digits may fit several numbers of rounds; not of these."""
    from vllm.v1.spec_decode.metrics import SpecDecodingLogging

    lines: list[str] = []
    for interval in (rounds, rounds[:31]):
        logging = SpecDecodingLogging()
        logging.observe(observed(interval))
        logging.log(lambda message, *values: lines.append(message % values))
    prefix = "(APIServer pid=7) INFO 11-25 07:00:00 [metrics.py:120] "
    found = read("".join(f"{prefix}{line}\n" for line in lines).encode())
    assert found == counts([*rounds, *rounds[:31]]) | {"is_exact": rounds is EVEN}


@pytest.mark.parametrize("rounds", [EVEN, RAGGED], ids=["even", "ragged"])
def test_metrics_of_two_engines(
    rounds: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import prometheus_client
    from vllm.v1.spec_decode.metrics import SpecDecodingProm

    registry = prometheus_client.CollectorRegistry()

    def counter(**settings: Any) -> Any:
        return prometheus_client.Counter(**settings, registry=registry)

    monkeypatch.setattr(SpecDecodingProm, "_counter_cls", staticmethod(counter))
    config: Any = SimpleNamespace(num_speculative_tokens=K)
    engines: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    metrics = SpecDecodingProm(config, ["model_name", "engine"], engines)
    metrics.observe(observed(rounds[:50]), engine_idx=0)
    metrics.observe(observed(rounds[50:]), engine_idx=1)
    found = read(prometheus_client.generate_latest(registry))
    assert found == counts(rounds) | {"is_exact": rounds is EVEN}


# --------------------------------------------------------------------------- a server


def test_a_server_logs_what_it_serves_and_may_be_killed(tmp_path: Path) -> None:
    """The engine is a process of its own; eight clients; then SIGKILL in the midst of requests,
    which are then not in the log."""
    path, words = tmp_path / "set", "confidence:window=5:threshold=0.4"
    settings = PluginSettings(policy=words, trace=TraceSettings(out=str(path)))
    given = ids_of(packaged(COUNT))
    plain = plain_texts(load_pair("embedded", "embedded", device="cpu"), packaged(COUNT))
    with server(settings, tmp_path / "log") as running:
        with ThreadPoolExecutor(8) as clients:
            assert list(clients.map(running.complete, given)) == plain
        counted = counters(running.metrics())
        served, killed = rounds_of(path, running, COUNT), threading.Event()
        kept_busy = [
            threading.Thread(target=ask_until, args=(running, ids, killed)) for ids in given[:8]
        ]
        for one in kept_busy:
            one.start()
        while counters(running.metrics())["num_drafts"] < counted["num_drafts"] + 8:
            killed.wait(0.1)
        running.kill()
        killed.set()
        for one in kept_busy:
            one.join()
    rounds = rows_of(path, "rounds")
    assert len(rounds) == served
    assert counted["num_drafts"] == int((rounds["num_verified"] > 1).sum())
    assert counted["num_draft_tokens"] == int((rounds["num_verified"].cast(pl.Int64) - 1).sum())
    found = verify(str(path))
    assert found.is_whole, found.render()


def counters(page: str) -> dict[str, int]:
    """Counters of speculation on a page of metrics."""
    prefix, found = "vllm:spec_decode_", {}
    for line in page.splitlines():
        if line.startswith(prefix) and "_total{" in line and "per_pos" not in line:
            name, value = line.removeprefix(prefix).split("_total{")[0], line.rsplit(" ", 1)[1]
            found[name] = int(float(value))
    return found


def rounds_of(path: Path, running: Server, num_requests: int) -> int:
    """Rounds of the set, once it holds so many requests."""
    while True:
        assert running.process.poll() is None, "the server has ended"
        with suppress(SpecctlError):  # nothing is written yet
            opened = TraceSet.open(str(path))
            if len(opened.prompt_ids) >= num_requests:
                return opened.num_rows("rounds")
        threading.Event().wait(0.1)


def ask_until(running: Server, ids: list[int], stop: threading.Event) -> None:
    """Asks again and again, until the server is gone."""
    while not stop.is_set():
        try:
            running.complete(ids, max_tokens=512, ignore_eos=True)
        except OSError:
            return
