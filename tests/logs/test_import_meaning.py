"""What an import means: ranges that hold, the best length, two sentences. Pages and formats."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specctl.errors import InputError
from specctl.logs import sources
from specctl.logs.acceptance_figures import (
    best_lengths,
    chain_figures,
    explain,
    mean_ranges,
    sweep_of,
)
from specctl.logs.importing import import_file
from specctl.logs.sources import Source
from specctl.replay.cost.files import parse_linear
from specctl.replay.metrics import LoadClock
from tests.cli.command import specctl
from tests.hidden import python
from tests.logs.import_cases import (
    COUNTERS,
    engine_log,
    refused,
    scrape,
    scrape_sglang,
    sglang_log,
)
from tests.replay.costs import table_model
from tests.servers import free_port

LINEAR = (
    "verify_fixed_us=5000,verify_token_us=60,verify_cached_token_us=0,"
    "draft_fixed_us=300,draft_token_us=250,step_us=200"
)
DEPTH = 4
ROUNDS = st.lists(st.tuples(st.integers(1, DEPTH), st.integers(0, DEPTH)), min_size=1, max_size=30)
"""Drafted tokens, and how many of `DEPTH` would have been accepted."""


# --------------------------------------------------------------------------- ranges


def true_taus(outcomes: list[int]) -> list[float]:
    return [
        1 + sum(min(outcome, length) for outcome in outcomes) / len(outcomes)
        for length in range(1, DEPTH + 1)
    ]


@given(ROUNDS)
def test_ranges_of_ragged_drafts_hold_the_truth(rounds: list[tuple[int, int]]) -> None:
    """Position 1 is exact, because every round drafts it; a bound that is too tight fails here."""
    accepted = [min(drafted, outcome) for drafted, outcome in rounds]
    at_least = [sum(n >= j for n in accepted) for j in range(1, DEPTH + 1)]
    drafted = sum(length for length, _ in rounds)
    found = chain_figures(len(rounds), at_least, drafted, sum(accepted), is_ragged=True)
    chains = found["fixed_length_sweep"]["chains"]
    for chain, tau in zip(chains, true_taus([outcome for _, outcome in rounds]), strict=True):
        low, high = chain["mean_acceptance_length_range"]
        assert low - 1e-9 <= tau <= high + 1e-9
    assert len(set(chains[0]["mean_acceptance_length_range"])) == 1


@given(st.lists(st.integers(0, DEPTH), min_size=1, max_size=30))
def test_ranges_of_a_mean_hold_the_truth(outcomes: list[int]) -> None:
    truth = true_taus(outcomes)
    for (low, high), tau in zip(mean_ranges((truth[-1],) * 2, DEPTH), truth, strict=True):
        assert low - 1e-9 <= tau <= high + 1e-9


def test_a_mean_alone_tells_no_more() -> None:
    """Both ends occur: 3 or 0 of 3 tokens accepted, and always the same 1."""
    found = np.array(mean_ranges((2.0, 2.0), 3))
    assert found == pytest.approx(np.array([[1 + 1 / 3, 2], [1 + 2 / 3, 2], [2, 2]]))


# --------------------------------------------------------------------------- the best length


def counted(*at_least: int, num_rounds: int = 100) -> dict[str, Any]:
    drafted = num_rounds * len(at_least)
    return chain_figures(num_rounds, at_least, drafted, sum(at_least), is_ragged=False)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=5))
def test_a_draft_token_pays_below_its_share(counts: list[int]) -> None:
    chains = counted(*sorted(counts, reverse=True))["fixed_length_sweep"]["chains"]
    taus = [1.0, *(chain["mean_acceptance_length_range"][0] for chain in chains)]
    for length, chain in enumerate(chains, start=1):
        for factor, pays in ((0.99, True), (1.01, False)):
            share = chain["pays_below_step_frac"] * factor
            longer = taus[length] / (1 + length * share)
            assert (longer > taus[length - 1] / (1 + (length - 1) * share)) == pays


def test_the_best_length_is_the_fastest_of_the_sweep() -> None:
    """70, 40, 10 of 100 rounds: steps of 5260, 5930, 6240, 6550 us by hand."""
    clock = LoadClock(parse_linear(LINEAR))
    sweep = counted(70, 40, 10)["fixed_length_sweep"]
    best = best_lengths(sweep, lambda length, tau: clock.chain_us(length, tau, context_tokens=9))
    steps = [5260, 5870, 6180, 6490]
    expected = [1e6 * tau / us for tau, us in zip((1, 1.7, 2.1, 2.2), steps, strict=True)]
    assert best["num_draft_tokens"] == [2]
    assert [low for low, _ in best["tokens_per_s_range"]] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("step_us", "lengths", "says"),
    [
        ((10, 100, 100, 100), [0], "Plain decoding is best at LOAD, 100000 tokens/s against 17000"),
        ((10, 10, 10, 10), [3], "3 draft tokens are best at LOAD, 220000 tokens/s against 100000"),
        ((10, 10, 10, 10), [3], "plain decoding; more were not measured"),
        ((10, 10, 99, 99), [1], "1 draft token is best"),
        ((10, 17, 21, 22), [0], "Plain decoding is best"),  # the shortest of equals
    ],
)
def test_the_best_length_in_words(step_us: tuple[int, ...], lengths: list[int], says: str) -> None:
    found = explain(counted(70, 40, 10), lambda length, _: step_us[length], "LOAD")
    assert found["best_length"]["num_draft_tokens"] == lengths
    assert says in found["meaning"][1]
    assert found["meaning"][0] == (
        "Draft positions 1 to 3 accepted in 70%, 40%, 10% of 100 rounds; a round emits 2.20 tokens "
        "(mean acceptance length, the target's own token counted)."
    )


def test_lengths_whose_ranges_overlap_are_all_named() -> None:
    figures = {
        "mean_acceptance_length_range": [2.0, 2.0],
        "fixed_length_sweep": sweep_of(mean_ranges((2.0, 2.0), 3), "a range"),
        "not_known": ["acceptance by position"],
    }
    found = explain(figures, lambda length, _: 10 + length, "LOAD")
    assert found["best_length"]["num_draft_tokens"] == [1, 2, 3]
    assert found["meaning"][1] == (
        "1, 2 or 3 draft tokens may be best at LOAD: their ranges overlap. Not known: acceptance "
        "by position."
    )
    without = explain(figures, None, "")["meaning"][1]
    assert without.startswith("Drafting pays where a round takes less time than 2.00 plain steps")


# --------------------------------------------------------------------------- the command


def test_import_with_a_cost_model(tmp_path: Path) -> None:
    source = scrape(tmp_path / "m.txt", *COUNTERS)
    outcome = specctl("import", source, "--linear", LINEAR, "-o", tmp_path / "out")
    said = "2 draft tokens are best at batch size 1 and 512 tokens of context"
    assert said in outcome.out
    assert said in (tmp_path / "out" / "summary.json").read_text()
    loaded = specctl("import", source, "--linear", LINEAR, "--batch-size", "64").out
    assert "Plain decoding is best at batch size 64" in loaded
    both = specctl("import", source, "--linear", LINEAR, "--cost-model", "c.json")
    assert "give either --cost-model or --linear" in both.err


def test_a_measured_cost_model_says_whose_it_is(tmp_path: Path) -> None:
    (tmp_path / "cost_model.json").write_bytes(table_model().to_bytes())
    words = ("--cost-model", tmp_path / "cost_model.json", "--context-tokens", 100)
    found = specctl("import", scrape(tmp_path / "m.txt", *COUNTERS), *words)
    assert "the log does not name its own" in found.err
    assert "'Test CPU'" in found.err
    assert "at batch size 1 and 100 tokens of context" in found.out


def test_import_without_torch(tmp_path: Path) -> None:
    """Torch takes longer to load than a log to read."""
    words = ["import", scrape(tmp_path / "m.txt", *COUNTERS), "--linear", LINEAR]
    script = (
        "import sys; from specctl.cli import main\n"
        f"sys.argv = {['specctl', *map(str, words)]!r}\n"
        "try: main()\n"
        "except SystemExit as ended: assert not ended.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    python(script)


# --------------------------------------------------------------------------- pages


@contextmanager
def page(body: bytes, *, status: int = 200, kind: str = "text/plain") -> Iterator[str]:
    """A server on loopback that answers everything so; the address of its metrics."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing on standard error."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("of", [scrape, scrape_sglang])
