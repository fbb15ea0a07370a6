"""The EAGLE-3 head: its file, and the meaning of its layer, in training and at run time."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from scripts.train_eagle3.head import save_head, unrolled_outputs
from specctl.embedded import embedded_path
from specctl.errors import CheckpointKeyError, ModelConfigError
from specctl.runtime.eagle3 import load_eagle3
from specctl.runtime.identity import weights_digest
from tests.runtime.heads import (
    DRAFT_VOCAB,
    OFFICIAL,
    TARGET,
    VOCAB,
    H,
    Tensors,
    load,
    make_tensors,
    write_head,
)


def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def documented_block(tensors: Tensors, embeds: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
    """The layer by its published definition, in float64, causal, one head at a time."""
    w = {k: v.double() for k, v in tensors.items()}
    embeds, hidden = embeds.double(), hidden.double()
    mixed = torch.cat(
        [
            rms(embeds, w["midlayer.input_layernorm.weight"]),
            rms(hidden, w["midlayer.hidden_norm.weight"]),
        ],
        -1,
    )
    q, k, v = (mixed @ w[f"midlayer.self_attn.{n}_proj.weight"].T for n in "qkv")
    inverse = 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)
    angle = positions.double()[:, None] * inverse
    cos, sin = angle.cos(), angle.sin()

    def rotated(x: Tensor) -> Tensor:
        low, high = x[:, :8], x[:, 8:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    size = len(positions)
    future = torch.ones(size, size).triu(1).bool()
    heads = []
    for head in range(4):
        query = rotated(q[:, head * 16 : head * 16 + 16])
        key = rotated(k[:, head // 2 * 16 : head // 2 * 16 + 16])
        scores = (query @ key.T / 4.0).masked_fill(future, float("-inf"))
        heads.append(scores.softmax(-1) @ v[:, head // 2 * 16 : head // 2 * 16 + 16])
    hidden = hidden + torch.cat(heads, -1) @ w["midlayer.self_attn.o_proj.weight"].T
    normed = rms(hidden, w["midlayer.post_attention_layernorm.weight"])
    gate = F.silu(normed @ w["midlayer.mlp.gate_proj.weight"].T)
    up = normed @ w["midlayer.mlp.up_proj.weight"].T
    return hidden + (gate * up) @ w["midlayer.mlp.down_proj.weight"].T


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def test_block_equals_the_documented_layer(tmp_path: Path) -> None:
    tensors = make_tensors()
    head = load(write_head(tmp_path / "head", tensors))
    embeds, hidden = torch.randn(2, 1, 9, H, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(5, 14)
    ours = head.block(embeds, hidden, positions[None], causal)[0]
    documented = documented_block(tensors, embeds[0], hidden[0], positions)
    # fp32 against fp64 over a few hundred multiply-adds of order one.
    torch.testing.assert_close(ours.double(), documented, atol=2e-5, rtol=1e-5)
    logits = rms(documented, tensors["norm.weight"].double()) @ tensors["lm_head.weight"].double().T
    torch.testing.assert_close(head.logits(ours).double(), logits, atol=1e-4, rtol=1e-4)


def test_fuse_projects_only_where_widths_differ(tmp_path: Path) -> None:
    head = load(write_head(tmp_path / "head"))
    states = torch.randn(2, 3, 3 * H, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(head.fuse(states), states @ head.fc.weight.T)
    assert head.fuse(states[..., :H]) is not None
    torch.testing.assert_close(head.fuse(states[..., :H]), states[..., :H])


def test_embedded_head_round_trips_byte_for_byte(tmp_path: Path) -> None:
    folder, target = embedded_path("eagle3"), embedded_path("target")
    config = SimpleNamespace(**json.loads((target / "config.json").read_text()))
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    loaded = load_eagle3(
        folder, target_embedding=embedding, target_config=config, dtype=torch.bfloat16
    )
    head = loaded.head
    assert [one.config.aux_layers for one in loaded.readings] == [(2, 4, 5)]
    save_head(head, tmp_path)
    stored, again = (load_file(place / "model.safetensors") for place in (folder, tmp_path))
    assert stored.keys() == again.keys()
    assert all(torch.equal(stored[name], again[name]) for name in stored)
    configs = [json.loads((place / "config.json").read_text()) for place in (folder, tmp_path)]
    assert configs[0] == configs[1]
    listing = "eagle_aux_hidden_state_layer_ids"
    assert configs[0][listing] == [2, 4, 5]
    assert configs[0]["eagle_config"][listing] == [1, 3, 4]


def test_draft_ids_are_offsets(tmp_path: Path) -> None:
    tensors = make_tensors()
    head = load(write_head(tmp_path / "head", tensors))
    ids = head.to_target_ids(torch.arange(DRAFT_VOCAB))
    assert torch.equal(ids, torch.arange(DRAFT_VOCAB) + tensors["d2t"])
    assert torch.equal(ids, tensors["t2d"].nonzero()[:, 0])


def publish(folder: Path, content: object) -> Path:
    """A head as EAGLE's authors publish theirs."""
    write_head(folder)
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    return folder


