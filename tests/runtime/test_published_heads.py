"""EAGLE-3 heads as their makers publish them: keys, names and defaults, read or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specctl.errors import ModelError
from specctl.runtime.eagle3 import LoadedHead, load_eagle3
from tests.runtime.heads import (
    DRAFT_VOCAB,
    EMBEDDING,
    OFFICIAL,
    SPECULATORS,
    TARGET,
    VOCAB,
    H,
    Tensors,
    make_tensors,
    write_head,
)

Config = dict[str, Any]
LIST = "eagle_aux_hidden_state_layer_ids"
TOP = ("lm_head.weight", "d2t", "t2d")
BARE = {k: v for k, v in OFFICIAL.items() if k != "eagle_config"}
ROPE_KINDS = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def load(folder: Path, config: Config, tensors: Tensors, **changes: Any) -> LoadedHead:
    target = SimpleNamespace(**(vars(TARGET) | changes))
    lm_head = torch.ones(VOCAB, H)
    return load_eagle3(
        write_head(folder, tensors, config),
        target_embedding=EMBEDDING,
        target_config=target,
        target_lm_head=lm_head,
    )


def renamed(rule: Callable[[str], str]) -> Tensors:
    return {rule(name): tensor for name, tensor in make_tensors().items()}


def wrapped(prefix: str, layer: str = "layers.0.") -> Tensors:
    return renamed(
        lambda name: name if name in TOP else prefix + name.replace("midlayer.", layer, 1)
    )


def nested(**more: Any) -> Config:
    return {**SPECULATORS, **more}


# --------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (wrapped(""), OFFICIAL),
        (wrapped("model."), OFFICIAL | {"architectures": ["LlamaEagle3DraftModel"]}),
        (wrapped("model.", "midlayer."), OFFICIAL),
        (wrapped("draft_model."), OFFICIAL),
        (wrapped("module.draft_model.", "midlayer."), OFFICIAL),
        (wrapped("eagle_module."), OFFICIAL),
        (wrapped("_orig_mod.", "midlayer."), OFFICIAL),
        (renamed(lambda name: f"module.{name}"), OFFICIAL),
        (renamed(lambda n: f"module.{'' if n in TOP else 'model.'}{n}"), OFFICIAL),
        (wrapped("", "layers.32."), OFFICIAL),  # numbered behind the target's layers
        (wrapped(""), nested(eagle_aux_hidden_state_layer_ids=[2, 4, 5])),
        (make_tensors() | {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)}, OFFICIAL),
        (make_tensors() | {"verifier_norm.weight": torch.ones(H)}, OFFICIAL),
        (make_tensors() | {"verifier_lm_head.weight": torch.ones(DRAFT_VOCAB, H)}, OFFICIAL),
        ({k: v for k, v in make_tensors().items() if k != "t2d"}, OFFICIAL),
        ({k: v for k, v in make_tensors().items() if k != "d2t"}, OFFICIAL),
        (make_tensors(), BARE),
        (make_tensors(), {k: v for k, v in OFFICIAL.items() if k != "draft_vocab_size"}),
        (make_tensors(), OFFICIAL | {"num_hidden_layers": 40}),
        (make_tensors(), {k: v for k, v in OFFICIAL.items() if k != "num_hidden_layers"}),
        (make_tensors(), OFFICIAL | {"tie_word_embeddings": True, "use_cache": True}),
        (make_tensors(), OFFICIAL | {"attention_bias": True}),
        (make_tensors(), OFFICIAL | {"hidden_act": "swish", "pretraining_tp": 1}),
        (make_tensors(), OFFICIAL | {"sliding_window": 16, "use_sliding_window": False}),
        (make_tensors(), OFFICIAL | {"sliding_window": 4096, "layer_types": ["sliding_attention"]}),
        (make_tensors(), OFFICIAL | {"sliding_window": 16, "layer_types": ["full_attention"]}),
    ],
)
def test_the_same_head_in_other_clothes(tmp_path: Path, tensors: Tensors, config: Config) -> None:
    wanted = load(tmp_path / "wanted", OFFICIAL, make_tensors())
    found = load(tmp_path / "found", config, tensors)
    assert found.readings[0].config == wanted.head.config
    pairs = zip(found.head.state_dict().values(), wanted.head.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert torch.equal(found.head.target_ids, wanted.head.target_ids)


def test_weights_in_two_files_are_one_head(tmp_path: Path) -> None:
    tensors = make_tensors()
    wanted = load(tmp_path / "head", OFFICIAL, tensors)
    (tmp_path / "head" / "model.safetensors").unlink()
    names = sorted(tensors)
    for index, part in enumerate((names[:5], names[5:])):
        file = tmp_path / "head" / f"model-{index}.safetensors"
        save_file({name: tensors[name] for name in part}, file)
    found = load_eagle3(tmp_path / "head", target_embedding=EMBEDDING, target_config=TARGET)
    pairs = zip(found.head.state_dict().values(), wanted.head.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_number_formats_may_be_mixed(tmp_path: Path) -> None:
    tensors = {k: v.bfloat16() if v.is_floating_point() else v for k, v in make_tensors().items()}
    mixed = {k: v.float() if "norm" in k else v for k, v in tensors.items()}
    mixed |= {"d2t": tensors["d2t"].int(), "t2d": tensors["t2d"].to(torch.uint8)}
    wanted, found = (load(tmp_path / "head", OFFICIAL, one).head for one in (tensors, mixed))
    pairs = zip(found.state_dict().values(), wanted.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    load(tmp_path / "head", OFFICIAL, make_tensors())
    save_file(make_tensors(seed=2), tmp_path / "head" / "model-1.safetensors")
    with pytest.raises(ModelError, match=r"has d2t in model\.safetensors and in a file before it"):
        load(tmp_path / "head", OFFICIAL, make_tensors())


def test_a_head_of_all_tokens_may_share_the_targets_output_layer(tmp_path: Path) -> None:
    tensors = {k: v for k, v in make_tensors().items() if k not in ("lm_head.weight", "d2t", "t2d")}
    for config in (OFFICIAL | {"draft_vocab_size": VOCAB}, OFFICIAL | {"draft_vocab_size": None}):
        head = load(tmp_path / "head", config, tensors).head
        assert torch.equal(head.lm_head.weight, torch.ones(VOCAB, H))
        assert head.config.draft_vocab_size == VOCAB
        assert torch.equal(head.target_ids, torch.arange(VOCAB))


# --------------------------------------------------------------------------- two readings


def flat(top: list[int] | None = None, inner: list[int] | None = None) -> Config:
    return BARE | ({LIST: top} if top else {}) | ({"eagle_config": {LIST: inner}} if inner else {})


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        (flat(), [(2, 4, 5)]),
        (flat(inner=[2, 4, 5]), [(2, 4, 5)]),  # the authors' layers
        (flat([2, 4, 5]), [(2, 4, 5)]),
        (flat([2, 4, 5], [2, 4, 5]), [(2, 4, 5)]),
        (flat([2, 4, 5], [1, 3, 4]), [(2, 4, 5)]),  # for vLLM, and for SGLang
        (flat([3, 5, 7], [2, 4, 6]), [(3, 5, 7)]),
        (flat(inner=[1, 3, 4]), [(2, 4, 5), (1, 3, 4)]),  # SpecForge's and ModelOpt's own list
        (flat([1, 3, 4]), [(2, 4, 5), (1, 3, 4)]),
        (flat(inner=[1, 2, 5]), [(2, 3, 6), (1, 2, 5)]),
        (flat(inner=[3, 4, 6]), [(3, 4, 6), (4, 5, 7)]),
        (flat([0, 3, 5]), [(0, 3, 5), (1, 4, 6)]),
        (flat(inner=[1, 3, 7]), [(1, 3, 7)]),  # as outputs the last layer's
        (nested(), [(2, 4, 5)]),
        (nested(**{LIST: [1, 3, 4]}), [(1, 3, 4)]),  # speculators lists inputs
        (nested(**{LIST: [2, 4, 5]}), [(2, 4, 5)]),
    ],
)
def test_fused_layers_by_their_inputs(
    tmp_path: Path, config: Config, inputs: list[tuple[int, ...]]
) -> None:
    """Both readings where makers and engines differ, that of the makers first."""
    loaded = load(tmp_path / "head", config, make_tensors())
    assert [one.config.aux_layers for one in loaded.readings] == inputs
    assert all(bool(one.words) == (len(inputs) > 1) for one in loaded.readings)


@pytest.mark.parametrize(
    ("config", "norms"),
    [
        (OFFICIAL, [False]),
        (OFFICIAL | {"norm_before_residual": True}, [True]),
        (nested(norm_before_residual=True), [True]),
        (nested(norm_before_residual=False), [False]),
        ({k: v for k, v in SPECULATORS.items() if k != "norm_before_residual"}, [True, False]),
        (nested(norm_before_residual=None), [True, False]),
    ],
)
def test_norm_before_residual_by_layout(tmp_path: Path, config: Config, norms: list[bool]) -> None:
    """Absent in speculators' layout, vLLM takes true and speculators false."""
    loaded = load(tmp_path / "head", config, make_tensors())
    assert [one.config.norm_before_residual for one in loaded.readings] == norms
    assert all("norm_before_residual" in one.words for one in loaded.readings if len(norms) > 1)


