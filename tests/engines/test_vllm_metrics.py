"""vLLM's own code writes its log and its metrics; `specctl import` reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specctl.logs.importing import import_files
from specctl.logs.sources import Source

pytest.importorskip("vllm", reason="vLLM is not installed: make engines")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
"""What vLLM imports warns of."""
K = 3
EVEN = [(K, accepted) for accepted in (3, 0, 1, 2, 0, 3, 3, 1)] * 20
RAGGED = [*EVEN, *[(1, 1), (2, 0), (2, 2)] * 10]
"""Drafted and accepted tokens of rounds."""


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
