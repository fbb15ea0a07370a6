"""GGUF files that specctl writes, read back; `test_llamacpp.py` has llama.cpp itself read them."""

from __future__ import annotations

import errno
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

pytest.importorskip("gguf", reason="no gguf here; the extra gguf has it")

import gguf

from specctl.engines.gguf_files import check_pair, tokenizer_fields, write_gguf, write_model
from specctl.errors import EngineError, ModelConfigError, ModelError, OutputError
from tests.runtime.heads import EMBEDDING, OFFICIAL, VOCAB, H, Tensors, make_tensors, write_head
from tests.runtime.toy import toy_model

LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4]}}
SCALED = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}


def target_file(folder: Path, num_tokens: int = VOCAB) -> Path:
    """The facts of a target that heads of `tests/runtime/heads.py` fit."""
    sizes = {"embedding_length": H, "block_count": 8, "context_length": 128}
    tokens = {"tokens": [f"t{n}" for n in range(num_tokens)], "token_type": [1] * num_tokens}
    fields = {f"llama.{name}": size for name, size in sizes.items()}
    fields |= {f"tokenizer.ggml.{name}": of for name, of in tokens.items()}
    return one_tensor(folder / "target.gguf", "llama", **fields)


def one_tensor(path: Path, arch: str, **fields: Any) -> Path:
    write_gguf(path, arch, fields, iter([("output_norm.weight", torch.ones(8))]), "float32")
    return path


def head_file(
    folder: Path, tensors: Tensors | None = None, weights: Any = "float32", **config: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields and tensors of a head's file."""
    head, path = write_head(folder / "head", tensors, OFFICIAL | config), folder / "head.gguf"
    write_model(head, path, weights, target=target_file(folder))
    read = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in read.fields.items()}
    return fields, {one.name: one for one in read.tensors}


@pytest.mark.parametrize("norm_before_residual", [True, False])
def test_a_head_is_written_as_it_is(tmp_path: Path, *, norm_before_residual: bool) -> None:
    """Rotated halves of a key head, rows i and 8 + i, become its rows 2 i and 2 i + 1."""
    given = make_tensors()
    fields, tensors = head_file(tmp_path, given, norm_before_residual=norm_before_residual)
    assert fields["eagle3.norm_before_residual"] == norm_before_residual
    assert fields["eagle3.target_layers"] == [2, 4, 5]
    assert fields["eagle3.target_hidden_size"] == H
    ids = given["d2t"] + torch.arange(len(given["d2t"]))
    assert tensors["d2t"].data.tolist() == ids.tolist()
    assert "token_embd.weight" not in tensors  # llama.cpp takes the target's
    keys, own = tensors["blk.0.attn_k.weight"].data, given["midlayer.self_attn.k_proj.weight"]
    for head, half, row in product(range(2), range(2), range(8)):
        written = torch.tensor(keys[16 * head + 2 * row + half])
        assert torch.equal(written, own[16 * head + 8 * half + row])


def test_a_head_keeps_its_own_embedding(tmp_path: Path) -> None:
    _, tensors = head_file(tmp_path, make_tensors() | {"embed_tokens.weight": EMBEDDING})
    assert torch.equal(torch.tensor(tensors["token_embd.weight"].data), EMBEDDING)


def test_rows_that_eight_bit_blocks_do_not_fill_have_sixteen(tmp_path: Path) -> None:
    _, tensors = head_file(tmp_path, weights="q8_0")
    kinds = [tensors[f"blk.0.ffn_{name}.weight"].tensor_type.name for name in ("down", "gate")]
    assert kinds == ["F16", "Q8_0"]  # rows of 48 and of 32


def test_a_model_has_a_token_for_every_row(tmp_path: Path) -> None:
    """A drafter with more rows than the target has tokens, and one with fewer."""
    toy_model(0).save_pretrained(tmp_path / "small")
    path = tmp_path / "small.gguf"
    write_model(tmp_path / "small", path, "float32", target=target_file(tmp_path, VOCAB - 1))
    fields = {name: of.contents() for name, of in gguf.GGUFReader(path).fields.items()}
    assert fields["tokenizer.ggml.tokens"][-2:] == ["t94", "[PAD95]"]
    assert fields["tokenizer.ggml.token_type"][-2:] == [1, gguf.TokenType.UNUSED]
    more = target_file(tmp_path, VOCAB + 1)
    with pytest.raises(ModelConfigError, match="has 96 tokens, and its target's tokenizer 97"):
        write_model(tmp_path / "small", path, "float32", target=more)


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "qwen2"}, "of kind 'qwen2', and only Llama models"),
        ({"model_type": "llama", "attention_bias": True}, "'llama' with biases"),
        ({"model_type": "llama", "mlp_bias": True}, "'llama' with biases"),
        ({"model_type": "llama", **SCALED}, "scales rotations by 'linear'"),
    ],
)
def test_models_that_are_not_written(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelConfigError, match=says) as refused:
        write_model(tmp_path, tmp_path / "model.gguf", "float32")
    assert "convert_hf_to_gguf.py" in str(refused.value.hint)


def test_heads_that_are_not_written(tmp_path: Path) -> None:
    two = make_tensors() | {"fc.weight": torch.zeros(H, 2 * H)}
    with pytest.raises(ModelConfigError, match="fuses 2 target states, not three"):
        head_file(tmp_path, two, **LAYERS)
    with pytest.raises(ModelConfigError, match="scales rotations by 'linear'"):
        head_file(tmp_path, **SCALED)


def test_a_tokenizer_without_a_name_in_llamacpp(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="has no name for BPE behind Whitespace"):
        tokenizer_fields(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"target_hidden_size": 64}, "target states of width 64"),
        ({"target_layers": [2, 4, 9]}, r"target layers \[2, 4, 9\]"),
    ],
)
def test_a_head_of_another_target(wrong: dict[str, Any], says: str, tmp_path: Path) -> None:
    target, fields = target_file(tmp_path), {"target_hidden_size": H, "target_layers": [2, 4, 8]}
    tokens = {"tokenizer.ggml.tokens": [f"t{n}" for n in range(VOCAB)]}
    for change, refusal in (({}, None), (wrong, says)):
        of = {f"eagle3.{name}": value for name, value in (fields | change).items()}
        head = one_tensor(tmp_path / "head.gguf", "eagle3", **tokens, **of)
        if refusal is None:
            assert check_pair(target, head).num_hidden_layers == 8
        else:
            with pytest.raises(ModelConfigError, match=f"of another pair .*: it has {refusal}"):
                check_pair(target, head)
    with pytest.raises(ModelError, match="is an EAGLE-3 head, which drafts for a target"):
        check_pair(head, head)


def test_a_full_disk_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
    with pytest.raises(OutputError, match="no space left"):
        one_tensor(tmp_path / "model.gguf", "llama")
    assert list(tmp_path.iterdir()) == []
