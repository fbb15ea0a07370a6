"""Loading targets: what cannot run is refused by name before weights are read; compiled layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specctl.embedded import embedded_path
from specctl.errors import ModelConfigError
from specctl.policy import Policy, StaticTree
from specctl.runtime.api import Decoder
from specctl.runtime.load import load_pair

METHODS = {
    "bitsandbytes": {"load_in_4bit": True},
    "gptq": {"bits": 4, "group_size": 128},
    "awq": {"bits": 4},
    "compressed-tensors": {},
    "unheard-of": {},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_target_is_refused_by_name_before_its_weights_are_read(
    method: str, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(embedded_path("target"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, **METHODS[method]}
    (folder / "config.json").write_text(json.dumps(config))
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"not read")
    with pytest.raises(ModelConfigError, match=f"{method} weights on cpu"):
        load_pair(str(folder), None, device="cpu")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_layers_give_the_same_text() -> None:
    policy = Policy(shape=StaticTree(depth=3, top_k=3, num_tokens=10))
    texts = [
        Decoder(load_pair("embedded", "embedded", device="cpu", compile=compiled), policy)
        .generate("def add(a, b):", max_new_tokens=24)[0]
        .token_ids
        for compiled in (False, True)
    ]
    assert texts[0] == texts[1]
