"""llama.cpp's clock: rates from waves, and servers that fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="no gguf here; make engines has it")

from specctl.embedded import embedded_path
from specctl.engines import llamacpp_clock
from specctl.engines.gguf_files import write_gguf, write_model
from specctl.engines.llamacpp_clock import Setup, Wave, fit, wave
from specctl.engines.llamacpp_server import Answer, Timings
from specctl.errors import EngineError
from specctl.replay.cost.files import load_cost_model
from specctl.replay.cost.model import Steps
from specctl.replay.cost.rates import EngineCost
from tests.cli.command import Outcome, refuses, specctl

RATES = {
    "verify_fixed_us": 900.0,
    "verify_request_us": 120.0,
    "verify_token_us": 350.0,
    "verify_cached_token_us": 2.0,
    "draft_fixed_us": 200.0,
    "level_us": 400.0,
    "level_request_us": 90.0,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("clock")
    target, drafter = folder / "target.gguf", folder / "drafter.gguf"
    write_model(embedded_path("target"), target, "float32")
    write_model(embedded_path("small"), drafter, "float32", target=target)
    return target, drafter


def made_up(noise: float, jump_us: float = 0.0) -> list[Wave]:
    """Waves of every kind, whose times follow `RATES`; steps of two tokens or more cost `jump_us`
    besides."""
    chance, waves = np.random.default_rng(0), list[Wave]()
    for batch in (1, 2, 4):
        for context in (64, 256):
            for length, verifies in [(0, True), *((k, v) for k in (1, 3, 8) for v in (1, 0))]:
                verified, cached = batch * (1 + length * verifies), batch * context
                counts = (1, batch, verified, cached, length > 0, length, length * batch)
                us = float(np.dot(counts, list(RATES.values()))) + jump_us * (verified > 1)
                us *= chance.normal(1, noise)
                waves.append(Wave(batch, verified, 0, cached, length, length > 0, us))
            waves.append(Wave(1, 0, context, 0, 0, True, 1020.0 + 300 * context))
    return waves


def test_rates_are_found(files: tuple[Path, Path]) -> None:
    """Chains that were not timed cost what they should; a level differs from a token."""
    waves = made_up(0.02)
    model = fit(waves, "build 11549", *files)
    assert model.num_steps == len(waves) - model.held_out.num_steps
    for batch, length, tested in ((1, 5, 6), (3, 2, 1), (4, 6, 2)):
        verified, cached = batch * (1 + tested), batch * 128
        counts = (1, batch, verified, cached, 1, length, length * batch)
        expected = float(np.dot(counts, list(RATES.values())))
        steps = Steps(batch, verified, 128, length, 1, 1)
        assert float(model.round_us(steps)) == pytest.approx(expected, rel=0.05)
    assert model.held_out.total == pytest.approx(0, abs=0.03)
    assert model.verify_prompt_token_us == pytest.approx(300, rel=0.1)
    assert model.draft_prompt_token_us == 0, "no plain server told it apart"


def test_a_kernel_for_several_tokens_is_found(files: tuple[Path, Path]) -> None:
    """A second token costs more than a third; a line through all sizes would miss plain steps. A
    server's slow first prompt does not slow its rounds."""
    slow = cycle((3, 1, 1))
    waves = [
        replace(one, total_us=one.total_us * next(slow)) if one.prompt_tokens else one
        for one in made_up(0.01, jump_us=8000.0)
    ]
    model = fit(waves, "build 11549", *files)
    plain_us, chain_us = (float(model.round_us(Steps(1, n, 128, 0, 1, 1))) for n in (1, 2))
    assert plain_us == pytest.approx(900 + 120 + 350 + 2 * 128, rel=0.05)
    assert chain_us - plain_us == pytest.approx(8350, rel=0.05)
    assert float(model.prefill_us(256, drafts=False)) == pytest.approx(1020 + 300 * 256, rel=0.1)
    assert model.held_out.median < 0.03


