"""Heads tried on their target: the better of two readings, and heads that predict nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.embedded import embedded_path
from specctl.errors import ModelConfigError
from specctl.runtime.drafter import Eagle3Drafter
from specctl.runtime.load import Target, load_drafter, load_target
from tests.cli.command import passes

CPU = torch.device("cpu")
LIST = "eagle_aux_hidden_state_layer_ids"
HEAD = embedded_path("eagle3")
CONFIG: dict[str, Any] = json.loads((HEAD / "config.json").read_text())
BARE = {name: value for name, value in CONFIG.items() if name not in (LIST, "eagle_config")}
OWN = ("architectures", "draft_vocab_size", "target_hidden_size")
NESTED: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": CONFIG["draft_vocab_size"],
    "transformer_layer_config": {k: v for k, v in BARE.items() if k not in OWN},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("embedded", (CPU,), torch.float32)


def derived(
    folder: Path,
    config: dict[str, Any],
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Path:
    """The packaged head, trained with the inputs of layers 2, 4 and 5, under another config."""
    folder.mkdir()
    tensors = load_file(HEAD / "model.safetensors")
    if change is not None:
        for name in ("fc.weight", "lm_head.weight"):
            tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "layers", "norm", "said"),
    [
        (CONFIG, (2, 4, 5), False, ()),
        (BARE, (2, 4, 5), False, ()),
        (BARE | {"eagle_config": {LIST: [1, 3, 4]}}, (2, 4, 5), False, ("as outputs", "as inputs")),
        (BARE | {LIST: [1, 3, 4]}, (2, 4, 5), False, ("as outputs", "as inputs", "[2, 4, 5] at")),
        (BARE | {LIST: [2, 4, 5], "eagle_config": {LIST: [1, 3, 4]}}, (2, 4, 5), False, ()),
        (NESTED, (2, 4, 5), False, ("as true (vLLM)", "as false", '"norm_before_residual": false')),
        (NESTED | {"norm_before_residual": True}, (2, 4, 5), True, ()),
        (NESTED | {"norm_before_residual": False}, (2, 4, 5), False, ()),
    ],
)
def test_of_two_readings_the_better_is_taken_and_both_are_named(
    tmp_path: Path,
    target: Target,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, Any],
    layers: tuple[int, ...],
    norm: bool,  # noqa: FBT001
    said: tuple[str, ...],
) -> None:
    drafter, notes = load_drafter(derived(tmp_path / "head", config), target, CPU, torch.float32)
    assert isinstance(drafter, Eagle3Drafter)
    assert (drafter.aux_layers, drafter.head.config.norm_before_residual) == (layers, norm)
    assert ("two ways" in caplog.text) == bool(said)
    assert all(one in caplog.text for one in said), caplog.text
    assert any(note.startswith("predicts ") for note in notes)


def test_the_fix_of_the_warning_ends_it(
    tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    load_drafter(derived(tmp_path / "head", NESTED), target, CPU, torch.float32)
    fix = caplog.text.partition("; write ")[2].partition(" into its config.json")[0]
    caplog.clear()
    mended = derived(tmp_path / "mended", NESTED | json.loads(f"{{{fix}}}"))
    load_drafter(mended, target, CPU, torch.float32)
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def noise(like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like.dtype) * 0.05


@pytest.mark.parametrize("config", [CONFIG, BARE, BARE | {LIST: [1, 3, 4]}])
def test_a_head_that_predicts_nothing_is_told(
    tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture, config: dict[str, Any]
) -> None:
    """It loads: texts stay those of plain decoding."""
    folder = derived(tmp_path / "head", config, noise)
    drafter, _ = load_drafter(folder, target, CPU, torch.float32)
    assert drafter.aux_layers == (2, 4, 5)
    assert (
        "of another target or another fine-tune of the same sizes, or is not trained" in caplog.text
    )


def test_a_head_of_weights_that_are_no_numbers_is_refused(tmp_path: Path, target: Target) -> None:
    folder = derived(tmp_path / "head", CONFIG, lambda tensor: tensor * torch.nan)
    with pytest.raises(ModelConfigError, match=r"predicts no numbers \(NaN\)"):
        load_drafter(folder, target, CPU, torch.float32)


def test_the_target_is_left_as_it_was(tmp_path: Path, target: Target) -> None:
    load_drafter(derived(tmp_path / "head", BARE), target, CPU, torch.float32)
    assert (target.model.cache, target.model.aux_layers) == (None, ())


def test_show_names_models_and_drafters() -> None:
    for name, words in (("eagle3", "an EAGLE-3 head"), ("small", "a whole model")):
        shown = passes("show", embedded_path(name)).out
        assert f"is {words}" in shown
        assert "; `specctl doctor TARGET" in shown
