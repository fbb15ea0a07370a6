"""The kind of a draft checkpoint, by its config and the names of its tensors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specctl.embedded import embedded_path
from specctl.errors import ModelConfigError, ModelError
from specctl.runtime.checkpoints import block_size, kind_of, methods_of
from tests.runtime.checkpoints import (
    EAGLE,
    INDEXED,
    KINDS,
    LLAMA,
    MODEL,
    OFFICIAL,
    SIXTEEN,
    arch,
    publish,
    speculators,
)


@pytest.mark.parametrize("name", KINDS)
def test_kinds_are_told_apart(tmp_path: Path, name: str) -> None:
    config, stems, kind = KINDS[name]
    assert kind_of(publish(tmp_path / "safe", config, stems)) == kind
    assert kind_of(publish(tmp_path / "pickle", config, stems, pickled=True)) == kind


@pytest.mark.parametrize(
    ("config", "stems", "words"),
    [
        (arch("LlamaForCausalLMEagle3"), EAGLE, "EAGLE-3 head by its config.json, and an EAGLE-1"),
        (
            arch("EagleLlamaForCausalLM"),
            OFFICIAL,
            "EAGLE-1 head by its config.json, and an EAGLE-3",
        ),
        (arch("DFlashDraftModel"), INDEXED, "DFlash block drafter by its config.json"),
        (LLAMA | {"num_hidden_layers": 1}, (), "EAGLE-1 heads and models of one layer"),
        (arch("BertForMaskedLM"), MODEL, "no drafter .*generates no text.*: BertForMaskedLM"),
        (arch("CLIPModel"), (), "no drafter of a known kind, and .*: CLIPModel"),
        (speculators("hydra"), (), "'hydra' is not known"),
        (SIXTEEN, (*MODEL, "hydra_head.0.linear"), "no whole model: .* 16 layers, .* have 3"),
        (SIXTEEN, ("model.layers.0.mlp.up_proj",), "no whole model"),
    ],
)
def test_a_kind_that_is_not_known_is_refused(
    tmp_path: Path, config: dict[str, object], stems: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ModelConfigError, match=words):
        kind_of(publish(tmp_path, config, stems))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        kind_of(tmp_path)


def test_damaged_weights_leave_the_kind_to_the_config(tmp_path: Path) -> None:
    publish(tmp_path, arch("LlamaForCausalLMEagle3"), ())
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"no archive")
    assert kind_of(tmp_path) == "eagle3"


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (SIXTEEN, ["draft_model"]),
        (SIXTEEN | {"num_nextn_predict_layers": 0}, ["draft_model"]),
        (SIXTEEN | {"num_nextn_predict_layers": 1}, ["draft_model", "mtp"]),
        (SIXTEEN | {"text_config": {"mtp_num_hidden_layers": 1}}, ["draft_model", "mtp"]),
        (arch("DeepSeekMTPModel", num_nextn_predict_layers=1), ["mtp"]),
    ],
)
def test_a_model_with_mtp_layers_may_draft_in_two_ways(
    tmp_path: Path, config: dict[str, object], kinds: list[str]
) -> None:
    assert list(methods_of(publish(tmp_path, config, ()))) == kinds


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (arch("DFlashDraftModel", block_size=16), 15),
        (arch("DFlashDraftModel", dflash_config={"block_size": 8}), 7),
        (arch("Qwen3DSparkModel", block_size=7), 7),
        (speculators("dspark", block_size=8, sample_from_anchor=False), 7),
        (arch("DFlashDraftModel"), None),
        (SIXTEEN | {"block_size": 16}, None),
    ],
)
def test_the_block_of_a_block_drafter(
    tmp_path: Path, config: dict[str, object], size: int | None
) -> None:
    folder = publish(tmp_path, config, ())
    assert block_size(folder, kind_of(folder)) == size


def test_kinds_are_told_without_torch() -> None:
    code = "import sys; from pathlib import Path; from specctl.runtime.checkpoints import kind_of; "
    code += "assert kind_of(Path(sys.argv[1])) == 'eagle3'; assert 'torch' not in sys.modules"
    words = [sys.executable, "-c", code, str(embedded_path("eagle3"))]
    subprocess.run(words, check=True, env=os.environ)