def timings_of(num_read: int, num_tokens: int) -> dict[str, Any]:
    """Of chains of 3, a token of which is accepted: rounds of 2.5 ms that emit two tokens."""
    rounds = max(1, (num_tokens - 1) // 2)
    return {
        "prompt_n": num_read,
        "prompt_ms": 1 + 0.3 * num_read,
        "predicted_n": num_tokens,
        "predicted_ms": 2.5 * rounds,
        "draft_n": 3 * rounds,
        "draft_n_accepted": max(0, num_tokens - 1 - rounds),
    }


def test_a_wave_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request joins two that decode: answers of 2 and of 18 tokens, 7 rounds apart."""
    decoding = SimpleNamespace(done=lambda: False, result=lambda: None)
    pool = nullcontext(SimpleNamespace(submit=lambda *_, **__: decoding))
    monkeypatch.setattr(llamacpp_clock, "ThreadPoolExecutor", lambda _: pool)

    def complete(prompt: Sequence[int], num_tokens: int, **_: object) -> Answer:
        return Answer("", (), Timings(**timings_of(len(prompt), num_tokens)))

    client: Any = SimpleNamespace(complete=complete)
    running = Setup(lambda: client, None)
    [found] = wave(client, running, [5] * 30, 3)
    assert found == Wave(3, 12.0, 0, 3 * (30 + 10), 3.0, True, 2500.0)
    _, prompt = wave(client, running, [5] * 30, 1)
    assert prompt == Wave(1, 0.0, 30, 0.0, 0.0, True, 10_000.0)


def test_a_size_that_was_timed_twice_is_held_out_once(files: tuple[Path, Path]) -> None:
    sizes = range(1, 11)
    waves = [Wave(1, size, 0, 64, 0, False, 900.0 + 350 * size) for size in sizes]
    model = fit(2 * waves, "build 11549", files[0], None)
    assert model.verify_sizes == tuple(sizes)
    assert model.held_out.num_steps == 4


@contextmanager
def stub(mode: str, model: str = "target.gguf") -> Iterator[str]:
    """A server whose rounds of chains of 3 take made-up times; it fails as `mode` says."""

    class Handler(BaseHTTPRequestHandler):
        num_answers = 0

        def log_message(self, *_: object) -> None:
            pass

        def answer(self, body: bytes, code: int = 200, size: int | None = None) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(size or len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            build = {"another": "b9999-abc", "unknown": None}.get(mode, "b11549-abc")
            props = json.dumps({"build_info": build, "model_path": f"/models/{model}"}).encode()
            self.answer(b"<html></html>" if mode == "page" else props)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            Handler.num_answers += 1
            is_late = Handler.num_answers > 5
            if mode == "dies" and is_late:
                server.socket.close()  # and no answer
            elif mode == "refuses" and is_late:
                self.answer(b'{"error": {"message": "Loading model"}}', 503)
            elif mode == "is cut":
                self.answer(b'{"content"', size=1000)
            elif mode == "has no times":
                self.answer(b'{"content": "a"}')
            else:
                timings = timings_of(len(body["prompt"]), body["n_predict"])
                if mode == "drafts nothing":
                    timings |= {"draft_n": 0, "draft_n_accepted": 0}
                self.answer(json.dumps({"content": "a", "timings": timings}).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


FAILING = {
    "page": "is no llama-server: its /props are '<html></html>'",
    "dies": "no answer of llama.cpp: ",
    "refuses": "Loading model",
    "is cut": "IncompleteRead",
    "has no times": "answers without times",
}


Profile = Callable[..., Outcome]


@pytest.fixture
def profile(files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """Times the pair on running servers, into llamacpp.json."""
    monkeypatch.chdir(tmp_path)
    target, drafter = files
    words = ("profile", "--engine", "llamacpp", "--target", target, "--drafter", drafter)
    words += ("--contexts", "16,48")

    def run(*urls: str, batch_sizes: str = "1") -> Outcome:
        servers = (word for url in urls for word in ("--url", url))
        return specctl(*words, "--batch-sizes", batch_sizes, *servers)

    return run


@pytest.mark.parametrize("mode", FAILING)
def test_a_failing_server_loses_its_own_waves(mode: str, profile: Profile, tmp_path: Path) -> None:
    """Alone it is an error of one sentence; beside another the rest is written, and said."""
    with stub(mode) as url:
        alone = profile(url)
    assert alone.code == EngineError.exit_code
    assert FAILING[mode] in alone.err
    assert alone.err.count("\n") == 1 or "timings of llama.cpp succeeded" in alone.err
    with stub(mode) as url, stub("") as other:
        outcome = profile(url, other)
    assert outcome.code == EngineError.exit_code
    lost, told = outcome.err.splitlines()
    assert FAILING[mode] in lost
    assert "lacks the timings of servers that failed" in told
    assert load_cost_model(tmp_path / "llamacpp.json").support.levels.high == 3


def test_builds_and_files_of_servers(profile: Profile) -> None:
    """Other builds are said, and what drafts nothing or serves another file is refused."""
    with stub("another") as url, stub("unknown") as other:
        said = profile(url, other)
    assert said.code == 0
    assert "llama.cpp of build unknown and 9999; specctl was checked with 11549" in said.err
    for mode, model, says in (
        ("drafts nothing", "target.gguf", "no timing of llama.cpp has drafts"),
        ("", "other.gguf", "serves other.gguf, and --target is target.gguf"),
    ):
        with stub(mode, model) as url:
            refused = profile(url)
        assert refused.code == EngineError.exit_code
        assert says in refused.err


def test_requests_that_did_not_run_together_are_no_wave(profile: Profile, tmp_path: Path) -> None:
    """The server answers at once, so that the others have ended when the timed one runs."""
    with stub("") as url:
        assert "4 requests did not run together" in profile(url, batch_sizes="1,4").err
    model = load_cost_model(tmp_path / "llamacpp.json")
    assert isinstance(model, EngineCost)
    assert model.support.batch_size.high == 1


def test_files_that_cannot_be_timed_or_served(files: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = files
    engine = ("profile", "--engine", "llamacpp", "--quick", "--contexts", "16")
    (tmp_path / "model.bin").touch()
    for name in ("embedded", tmp_path / "model.bin"):
        assert f"GGUF files, and {name} is none" in refuses(2, *engine, "--target", name)
    for option in (("--dtype", "float32"), ("--url", "http://127.0.0.1:9", "--threads", 1)):
        assert "would be ignored" in refuses(2, *engine, "--target", target, *option)
    whole, cut = target.read_bytes(), tmp_path / "cut.gguf"
    for size in (0, 10, len(whole) - 1):
        cut.write_bytes(whole[:size])
        pair = (cut, "none") if size else (target, cut)
        told = refuses(5, *engine, "--target", pair[0], "--drafter", pair[1])
        assert f"{cut} is no GGUF file, or cut off or damaged" in told
    pair = ("--target", target, "--drafter", drafter_without_tokens(tmp_path))
    export = ("export", "chain", "--to", "llamacpp", "--method", "draft_model")
    for command in (engine, export):
        assert "it has another tokenizer" in refuses(5, *command, *pair)


def drafter_without_tokens(folder: Path) -> Path:
    import torch

    path = folder / "bare.gguf"
    write_gguf(path, "llama", {}, iter([("output_norm.weight", torch.ones(8))]), "float32")
    return path
