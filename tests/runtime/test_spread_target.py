"""A target whose layers are on several devices decodes and collects as on one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from polars.testing import assert_frame_equal
from torch.utils import backend_registration

from specctl.collect.workers import Needs
from specctl.errors import ModelConfigError, UsageError
from specctl.runtime import load
from specctl.runtime.api import Decoder
from specctl.runtime.load import check_loadable, parse_devices
from tests.collect.sets import sorted_rows
from tests.hidden import ROOT

HAS_PYTHON_DEVICES = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


@pytest.mark.skipif(not HAS_PYTHON_DEVICES, reason="this torch has no devices in Python")
def test_two_devices_decode_and_collect_as_one(tmp_path: Path) -> None:
    """Policies with an EAGLE-3 head and a small drafter; dense rows but for rounding."""
    words = [sys.executable, "-m", "tests.runtime.two_devices", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    *found, refused = done.stdout.splitlines()
    one, both = map(json.loads, found)
    assert one == both
    assert "parts do not fit the free memory of twin:0, twin:1" in refused
    assert sum(map(len, one.values())) == 4
    for table in ("rounds", "nodes"):
        found = [sorted_rows(tmp_path / name, table) for name in ("cpu", "both")]
        assert_frame_equal(*found, abs_tol=1e-4)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_two_gpus_decode_as_one() -> None:
    found = [
        Decoder.from_pretrained("embedded", "embedded", device=word, dtype="float32").generate(
            "def fibonacci(n):", max_new_tokens=32
        )
        for word in ("cuda:0", "cuda:0,cuda:1")
    ]
    assert found[0][0].text == found[1][0].text


def test_a_worker_of_several_gpus_spreads_the_target_over_them() -> None:
    found = {gpus: Needs(1, gpus).device for gpus in (0.0, 0.5, 1.0, 3.0)}
    assert found == {0.0: "cpu", 0.5: "cuda", 1.0: "cuda", 3.0: "cuda:0,cuda:1,cuda:2"}


def test_what_several_devices_need_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("cuda:0,cuda:0", "cpu,cuda:0", "cuda:0,", "cuda,cuda:1"):
        with pytest.raises(UsageError, match="a list of different GPUs"):
            parse_devices(word)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpus = parse_devices("cuda:0,cuda:1")
    assert gpus == (torch.device("cuda:0"), torch.device("cuda:1"))
    with pytest.raises(UsageError, match="this machine has 2 CUDA devices"):
        parse_devices("cuda:1,cuda:2")
    folder = load.model_folder("embedded", embedded_default="target")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100_000, 1_000_000))
    with pytest.raises(ModelConfigError, match=r"cuda:1 has 0 GB of memory; spread .* more GPUs"):
        check_loadable(folder, gpus)
    monkeypatch.setattr(load, "find_spec", lambda _: None)
    with pytest.raises(ModelConfigError, match=r"pip install accelerate"):
        check_loadable(folder, gpus)
