"""A transformers decoder driven with explicit positions and slots.

Target and small-model drafter share it: both read a prompt, both evaluate tree nodes behind it.
The model's own code does all arithmetic; this class only feeds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specctl.errors import ModelConfigError
from specctl.runtime.attention import Pass, Prompt
from specctl.runtime.cache import SlotCache


@dataclass(frozen=True)
class ForwardResult:
    """Logits `[T', V]` and the captured states `[T, layers * H]`, or None."""

    logits: Tensor
    features: Tensor | None


class CachedModel:
    """Forward passes over slots of a shared cache.

    Args:
        model: a decoder-only causal LM, loaded with `attention.ATTENTION`, in eval mode.
        aux_layers: indices of decoder layers whose *input* is captured, low to high; empty for
            none (EAGLE-3's three fused states).
    """

    def __init__(self, model: PreTrainedModel, aux_layers: tuple[int, ...] = ()) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        check_model(self.config)
        self.device = model.device
        self.layers = decoder_layers(model, self.config.num_hidden_layers)
        self.cache: SlotCache | None = None
        self._key: Tensor | None = None
        # Any mask of four axes keeps transformers from making one; attention reads none.
        self._no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        self._captured: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self.aux_layers: tuple[int, ...] = ()
        self.capture(aux_layers)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def context_tokens(self) -> int:
        """Positions that the model was made for."""
        return int(self.config.max_position_embeddings)

    @property
    def window(self) -> int | None:
        """Tokens of its sliding window; None without one."""
        kinds = getattr(self.config, "layer_types", None)
        default = getattr(self.config, "use_sliding_window", True)
        slides = "sliding_attention" in kinds if kinds else default
        return getattr(self.config, "sliding_window", None) if slides else None

    def capture(self, aux_layers: tuple[int, ...]) -> None:
        """Chooses the layers whose inputs forwards return as features."""
        for hook in self._hooks:
            hook.remove()
        self.aux_layers = aux_layers
        self._hooks = [
            self.layers[index].register_forward_pre_hook(self._keep(index), with_kwargs=True)
            for index in aux_layers
        ]

    def allocate(self, num_slots: int, capacity: int) -> None:
        """A fresh cache of `num_slots` requests of up to `capacity` tokens, its memory taken now.

        Raises:
            ModelConfigError: a context beyond the model's sliding window.
        """
        if self.window is not None and capacity > self.window:
            raise ModelConfigError(
                "sliding-window attention",
                expected=f"prompt, new tokens and draft within {self.window} tokens",
                found=f"{capacity}",
                fix="shorten the prompt or lower max_new_tokens",
            )
        num_layers = self.config.num_hidden_layers
        if self._key is None:  # one token tells heads and dtype, whatever the family calls them
            self.cache = SlotCache(num_layers, 1, 1)
            with torch.inference_mode():
                self.extend(0, 0, torch.zeros(1, 1, dtype=torch.int64, device=self.device))
            assert self.cache.storage is not None
            self._key = self.cache.storage[0, 0, :, 0]
        self.cache = None  # the memory of the one before may be needed for this one
        self.cache = SlotCache(num_layers, num_slots, capacity, self._key)

    def extend(
        self, slot: int, offset: int, token_ids: Tensor, *, last_only: bool = True
    ) -> ForwardResult:
        """Appends text to one slot: logits of the last token or of all, features of all.

        Args:
            token_ids: `[1, T]` int64.
        """
        size = token_ids.shape[1]
        positions = torch.arange(offset, offset + size, device=self.device)[None]
        return self._run(Prompt(offset), token_ids, positions, slot, int(last_only))

    def forward(self, reads: Pass) -> ForwardResult:
        """One pass over slots 0..B-1; asks the device nothing of itself."""
        return self._run(reads, reads.token_ids[None], reads.position_ids[None], 0, 0)

    def _run(
        self, reads: Pass | Prompt, token_ids: Tensor, position_ids: Tensor, slot: int, keep: int
    ) -> ForwardResult:
        assert self.cache is not None, "allocate() comes first"
        self.cache.stage(reads, token_ids.shape[1], slot)
        output = self.model(
            input_ids=token_ids,
            # Nodes past the last position are never emitted, but must not be out of bounds.
            position_ids=position_ids.clamp(max=self.context_tokens - 1),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
            attention_mask=self._no_mask,
            reads=reads,
        )
        features = None
        if self.aux_layers:
            features = torch.cat([self._captured.pop(index) for index in self.aux_layers], -1)[0]
        return ForwardResult(output.logits[0], features)

    def _keep(self, index: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._captured[index] = args[0] if args else kwargs["hidden_states"]

        return hook


def decoder_layers(model: PreTrainedModel, num_layers: int) -> nn.ModuleList:
    """The list of decoder layers, found by its length rather than by a name per family."""
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not found:
        raise ModelConfigError(
            f"model {type(model).__name__}",
            expected=f"one list of {num_layers} decoder layers",
            found="none of that length",
            fix="use a decoder-only model",
        )
    return found[0]


def check_model(config: Any) -> None:
    """Refuses architectures whose state is not a plain key-value cache.

    Raises:
        ModelConfigError: recurrent layers, an encoder, or no position ids.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    unknown = sorted(kinds - {"full_attention", "sliding_attention"})
    if getattr(config, "is_encoder_decoder", False):
        unknown.append("an encoder-decoder")
    if getattr(config, "max_position_embeddings", None) is None:
        unknown.append("no max_position_embeddings (ALiBi or recurrent)")
    if unknown:
        raise ModelConfigError(
            f"model type {config.model_type}",
            expected="a decoder with position ids whose layers all keep keys and values",
            found=", ".join(unknown),
            fix="use a dense attention model",
        )