@pytest.mark.parametrize("fused", [2, 4, 5])
def test_as_many_states_are_fused_as_are_listed(tmp_path: Path, fused: int) -> None:
    """And further columns of zeros change nothing."""
    tensors, layers = make_tensors(), [2, 4, 5, 6, 7][:fused]
    more = torch.zeros(H, max(0, fused - 3) * H)
    tensors["fc.weight"] = torch.cat([tensors["fc.weight"], more], 1)[:, : fused * H].contiguous()
    head = load(tmp_path / "head", nested(**{LIST: layers}), tensors).head
    assert head.config.aux_layers == tuple(layers)
    states = torch.randn(2, fused * H, generator=torch.Generator().manual_seed(0))
    least = min(3, fused) * H
    wanted = states[:, :least] @ make_tensors()["fc.weight"][:, :least].T
    torch.testing.assert_close(head.fuse(states), wanted)


# --------------------------------------------------------------------------- rotations


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, {"rope_type": "default", "rope_theta": 1e4}),
        ({"rope_theta": 500000}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_parameters": {"rope_theta": 5e5}}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_scaling": {"rope_theta": 5e5}}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {"rope_type": "default", "rope_theta": 5e5},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        (
            {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}},
            {"rope_type": "default", "rope_theta": 1e4},
        ),
        (
            {"rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [1]}},
            {"rope_type": "default", "rope_theta": 1e4},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        ),
        ({"rope_scaling": YARN}, {**YARN, "rope_theta": 1e4}),
        (
            {"rope_parameters": {**YARN, "rope_theta": 1e6, "attention_factor": None}},
            {**YARN, "rope_theta": 1e6},
        ),
        (
            {"rope_parameters": ROPE_KINDS, "layer_types": ["full_attention"]},
            {"rope_type": "default", "rope_theta": 5e5},
        ),
        (
            {"rope_parameters": {kind: {"rope_theta": 7.0} for kind in ROPE_KINDS}},
            {"rope_type": "default", "rope_theta": 7.0},
        ),
    ],
)
def test_rotations_of_either_generation(
    tmp_path: Path, changes: Config, wanted: Config, caplog: pytest.LogCaptureFixture
) -> None:
    head = load(tmp_path / "head", OFFICIAL | changes, make_tensors()).head
    assert head.config.rope_parameters == wanted
    assert "rope" not in caplog.text