def test_a_page_reads_like_its_file(tmp_path: Path, of: Any) -> None:
    path = of(tmp_path / "m.txt", *(COUNTERS if of is scrape else ()))
    with page(path.read_bytes()) as url:
        assert import_file(url) == import_file(path)
        assert json.loads(specctl("import", url, "--json").out) == import_file(path)


@pytest.mark.parametrize(
    ("body", "answer", "says"),
    [
        (b"none", {"status": 404}, "status 404 Not Found; name its page of metrics"),
        (b"busy", {"status": 503}, "status 503 Service Unavailable; check that it runs"),
        (b"<html>hi</html>", {"kind": "text/html"}, "it is text/html and begins with"),
        (b"<html>hi</html>", {}, "it is text/plain and begins with"),
        (b'{"object": "list"}', {"kind": "application/json"}, "it is application/json"),
        (b"# HELP python_gc x\npython_gc 1\n", {}, "no line of vllm-prometheus"),
        (b"vllm:num_requests_running 0\n", {}, "start it with --speculative-config"),
    ],
)
def test_pages_that_are_no_metrics(body: bytes, answer: Any, says: str) -> None:
    with page(body, **answer) as url, pytest.raises(InputError) as refusal:
        import_file(url)
    assert says in str(refusal.value)
    assert url in str(refusal.value)