def test_official_heads_load_as_they_are_published(tmp_path: Path) -> None:
    tensors = make_tensors()
    folder = publish(tmp_path / "head", tensors)
    wanted = load(write_head(tmp_path / "safe", tensors))
    found = load(folder)
    assert all(map(torch.equal, found.state_dict().values(), wanted.state_dict().values()))
    before = weights_digest(folder)
    publish(folder, tensors | {"norm.weight": tensors["norm.weight"] + 1})
    assert weights_digest(folder) != before


class Code:
    """An object whose unpickling would run code."""

    def __reduce__(self) -> object:
        return print, ("never",)


@pytest.mark.parametrize("content", [Code(), {"norm.weight": Code()}, [1.0], b"no archive"])
def test_a_published_head_that_is_no_plain_tensors_is_refused(
    tmp_path: Path, content: object, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = publish(tmp_path / "head", content)
    if isinstance(content, bytes):
        (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointKeyError, match="tensors"):
        load(folder)
    assert "never" not in capsys.readouterr().out


def test_a_head_of_fewer_positions_than_its_target_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(write_head(tmp_path / "head"))
    assert "made for 64 positions, its target for 128" in caplog.text


@pytest.mark.parametrize(("field", "value"), [("hidden_size", 2 * H), ("vocab_size", VOCAB + 1)])
def test_another_target_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    other = SimpleNamespace(**(vars(TARGET) | {field: value}))
    with pytest.raises(ModelConfigError, match=field):
        load(write_head(tmp_path / "head"), other)


def test_norm_before_residual_changes_the_residual(tmp_path: Path) -> None:
    plain = load(write_head(tmp_path / "a"))
    normed = load(write_head(tmp_path / "b", config=OFFICIAL | {"norm_before_residual": True}))
    embeds, hidden = torch.randn(2, 1, 4, H, generator=torch.Generator().manual_seed(5))
    positions = torch.arange(4)[None]
    outputs = [
        head.block(embeds, hidden, positions, lambda q, k, v: q * 0) for head in (plain, normed)
    ]
    for output, residual in zip(outputs, (hidden, rms(hidden, plain.hidden_norm)), strict=True):
        gate, up = plain.gate_up(rms(residual, plain.post_attention_layernorm)).chunk(2, -1)
        torch.testing.assert_close(
            output, residual + plain.down_proj(F.silu(gate) * up), atol=1e-5, rtol=1e-5
        )


def grown(kept: Tensors, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attends to the keys and values of one chain, as a runtime keeps them."""
    for name, new in (("keys", key), ("values", value)):
        kept[name] = torch.cat([kept[name], new], 2)
    return F.scaled_dot_product_attention(query, kept["keys"], kept["values"], enable_gqa=True)


def test_unrolled_training_equals_step_by_step_drafting(tmp_path: Path) -> None:
    head, num_steps, size = load(write_head(tmp_path / "head")), 5, 17
    generator = torch.Generator().manual_seed(6)
    token_ids = torch.randint(0, VOCAB, (2, size), generator=generator)
    features = torch.randn(2, size, 3 * H, generator=generator)
    slots = torch.tensor([[0, 3, 9], [2, 5, 10]])
    unrolled = unrolled_outputs(head, token_ids, features, slots, num_steps)
    for row in range(2):
        for column, slot in enumerate(slots[row].tolist()):
            kept: Tensors = {}

            def read(query: Tensor, key: Tensor, value: Tensor, kept: Tensors = kept) -> Tensor:
                kept.update(keys=key, values=value)
                return causal(query, key, value)

            embeds = head.embed(token_ids[row : row + 1, 1:])
            fused = head.fuse(features[row : row + 1, :-1])
            hidden = head.block(embeds, fused, torch.arange(size - 1)[None], read)[:, slot, None]
            cache = {name: part[:, :, : slot + 1] for name, part in kept.items()}
            for step in range(num_steps):
                torch.testing.assert_close(
                    unrolled[step][row, column], hidden[0, 0], atol=1e-5, rtol=1e-5
                )
                token = token_ids[row, slot + 2 + step].view(1, 1)
                position = torch.tensor([[slot + 1 + step]])
                hidden = head.block(head.embed(token), hidden, position, partial(grown, cache))
