"""Targets in GGUF files, written from the embedded pair and from random models."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig, Qwen2Config, Qwen3Config

pytest.importorskip("gguf", reason="no gguf here; the extra gguf has it")
pytest.importorskip("accelerate", reason="no accelerate here; the extra gguf has it")

from specctl.embedded import embedded_path
from specctl.engines.gguf_files import shape_fields, write_gguf, write_model
from specctl.errors import ModelConfigError, ModelError, SpecctlError
from specctl.runtime import gguf
from specctl.runtime.identity import config_digest, weights_digest
from specctl.runtime.load import load_pair
from tests.cli.command import passes
from tests.runtime.toy import GROUPED, toy_model

TEXTS = ("Add 1234 and 5.6\n\n  now", "é 漢字 <|user|>hi<|eos|> <|endoftext|>")
TURN = [{"role": "user", "content": "Hello"}]
FEW = ("--limit", 3, "--max-new-tokens", 12, "--device", "cpu")
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "target.gguf"
    write_model(embedded_path("target"), path, "float32")
    return path


def states(name: str | Path) -> dict[str, Tensor]:
    return load_pair(str(name), None, **CPU).target.model.model.state_dict()


def test_a_file_is_the_model_of_its_folder(file: Path) -> None:
    ours, theirs = (load_pair(name, "embedded", **CPU).target for name in (str(file), "embedded"))
    torch.testing.assert_close(ours.model.model.state_dict(), theirs.model.model.state_dict())
    assert ours.eos_ids == theirs.eos_ids
    for text in TEXTS:
        assert ours.tokenizer(text)["input_ids"] == theirs.tokenizer(text)["input_ids"]
    found = [one.tokenizer.apply_chat_template(TURN, tokenize=False) for one in (ours, theirs)]
    assert found[0] == found[1]


def test_a_file_is_known_by_its_content(file: Path, tmp_path: Path) -> None:
    """A copy has its digests, other numbers have another one, and its folder is another target."""
    copy, half = tmp_path / "copy.gguf", tmp_path / "half.gguf"
    shutil.copy(file, copy)
    write_model(embedded_path("target"), half, "q8_0")
    assert weights_digest(copy) == weights_digest(file)
    assert config_digest(copy) == config_digest(file)
    digests = {weights_digest(one) for one in (file, half, embedded_path("target"))}
    assert len(digests) == 3


def test_files_beside_it_are_not_read(file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path / "model.gguf")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_text("{}")
    tokenizer = load_pair(str(tmp_path / "model.gguf"), None, **CPU).target.tokenizer
    assert len(tokenizer) == 4096
    assert "Hello" in tokenizer.apply_chat_template(TURN, tokenize=False)


def test_a_small_drafter_may_be_a_file(file: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.gguf"
    write_model(embedded_path("small"), small, "float32", target=file)
    for target in (str(file), "embedded"):
        assert load_pair(target, str(small), **CPU).drafter is not None


def test_verbs_take_a_file(file: Path, tmp_path: Path) -> None:
    texts = []
    for target in (str(file), "embedded"):
        out = tmp_path / Path(target).stem
        passes("run", "embedded", *FEW, "--policy", "chain", "--target", target, "-o", out)
        lines = [path.read_text().splitlines() for path in sorted(out.glob("*.jsonl"))]
        texts.append([json.loads(line)["texts"] for part in lines for line in part])
    assert texts[0]
    assert texts[0] == texts[1]
    traces = tmp_path / "traces"
    passes("collect", "embedded", *FEW, "--target", file, "-o", traces)
    assert "target.gguf" in passes("show", traces).out


@pytest.mark.parametrize(
    ("arch", "config"),
    [("qwen2", Qwen2Config(**GROUPED)), ("qwen3", Qwen3Config(**GROUPED, head_dim=128))],
)
def test_other_architectures_load(
    arch: str, config: PreTrainedConfig, file: Path, tmp_path: Path
) -> None:
    """Rows of queries and keys stand in transformers' order."""
    config.vocab_size = 4096
    model, path = toy_model(0, config), tmp_path / "model.gguf"
    of_arch, layers = gguf.package().MODEL_ARCH[arch.upper()], config.num_hidden_layers
    names = gguf.package().get_tensor_name_map(of_arch, layers)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    named = (
        (names.get_name(name, try_suffixes=(".weight", ".bias")), tensor)
        for name, tensor in model.state_dict().items()
        if name not in tied
    )
    fields = shape_fields(arch, config, layers) | tokenizer(file)
    write_gguf(path, arch, fields, named, "float32")
    torch.testing.assert_close(states(path), model.state_dict())


# --------------------------------------------------------------------------- refusals


def tokenizer(file: Path) -> dict[str, Any]:
    fields = gguf.read_fields(file)
    return {name: value for name, value in fields.items() if name.startswith("tokenizer.")}


WRONG = {
    "mamba": ({}, "token_embd", r"architecture 'mamba', and GGUF models load of llama, qwen2"),
    "eagle3": ({}, "fc", "is an EAGLE-3 head, no model of its own"),
    "llama": ({}, "rope_freqs", r"has rope_freqs.weight, which .* leaves out"),
    "llama experts": ({}, "blk.0.ffn_gate_exps", "has blk.0.ffn_gate_exps.weight"),
    "llama scaled": ({"llama.rope.scaling.type": "yarn"}, "output", "rotary scaling 'yarn'"),
    "llama no tokens": ({"tokenizer.ggml.tokens": None}, "output", "has no tokenizer"),
    "llama splits": ({"tokenizer.ggml.pre": "new"}, "output", "pre-tokenizer 'new' is unknown"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_file_that_does_not_load_as_it_is(kind: str, file: Path, tmp_path: Path) -> None:
    changes, tensor, sentence = WRONG[kind]
    fields = {n: v for n, v in (tokenizer(file) | changes).items() if v is not None}
    one = iter([(f"{tensor}.weight", torch.zeros(4, 32))])
    write_gguf(tmp_path / "wrong.gguf", kind.split()[0], fields, one, "float32")
    with pytest.raises(ModelError, match=sentence):
        load_pair(str(tmp_path / "wrong.gguf"), None, **CPU)


@pytest.mark.parametrize("size", [0, 3, 40, 5000, -100])
def test_a_file_that_is_cut_off(size: int, file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match="no GGUF file, or cut off or damaged"):
        load_pair(str(cut), None, **CPU)


def test_a_file_of_another_pair(file: Path, tmp_path: Path) -> None:
    small, head = tmp_path / "small.gguf", tmp_path / "head"
    write_model(embedded_path("small"), small, "float32", target=file)
    with pytest.raises(ModelConfigError, match=r"target of hidden_size 256, but this one has"):
        load_pair(str(small), "embedded", **CPU)
    shutil.copytree(embedded_path("eagle3"), head)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"vocab_size": 5000}))
    with pytest.raises(SpecctlError, match="vocab_size 5000"):
        load_pair(str(file), str(head), **CPU)


@pytest.mark.parametrize("name", ["gguf", "accelerate"])
def test_a_missing_package(
    name: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = tmp_path / "fresh.gguf"  # a file that was read is remembered
    shutil.copy(file, fresh)
    monkeypatch.setattr(gguf, "find_spec", lambda _: None)
    if name == "gguf":
        monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=f"need the package {name}"):
        load_pair(str(fresh), None, **CPU)
