"""Options of the verbs that decode: models, prompts, sampling. Nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specctl.records import PositiveInt, Record, option

if TYPE_CHECKING:
    from specctl.runtime.conversations import DecodeSettings
    from specctl.runtime.load import Pair


class ModelsConfig(Record):
    """A pair of models and where it runs."""

    target: str = option("embedded", "Target: folder, hub id, or 'embedded'")
    drafter: str = option(
        "embedded", "Drafter: EAGLE-3 head or small model, 'embedded[:small]', or 'none'"
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = option(
        "auto", "auto (float32 on CPU, bfloat16 on CUDA), float32, bfloat16, float16"
    )
    compile: bool = option(False, "Have torch.compile fuse the target's norms and MLPs")
    threads: PositiveInt | None = option(None, "CPU threads of torch", default="torch's own choice")

    def load_pair(self) -> Pair:
        """Loads both models; raises as `specctl.runtime.load.load_pair`."""
        import torch

        from specctl.runtime.load import load_pair

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        drafter = None if self.drafter == "none" else self.drafter
        return load_pair(
            self.target, drafter, device=self.device, dtype=self.dtype, compile=self.compile
        )


class DecodingConfig(ModelsConfig):
    """Models, prompts, and how these are decoded."""

    format: str = option(
        "auto", "Prompt format: auto, text, jsonl, spec-bench, humaneval, gsm8k, sharegpt"
    )
    limit: PositiveInt | None = option(None, "Use the first N prompts", default="all")
    max_new_tokens: PositiveInt = option(128, "Tokens to emit per turn at most")
    batch_size: PositiveInt = option(1, "Prompts decoded together")
    temperature: float = option(0.0, "Temperature; 0 is greedy")
    top_k: int = option(0, "Sample among the N likeliest tokens; 0 for all")
    top_p: float = option(1.0, "Sample within this nucleus mass, in (0, 1]")
    seed: int = option(0, "Seed; every request draws its own stream from it")

    @property
    def settings(self) -> DecodeSettings:
        """The decoding settings of the loop.

        Raises:
            UsageError: a setting of sampling out of range.
        """
        from specctl.runtime.conversations import DecodeSettings
        from specctl.runtime.requests import Sampling

        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.seed)
        return DecodeSettings(self.max_new_tokens, sampling)
