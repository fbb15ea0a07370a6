"""Draft checkpoints as makers publish them, in miniature: their `config.json` and tensor names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Config = dict[str, Any]
LAYER = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "post_attention_layernorm")
MODEL = (
    *("model.embed_tokens", "model.norm", "lm_head"),
    *(f"model.layers.{i}.{name}" for i in (0, 1, 2) for name in (*LAYER, "input_layernorm")),
)
EAGLE = ("fc", "embed_tokens", *(f"layers.0.{name}" for name in LAYER))
HEAD = ("hidden_norm", "input_layernorm", *LAYER)
OFFICIAL = ("fc", "norm", "lm_head", *(f"midlayer.{name}" for name in HEAD))
INDEXED = ("fc", "norm", "lm_head", *(f"layers.0.{name}" for name in HEAD))
WRAPPED = (*(f"model.{name}" for name in INDEXED if name != "lm_head"), "lm_head")
BLOCK = ("fc", "norm", "hidden_norm", *(f"layers.{i}.{n}" for i in (0, 1) for n in LAYER))
NEXTN = ("model.layers.61.enorm", "model.layers.61.hnorm", "model.layers.61.eh_proj")
MTP = ("mtp.fc", "mtp.norm", "mtp.pre_fc_norm_hidden", *(f"mtp.layers.0.{one}" for one in LAYER))
LLAMA: Config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
SIXTEEN: Config = LLAMA | {"num_hidden_layers": 16}
THREE: Config = LLAMA | {"num_hidden_layers": 3}


def arch(name: str, **more: Any) -> Config:
    return {"architectures": [name], "model_type": "llama", **more}


def speculators(kind: str, **more: Any) -> Config:
    return {"architectures": ["X"], "speculators_model_type": kind, **more}


KINDS: dict[str, tuple[Config, Iterable[str], str]] = {
    # EAGLE-3
    "SafeAILab": (LLAMA | {"draft_vocab_size": 32000}, OFFICIAL, "eagle3"),
    "SafeAILab, weights not downloaded": (LLAMA | {"draft_vocab_size": 32000}, (), "eagle3"),
    "SafeAILab, 13B": (
        LLAMA | {"num_hidden_layers": 40, "draft_vocab_size": 9},
        OFFICIAL,
        "eagle3",
    ),
    "no draft_vocab_size": (LLAMA | {"num_hidden_layers": 1}, OFFICIAL, "eagle3"),
    "SpecForge": (arch("LlamaForCausalLMEagle3"), OFFICIAL, "eagle3"),
    "SpecForge, weights not downloaded": (arch("LlamaForCausalLMEagle3"), (), "eagle3"),
    "AngelSlim": (arch("Eagle3LlamaForCausalLM"), OFFICIAL, "eagle3"),
    "AngelSlim for speech": (arch("CosyVoice3Eagle3LlamaForCausalLM"), OFFICIAL, "eagle3"),
    "ModelOpt": (arch("LlamaForCausalLMEagle3"), INDEXED, "eagle3"),
    "ModelOpt for Kimi": (arch("Eagle3DeepseekV2ForCausalLM"), (), "eagle3"),
    "ModelOpt, parallel heads": (
        arch("LlamaForCausalLMEagle3"),
        (*INDEXED, "parallel_draft_heads.0.medusa_layers.0.linear"),
        "eagle3",
    ),
    "Automodel": (arch("LlamaEagle3DraftModel", parallel_drafting=False), WRAPPED, "eagle3"),
    "Automodel for gpt-oss": (arch("GptOssEagle3DraftModel"), WRAPPED, "eagle3"),
    "speculators": (speculators("eagle3"), INDEXED, "eagle3"),
    "vLLM's Qwen3": (arch("Eagle3Qwen3ForCausalLM"), (), "eagle3"),
    "vLLM's MiniMax": (arch("Eagle3MiniMaxM2ForCausalLM"), (), "eagle3"),
    # P-EAGLE
    "P-EAGLE of SpecForge": (arch("PEagleDraftModel"), (*INDEXED, "mask_hidden"), "peagle"),
    "P-EAGLE of vLLM": (arch("PeagleLlamaForCausalLM"), (), "peagle"),
    "P-EAGLE of Automodel": (arch("LlamaEagle3DraftModel", parallel_drafting=True), (), "peagle"),
    "P-EAGLE by its tensor": (arch("LlamaForCausalLMEagle3"), (*OFFICIAL, "mask_hidden"), "peagle"),
    "P-EAGLE of speculators": (speculators("peagle"), INDEXED, "peagle"),
    # EAGLE-1 and -2
    "EAGLE-1 of SafeAILab": (LLAMA | {"num_hidden_layers": 1}, EAGLE, "eagle"),
    "EAGLE-1 without its embedding": (LLAMA, [one for one in EAGLE if "embed" not in one], "eagle"),
    "EAGLE-1 of two layers": (SIXTEEN, (*EAGLE, "layers.1.mlp.up_proj"), "eagle"),
    "EAGLE-1 of SGLang": (arch("LlamaForCausalLMEagle"), (), "eagle"),
    "EAGLE-1 of SGLang, Qwen2": (arch("Qwen2ForCausalLMEagle"), (), "eagle"),
    "EAGLE-1 of vLLM": (arch("EagleLlamaForCausalLM"), EAGLE, "eagle"),
    "EAGLE-1 of vLLM, DeepSeek": (arch("EagleDeepSeekMTPModel"), (), "eagle"),
    "EAGLE-1 of Automodel": (arch("LlamaEagleDraftModel"), (), "eagle"),
    "EAGLE-1 by vLLM's model_type": ({"model_type": "eagle"}, (), "eagle"),
    # blocks
    "DFlash": (arch("DFlashDraftModel", dflash_config={"mask_token_id": 1}), BLOCK, "dflash"),
    "DFlash of AngelSlim": (arch("QwenDFlashDraftModel"), BLOCK, "dflash"),
    "DFlash of speculators": (speculators("dflash"), (), "dflash"),
    "DFlash2 of speculators": (speculators("dflash2"), (), "dflash"),
    "DFlash2 of vLLM": (arch("DFlash2DraftModel"), (), "dflash"),
    "XPress of vLLM 0.33": (arch("Qwen3XPressModel"), (), "dflash"),
    "DFlash by its config": ({"model_type": "qwen3", "dflash_config": {"a": 1}}, BLOCK, "dflash"),
    "DFlash by its tensors": (LLAMA, BLOCK, "dflash"),
    "Muse": (arch("MuseGlimmerAssistantModel"), (), "dflash"),
    "DSpark of SpecForge": (
        arch("DSparkDraftModel", dflash_config={"projector_type": "dspark"}),
        (*BLOCK, "markov_head.w1"),
        "dspark",
    ),
    "DSpark of ModelOpt": (
        arch("DFlashDraftModel", dflash_config={"markov_rank": 256}),
        (*BLOCK, "markov_w1"),
        "dspark",
    ),
    "DSpark of DeepSpec": (arch("Qwen3DSparkModel", markov_rank=256), (), "dspark"),
    "DSpark of vLLM, Gemma 4": (arch("Gemma4DSparkModel"), (), "dspark"),
    "DSpark of speculators": (speculators("dspark"), (), "dspark"),
    # Medusa, MLP, MTP
    "Medusa of vLLM": (arch("MedusaModel", model_type="medusa"), (), "medusa"),
    "Medusa of its authors": ({"medusa_num_heads": 4}, ("0.0.linear", "0.1"), "medusa"),
    "Medusa of ModelOpt": (LLAMA, (*MODEL, "medusa_heads.0.0.linear"), "medusa"),
    "MLP of IBM": ({"model_type": "mlp_speculator"}, ("speculator.emb.0",), "mlp_speculator"),
    "MLP by its architecture": (arch("MLPSpeculatorPreTrainedModel"), (), "mlp_speculator"),
    "MTP of SGLang": (arch("DeepseekV3ForCausalLMNextN"), NEXTN, "mtp"),
    "MTP of vLLM": (arch("DeepSeekMTPModel", model_type="deepseek_mtp"), NEXTN, "mtp"),
    "MTP of Qwen3.5": (arch("Qwen3_5MTP", model_type="qwen3_5_mtp"), MTP, "mtp"),
    "MTP by its tensors": (arch("DeepseekV3ForCausalLM"), NEXTN, "mtp"),
    "MTP of Gemma 4": (arch("Gemma4AssistantForCausalLM"), (), "mtp"),
    "MTP of speculators": (speculators("mtp"), (), "mtp"),
    # whole models
    "Llama": (THREE, MODEL, "draft_model"),
    "Llama, weights not downloaded": (SIXTEEN, (), "draft_model"),
    "a tied model": (THREE, [one for one in MODEL if one != "lm_head"], "draft_model"),
    "GPT-2": (
        arch("GPT2LMHeadModel", model_type="gpt2"),
        ("wte", "h.0.attn.c_attn"),
        "draft_model",
    ),
    "Qwen3.5 with MTP": (arch("Qwen3_5ForCausalLM"), (*MODEL[:-1], *MTP), "draft_model"),
    "DeepSeek-V3 with MTP": (arch("DeepseekV3ForCausalLM"), (*MODEL, *NEXTN), "draft_model"),
    "NVIDIA's Eagle, a model of images": (
        arch("Eagle2_5_VLForConditionalGeneration", num_hidden_layers=3),
        MODEL,
        "draft_model",
    ),
    "a model without architectures": ({"model_type": "llama"}, MODEL, "draft_model"),
}
"""`config.json`, stems of tensors, and the kind."""


def publish(folder: Path, config: Config, stems: Iterable[str], *, pickled: bool = False) -> Path:
    """A folder with tensors of one number; no file of weights without stems."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    named = ((f"{one}.weight" if one != "mask_hidden" else one) for one in stems)
    if tensors := {name: torch.zeros(1) for name in named}:
        if pickled:
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            save_file(tensors, folder / "model.safetensors")
    return folder
