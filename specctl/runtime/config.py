"""Options of the verbs that decode: models, prompts, sampling. Nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from specctl.records import PositiveInt, Record, option
from specctl.runtime.identity import Dtype, check_device, check_model

if TYPE_CHECKING:
    from specctl.runtime.conversations import DecodeSettings
    from specctl.runtime.load import Pair

Decisions = Literal["auto", "fused", "torch", "onnx"]
"""Backend of a policy's learned part; the rule stays the same.

    auto     fused kernels inside captured rounds on CUDA, where the policy has them; else torch
    fused    fused kernels; policies without them are rejected
    torch    the rule's own tensors
    onnx     onnxruntime on the loop's device, for a learned scorer of fit c2t or survival

All decide alike; docs/artifact-format.md states how exactly.
"""

PromptFormat = Literal["auto", "text"]
"""Format of prompt files: found by their content, or text, of which each line is a prompt."""


class ModelsConfig(Record):
    """A pair of models and its device."""

    target: str = option(
        "embedded", "Target: folder, GGUF file, hub id, or 'embedded'", group="common"
    )
    drafter: str = option(
        "embedded",
        "Drafter: EAGLE-3 head or small model, 'embedded[:small]', or 'none'",
        group="common",
    )
    device: str = option(
        "auto",
        "auto, cpu, cuda, cuda:N, or cuda:0,cuda:1: the target's layers spread over those GPUs",
        group="model",
    )
    dtype: Dtype = option(
        "auto", "auto (float32 on CPU, bfloat16 on CUDA), float32, bfloat16, float16", group="model"
    )
    threads: PositiveInt | None = option(
        None,
        "CPU threads of torch, or of llama.cpp's server",
        default="its own choice",
        group="model",
    )

    def check(self) -> None:
        """Rejects unknown devices and models before anything is loaded."""
        check_device(self.device)
        for name in (self.target, *([self.drafter] if self.drafter != "none" else [])):
            check_model(name)

    def load_pair(self) -> Pair:
        """Loads both models; see `specctl.runtime.load.load_pair`."""
        import torch

        from specctl.runtime.load import load_pair

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        drafter = None if self.drafter == "none" else self.drafter
        return load_pair(self.target, drafter, device=self.device, dtype=self.dtype)


class DecodingConfig(ModelsConfig):
    """Models, prompts and decoding settings."""

    format: PromptFormat = option("auto", "Prompts: auto, or text, of which each line is a prompt")
    strict: bool = option(False, "Refuse a prompt that cannot be used, in place of skipping it")
    limit: PositiveInt | None = option(
        None, "Use N prompts, spread over the categories", default="all", group="common"
    )
    limit_seed: int = option(0, "Seed of the choice that --limit makes")
    max_new_tokens: PositiveInt = option(128, "Tokens to emit per turn at most", group="common")
    batch_size: PositiveInt = option(1, "Prompts decoded together")
    temperature: float = option(0.0, "Temperature; 0 is greedy", group="sampling")
    top_k: int = option(0, "Sample among the N likeliest tokens; 0 for all", group="sampling")
    top_p: float = option(1.0, "Sample within this nucleus mass, in (0, 1]", group="sampling")
    seed: int = option(0, "Seed; every request draws its own stream from it", group="sampling")

    def check(self) -> None:
        super().check()
        _ = self.settings

    @property
    def settings(self) -> DecodeSettings:
        from specctl.runtime.conversations import DecodeSettings
        from specctl.runtime.requests import Sampling

        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.seed)
        return DecodeSettings(self.max_new_tokens, sampling)

    @property
    def prompt_options(self) -> dict[str, Any]:
        """The options of `collect.prompts.load_prompts`."""
        return self.model_dump(include={"format", "limit", "limit_seed", "strict"})