def test_a_page_that_is_too_large_or_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_PAGE_BYTES", 1 << 20)
    with page(b"x" * (3 << 20)) as url, pytest.raises(InputError, match="more than 1 MiB"):
        import_file(url)
    monkeypatch.setattr(sources, "DEADLINE_S", 0.0)
    with page(b"x 1\n") as url, pytest.raises(InputError, match="no whole answer within"):
        import_file(url)


def test_servers_that_are_not_there() -> None:
    port = free_port()
    for url, says in (
        (f"http://127.0.0.1:{port}/metrics", "Connection refused"),
        ("http://127.0.0.1:port/metrics", "port"),
        ("http://", "cannot be read"),
    ):
        with pytest.raises(InputError, match=says):
            import_file(url)


# --------------------------------------------------------------------------- formats


def test_text_is_imported_without_a_file(tmp_path: Path) -> None:
    path = scrape(tmp_path / "m.txt", *COUNTERS)
    assert import_file(Source("held", path.read_bytes())) == import_file(path)


def test_lines_of_two_engines_are_refused(tmp_path: Path) -> None:
    both = scrape(tmp_path / "m.txt", *COUNTERS)
    both.write_text(both.read_text() + scrape_sglang(tmp_path / "s.txt").read_text())
    assert "line 11: a line of sglang-prometheus" in refused(both)
    log = engine_log(tmp_path / "vllm.log", "Engine 000: Avg prompt throughput: 1.0 tokens/s")
    log.write_text(log.read_text() + sglang_log(tmp_path / "s.log", (1, 2.0, 0.5)).read_text())
    assert "a line of sglang-log, after lines of vllm-log" in refused(log)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "an empty file"),
        (b"\n \n", "an empty file"),
        (b"\x89PNG\r\n\x1a\n", "byte 0x89 at column 1 is not UTF-8"),
        (b"GET / 200\nGET / 404\n", "state the format with --format"),
        (b"[2026-11-25 07:00:00] INFO ready\n", "state the format with --format"),
        (b"[1, 2]\n", "state the format with --format"),
        (b'{"a": 1}\n', "state the format with --format"),
        (b"vllm:spec_decode_efficiency 0.5\n", "scrape vLLM 0.9 or newer"),
        (b"vllm:spec_decode_num_drafts_total{a 1\n", "no sample of vllm:spec_decode_"),
        (
            b"INFO Engine 000: Avg prompt throughput: 1.0 tokens/s\n",
            "and 1 of throughput; speculation is off",
        ),
    ],
)
def test_files_that_are_none_of_these(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert says in refused(path)


def test_logs_of_two_vllm_servers_are_refused(tmp_path: Path) -> None:
    """Two API servers of one vLLM have names of their own, and each logs its share."""
    line = (
        "({} pid={}) INFO [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 2.50, "
        "Accepted: 3 tokens, Drafted: 6 tokens, Per-position acceptance rate: 1.000, 0.500, 0.000"
    )
    one = engine_log(tmp_path / "a.log", line.format("Api_0", 7), line.format("Api_1", 9))
    assert import_file(one)["num_rounds"] == 4
    two = engine_log(tmp_path / "b.log", line.format("Api_0", 7), line.format("Api_0", 9))
    assert "line 3: Api_0 has pid 9, and 7 before" in refused(two)
