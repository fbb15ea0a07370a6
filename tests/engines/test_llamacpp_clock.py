"""llama.cpp's clock: rates from waves, and waves of a real server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="no gguf here; make engines has it")

from specctl.embedded import embedded_path
from specctl.engines.gguf_files import write_model
from specctl.engines.llamacpp_clock import Wave, fit
from specctl.errors import EngineError
from specctl.replay.cost.files import load_cost_model
from specctl.replay.cost.model import Steps
from specctl.replay.cost.rates import EngineCost
from tests.cli.command import passes, refuses, specctl

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
    model = fit(made_up(0.02), 11549, *files)
    for batch, length, tested in ((1, 5, 6), (3, 2, 1), (4, 6, 2)):
        verified, cached = batch * (1 + tested), batch * 128
        counts = (1, batch, verified, cached, 1, length, length * batch)
        expected = float(np.dot(counts, list(RATES.values())))
        steps = Steps(batch, verified, 128, length, 1, 1)
        assert float(model.round_us(steps)) == pytest.approx(expected, rel=0.05)
    assert model.held_out.total == pytest.approx(0, abs=0.03)
    assert model.verify_prompt_token_us + model.draft_prompt_token_us == pytest.approx(300, rel=0.1)


def test_a_kernel_for_several_tokens_is_found(files: tuple[Path, Path]) -> None:
    """A second token costs more than a third; a line through all sizes would miss plain steps."""
    model = fit(made_up(0.01, jump_us=8000.0), 11549, *files)
    plain_us, chain_us = (float(model.round_us(Steps(1, n, 128, 0, 1, 1))) for n in (1, 2))
    assert plain_us == pytest.approx(900 + 120 + 350 + 2 * 128, rel=0.05)
    assert chain_us - plain_us == pytest.approx(8350, rel=0.05)
    assert float(model.prefill_us(256, drafts=False)) == pytest.approx(1020 + 300 * 256, rel=0.1)
    assert model.held_out.median < 0.03


def test_a_server_is_timed(files: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="no xllamacpp here; make engines has it")
    target, drafter = files
    options = ("--batch-sizes", "1,4", "--contexts", "16,48", "--verified-tokens", "1,2,4")
    pair = ("--target", target, "--drafter", drafter, "--threads", 1)
    out = tmp_path / "clock.json"
    passes("profile", "--engine", "llamacpp", *pair, "--quick", *options, "-o", out)
    model = load_cost_model(out)
    assert isinstance(model, EngineCost)
    assert model.engine_version == "build 11549"
    assert (model.support.batch_size.high, model.support.levels.high) == (4, 3)


def test_what_cannot_be_timed(files: tuple[Path, Path]) -> None:
    target, drafter = files
    pair = ("--target", target, "--drafter", drafter)
    engine = ("profile", "--engine", "llamacpp", "--quick", "--contexts", "16")
    told = refuses(2, *engine, "--target", "embedded")
    assert "GGUF files, and embedded is none" in told
    url = "http://127.0.0.1:9"
    outcome = specctl(*engine, *pair, "--url", url)
    assert outcome.code == EngineError.exit_code
    lost, told = outcome.err.splitlines()
    assert "waves are lost" in lost
    assert "Connection refused" in lost
    assert "0 waves" in told