def test_a_linear_rotation_is_slower(tmp_path: Path) -> None:
    def cosines(scaling: Config) -> Tensor:
        return load(tmp_path / "head", OFFICIAL | scaling, make_tensors()).head.cos

    linear = cosines({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    torch.testing.assert_close(linear[18], cosines({"rope_theta": 5e5})[9])


# --------------------------------------------------------------------------- refusals


def plus(name: str, *shape: int) -> Tensors:
    return make_tensors() | {name: torch.ones(shape or (1,))}


def minus(*names: str) -> Tensors:
    return {name: tensor for name, tensor in make_tensors().items() if name not in names}


def but(**changes: Any) -> Config:
    return OFFICIAL | changes


def cast(dtype: torch.dtype) -> Tensors:
    return {k: v.to(dtype) if "up_proj" in k else v for k, v in make_tensors().items()}


BY_CONFIG: dict[str, tuple[Config, str]] = {
    # another arithmetic
    "EAGLE-3.1": (but(fc_norm=True), "fc_norm true"),
    "SGLang's older name": (but(use_aux_norm=True), "use_aux_norm true"),
    "normed outputs": (nested(norm_output=True), "norm_output true"),
    "gpt-oss": (nested(norm_before_fc=True), "norm_before_fc true"),
    "nested": (but(eagle_config={"norm_before_fc": True}), "norm_before_fc"),
    "gelu": (but(hidden_act="gelu"), "hidden_act gelu"),
    "a window": (but(sliding_window=16, layer_types=["sliding_attention"]), "last 16 .* alone"),
    "Qwen's window": (but(sliding_window=16, use_sliding_window=True), "last 16 positions alone"),
    "half a rotation": (but(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    # layers
    "the last output": (flat([2, 4, 8]), "8 is the output of the last layer"),
    "nested, the last": (nested(**{LIST: [2, 4, 8]}), "output of the last layer"),
    "outside": (flat([2, 4, 9]), "not rising ones below 8"),
    "falling": (flat([5, 4, 2]), "not rising ones below 8"),
    "twice": (nested(**{LIST: [2, 2, 5]}), "not rising"),
    "negative": (nested(**{LIST: [2, 4, -3]}), "not rising"),
    "no numbers": (flat(inner=["2", "4", "5"]), "no list of layer numbers"),  # type: ignore[list-item]
    "four listed": (flat([1, 2, 4, 5]), r"fuses 3 .* lists layers \[1, 2, 4, 5\]"),
    "two lists": (flat([2, 4, 5], [2, 4, 6]), "at the top and .* under eagle_conf"),
    # rotations
    "dynamic": (but(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_type 'dynamic'"),
    "longrope": (but(rope_scaling={"type": "longrope"}), "'longrope'"),
    "by kind": (
        but(rope_parameters=ROPE_KINDS),
        r"attention \(full_attention, sliding_attention\)",
    ),
    "an unknown key": (but(rope_scaling={"rope_theta": 1.0, "bend": 3}), "bend for rope_type"),
    "no factor": (but(rope_scaling={"type": "yarn"}), "without factor"),
    "two rotations": (
        but(rope_parameters={"rope_type": "default"}, rope_scaling={"type": "su"}),
        "has rope_parameters .* and rope_scaling .*su",
    ),
    "llama3 of no length": (
        but(rope_scaling={"type": "llama3", "factor": 8.0, **BANDS}),
        "'llama3' without original_max_position_embeddings",
    ),
    "two thetas": (but(rope_theta=1e6, rope_parameters={"rope_theta": 1e4}), "1000000.0 and"),
    "a part": (but(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
    # sizes
    "another lm_head": (but(draft_vocab_size=30), "d2t has shape"),
    "a text as a size": (but(head_dim="16"), "head_dim '16' in its config.json"),
    "no heads": (but(num_key_value_heads=0), "num_key_value_heads 0"),
    "a text as eagle_config": (but(eagle_config="x"), "eagle_config 'x' in its config.json, no ob"),
    "no size": (but(intermediate_size=None), "intermediate_size None"),
    "another size": (but(intermediate_size=64), "midlayer.mlp.*shape"),
}
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
BY_TENSOR: dict[str, tuple[Tensors, str]] = {
    "block fp8": (plus("fc.weight_scale_inv"), "quantised weights with scales"),
    "NVFP4": (plus("midlayer.mlp.up_proj.weight_scale_2"), "weights with scales"),
    "bitsandbytes": (plus("midlayer.mlp.up_proj.SCB"), "weights with scales"),
    "compressed": (plus("midlayer.mlp.up_proj.weight_packed"), "weights with scales"),
    "fp8 without scales": (cast(torch.float8_e4m3fn), "float8_e4m3fn .*: midlayer.mlp.up_proj.w"),
    "int8": (cast(torch.int8), "int8 weights"),
    "no fc": (minus("fc.weight"), "lacks fc.weight: a head that fuses no states"),
    "Qwen3": (plus("midlayer.self_attn.q_norm.weight", 16), "norms of queries and keys"),
    "fused norms": (plus("fc_norm.0.weight", H), "norm of each fused state.*fc_norm.0"),
    "SGLang's older norms": (plus("aux_norm_low.weight", H), "aux_norm_low"),
    "norm before": (plus("input_norm.weight", H), "norm before fc"),
    "MLA": (plus("midlayer.self_attn.kv_a_proj_with_mqa.weight"), "latent attention"),
    "MoE": (plus("midlayer.mlp.experts.0.up_proj.weight"), "experts"),
    "biases": (plus("midlayer.self_attn.q_proj.bias", 64), "biases.*midlayer.self_attn.q_proj.b"),
    "LoRA": (plus("midlayer.mlp.up_proj.lora_A.weight"), "LoRA"),
    "parallel heads": (plus("parallel_draft_heads.0.x.weight"), "parallel draft heads"),
    "two layers": (wrapped("") | {"layers.1.x": torch.ones(1)}, r"2 layers \(layers.0, layers.1\)"),
    "a wide fc": (make_tensors() | {"fc.weight": torch.ones(2 * H, 3 * H)}, "fc.weight has shape"),
    "a column more": (plus("fc.weight", H, 3 * H + 1), "97 columns, no multiple of the target's"),
    "no map": (minus("d2t", "t2d"), "neither d2t nor t2d"),
    "ids above": (make_tensors() | {"d2t": torch.full((DRAFT_VOCAB,), VOCAB)}, "vocabulary maps"),
    "one id": (make_tensors() | {"d2t": -torch.arange(DRAFT_VOCAB)}, "vocabulary maps"),
    "two maps": (make_tensors() | {"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "vocabulary maps"),
    "no lm_head": (minus("lm_head.weight"), "no lm_head.weight"),
    "target ids": (make_tensors() | {"d2t": make_tensors()["t2d"].nonzero()[:, 0]}, "vocabulary m"),
    "a stray tensor": (plus("midlayer.extra.weight"), "unknown midlayer.extra.weight"),
    "wrapped, one less": (
        {k: v for k, v in wrapped("model.").items() if "up_proj" not in k},
        "lacks layers.0.mlp.up_proj.weight",
    ),
}
REFUSED: dict[str, tuple[Config, Tensors, str]] = {
    **{name: (config, make_tensors(), words) for name, (config, words) in BY_CONFIG.items()},
    **{name: (OFFICIAL, tensors, words) for name, (tensors, words) in BY_TENSOR.items()},
    "no aux": (
        but(eagle_config={"use_aux_hidden_state": False}),
        minus("fc.weight"),
        "use_aux_hidden_state false: it reads the last hidden state alone",
    ),
    "fp8": (
        but(quantization_config=FP8),
        plus("midlayer.mlp.up_proj.weight_scale"),
        r"FP8 weights with scales \(quantization_config modelopt\).*: midlayer.mlp.up_proj.weight_",
    ),
    "AWQ": (
        but(quantization_config={"quant_method": "awq"}),
        plus("midlayer.mlp.up_proj.qweight"),
        "quantization_config awq",
    ),
    "four unlisted": (BARE, plus("fc.weight", H, 4 * H), "fuses 4 .* lists no layers"),
    "one": (BARE, plus("fc.weight", H, H), "fuses 1 target state"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_by_its_name(tmp_path: Path, case: str) -> None:
    config, tensors, words = REFUSED[case]
    with pytest.raises(ModelError, match=words) as refused:
        load(tmp_path / "head", config, tensors)
    assert " layer." not in str(refused.value)  # our own name of the layer
    assert refused.value.hint or "shape" in str(refused.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (OFFICIAL | {"num_hidden_layers": 40}, "num_hidden_layers 40, and the file has one layer"),
        (OFFICIAL | {"attention_bias": True}, "attention_bias true, and the file has no biases"),
        (flat(inner=[1, 3, 7]), "the other reading, inputs of 2, 4, 8, is not supported"),
    ],
)
def test_what_engines_read_otherwise_is_said(
    tmp_path: Path, config: Config, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(tmp_path / "head", config, make_tensors())
    assert words in caplog.text
    assert any("config.json has" in note for note in loaded.notes)


@pytest.mark.parametrize(("config", "layout"), [(BARE, "the flat"), (SPECULATORS, "speculators'")])
def test_what_was_read_and_assumed_is_noted(tmp_path: Path, config: Config, layout: str) -> None:
    notes = "; ".join(load(tmp_path / "head", config, make_tensors()).notes)
    assert f"in {layout} layout" in notes
    assert "inputs of layers 2, 4, 5 assumed" in notes
    assert "rope_theta 10000 assumed" in notes
    assert f"{DRAFT_VOCAB} draft tokens of {VOCAB}" in notes


def test_keys_that_all_engines_read_alike_are_read_in_one_way(tmp_path: Path) -> None:
    """The advice of the warning, followed."""
    loaded = load(tmp_path / "head", flat(inner=[1, 3, 4]), make_tensors())
    assert (
        loaded.readings[0].fix
        == f'"{LIST}": [2, 4, 5] at the top, for vLLM, and [1, 3, 4] under eagle_config, for SGLang'
    )
    absent = {k: v for k, v in SPECULATORS.items() if k != "norm_before_residual"}
    [first, second] = load(tmp_path / "other", absent, make_tensors()).readings
    assert json.loads(f"{{{first.fix}}}") == {"norm_before_residual": True}
    assert json.loads(f"{{{second.fix}}}") == {"norm_before_residual": False}
