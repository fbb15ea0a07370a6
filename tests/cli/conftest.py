"""Small trace sets and prompts, made by the command line itself."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.runtime import load
from tests.cli.command import COST, copy_model, passes, specctl, write_artifact, write_lines
from tests.replay.logs import random_traces
from tests.train.cases import node_traces

SMALL = ("--max-new-tokens", 8, "--device", "cpu")
"""Options that keep a test's decoding short."""


@pytest.fixture(autouse=True, scope="session")
def _models_are_loaded_once() -> Iterator[None]:
    """The command line loads its pair by this name; one pair serves a whole process of tests."""
    original = load.load_pair
    load.load_pair = functools.lru_cache(maxsize=8)(original)
    yield
    load.load_pair = original


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two artifacts of the embedded pair, made by hand."""
    folder = tmp_path_factory.mktemp("artifacts")
    return {kind: write_artifact(folder / kind, kind) for kind in ("chain", "eagle2")}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty registry, which the commands find by SPECCTL_REGISTRY, and a user without a past."""
    for kind in ("CACHE", "STATE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind.lower()))
    monkeypatch.setenv("SPECCTL_REGISTRY", str(tmp_path / "registry"))
    passes("registry", "init")
    return tmp_path / "registry"


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    return write_lines(folder / "four.txt", *(f"How much is {n} + {n}?" for n in range(4)))


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory, prompts: Path) -> Path:
    """Traces of the embedded pair; copy them before breaking them."""
    folder = tmp_path_factory.mktemp("traces") / "traces"
    passes("collect", prompts, "-o", folder, *SMALL)
    return folder


@pytest.fixture(scope="session")
def blind_traces(tmp_path_factory: pytest.TempPathFactory, prompts: Path) -> Path:
    """Traces of the head with its logits turned round: nothing that it drafts is accepted."""
    folder = tmp_path_factory.mktemp("blind")
    head = copy_model("eagle3", folder / "head")
    tensors = load_file(head / "model.safetensors")
    tensors["lm_head.weight"] = -8 * tensors["lm_head.weight"]
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    found = specctl("collect", prompts, "-o", folder / "traces", "--drafter", head, *SMALL)
    assert found.code == 0, found.err
    assert "predicts 0 of 64 tokens" in found.err
    return folder / "traces"


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts whose answers can be checked."""
    records = (
        json.dumps({"prompt_id": f"s{n}", "turns": [f"What is {n} + {n}?"], "answer": str(2 * n)})
        for n in range(4)
    )
    return write_lines(tmp_path_factory.mktemp("prompts") / "sums.jsonl", *records)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "traces"
    random_traces(folder, num_prompts=6, depth=6, top_k=3)
    return folder


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense traces for scorers of nodes: four levels, three children."""
    folder = tmp_path_factory.mktemp("nodes") / "traces"
    node_traces(folder)
    return folder


@pytest.fixture(scope="session")
def cost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cost") / "cost_model.json"
    path.write_text(json.dumps(COST))
    return path


@pytest.fixture(autouse=True)
def _no_gpu_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device these tests are the same everywhere; CUDA has tests of its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
