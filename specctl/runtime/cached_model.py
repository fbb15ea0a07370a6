"""A transformers decoder driven with explicit positions, masks and slots.

Target and small-model drafter share it: both extend a prefix, both evaluate tree nodes behind
it. The model's own code does all arithmetic; this class only feeds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specctl.errors import ModelConfigError
from specctl.kernels.dispatch import runs_fused
from specctl.runtime.attention import causal_inner, prefix_mask
from specctl.runtime.cache import Placed, SlotCache
from specctl.runtime.cascade import cascade_of
from specctl.runtime.packing import Layout, layout_of, packing_of, pays


@dataclass(frozen=True)
class ForwardResult:
    """Logits `[A, T', V]` and the captured states `[A, T, layers · H]`, or None."""

    logits: Tensor
    features: Tensor | None


class CachedModel:
    """Forward passes over slots of a shared cache.

    Args:
        model: a decoder-only causal LM, loaded with `attention.ATTENTION`, in eval mode.
        aux_layers: indices of decoder layers whose *input* is captured, low to high; empty for
            none (EAGLE-3's three fused states).

    Attributes:
        cascades: whether passes other than a prompt's attend by `kernels.tree_attention`, which
            needs no mask over the prefix. None leaves it to the device: where that op is fused.
    """

    cascades: bool | None = None

    def __init__(self, model: PreTrainedModel, aux_layers: tuple[int, ...] = ()) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        check_model(self.config)
        self.device, self.dtype = model.device, model.dtype
        self.layers = decoder_layers(model, self.config.num_hidden_layers)
        self.cache: SlotCache | None = None
        self._captured: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self.aux_layers: tuple[int, ...] = ()
        self.capture(aux_layers)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def context_tokens(self) -> int:
        """Positions that the model was made for."""
        return int(self.config.max_position_embeddings)

    def capture(self, aux_layers: tuple[int, ...]) -> None:
        """Chooses the layers whose inputs `forward` returns as features."""
        for hook in self._hooks:
            hook.remove()
        self.aux_layers = aux_layers
        self._hooks = [
            self.layers[index].register_forward_pre_hook(self._keep(index), with_kwargs=True)
            for index in aux_layers
        ]

    def allocate(self, num_slots: int, capacity: int) -> None:
        """A fresh cache of `num_slots` requests of up to `capacity` tokens."""
        check_window(self.config, capacity)
        self.cache = SlotCache(self.config.num_hidden_layers, num_slots, capacity)

    def extend(self, slot: int, offset: int, token_ids: Tensor) -> ForwardResult:
        """Appends text to one slot: logits of the last token, features of all.

        Args:
            token_ids: `[1, T]` int64.
        """
        size = token_ids.shape[1]
        positions = torch.arange(offset, offset + size, device=self.device)[None]
        inner = causal_inner(size, self.device)
        return self.forward(slot, [offset], token_ids, positions, inner, last_only=True)

    def forward(
        self,
        first_slot: int,
        offsets: list[int],
        token_ids: Tensor,
        position_ids: Tensor,
        inner: Tensor,
        *,
        behind: int = 0,
        last_only: bool = False,
        sizes: list[int] | None = None,
        mask_buffer: Tensor | None = None,
    ) -> ForwardResult:
        """One pass over A slots.

        Args:
            first_slot: the rows are slots first_slot .. first_slot + A - 1.
            offsets: entries visible before, and where visibility by `inner` starts, per row.
            token_ids, position_ids: `[A, T]` int64.
            inner: `[A or 1, T, M]` bool over the M entries behind the prefix; the last T of
                them are these tokens.
            behind: M - T, entries behind the prefix that earlier passes wrote.
            last_only: logits of the last token alone.
            sizes: tokens of each row, the others being padding. Where that pays, padding is left
                out of the pass, and the result is 0 there.
            mask_buffer: see `attention.prefix_mask`.
        """
        assert self.cache is not None, "allocate() comes first"
        cascades = not last_only and self._cascades(token_ids)
        if sizes is not None and pays(sizes):
            packed = self._packed(offsets, sizes, inner, cascades=cascades)
            return self._forward_packed(first_slot, *packed, token_ids, position_ids)
        rows, num_new = token_ids.shape
        width = self.cache.stage(first_slot, [offset + behind for offset in offsets], num_new)
        if cascades:
            layout = layout_of(offsets, [num_new] * rows, self.device)
            told = cascade_of(layout, inner, behind).options
        else:
            told = {"attention_mask": prefix_mask(offsets, inner, width, mask_buffer)}
        output = self.model(
            input_ids=token_ids,
            position_ids=position_ids.clamp(max=self.context_tokens - 1),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
            **told,
        )
        return ForwardResult(output.logits, self._features())

    def _cascades(self, token_ids: Tensor) -> bool:
        if self.cascades is not None:
            return self.cascades
        return runs_fused("tree_attention", token_ids)

    def _packed(
        self, offsets: list[int], sizes: list[int], inner: Tensor, *, cascades: bool
    ) -> tuple[Layout, dict[str, Any]]:
        """Where packed rows stand, and what attention is told of them."""
        if cascades:
            layout = layout_of(offsets, sizes, self.device)
            return layout, cascade_of(layout, inner).options
        packing = packing_of(offsets, sizes, inner)
        return packing, packing.options

    def _forward_packed(
        self,
        first_slot: int,
        layout: Layout,
        told: dict[str, Any],
        token_ids: Tensor,
        position_ids: Tensor,
    ) -> ForwardResult:
        result = self.forward_placed(
            layout, told, layout.pack(token_ids), layout.pack(position_ids), first_slot
        )
        num_columns, features = token_ids.shape[1], result.features
        if features is not None:
            features = layout.unpack(features, num_columns)
        return ForwardResult(layout.unpack(result.logits, num_columns), features)

    def forward_placed(
        self,
        placed: Placed,
        told: dict[str, Any],
        token_ids: Tensor,
        position_ids: Tensor,
        first_slot: int = 0,
    ) -> ForwardResult:
        """One pass over packed tokens, wherever they stand; asks the device nothing of itself.

        Args:
            told: what attention has to know, e.g. `Cascade.options`.
            token_ids, position_ids: `[1, T]` int64.

        Returns:
            Logits `[1, T, V]` and features `[1, T, layers · H]`.
        """
        assert self.cache is not None, "allocate() comes first"
        self.cache.stage_packed(first_slot, placed)
        output = self.model(
            input_ids=token_ids,
            position_ids=position_ids.clamp(max=self.context_tokens - 1),
            past_key_values=self.cache,
            use_cache=True,
            **told,
        )
        return ForwardResult(output.logits, self._features())

    def _features(self) -> Tensor | None:
        if not self.aux_layers:
            return None
        return torch.cat([self._captured.pop(index) for index in self.aux_layers], -1)

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
    """Refuses architectures whose state is not a plain key-value cache."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    foreign = sorted(kinds - {"full_attention", "sliding_attention"})
    if getattr(config, "is_encoder_decoder", False):
        foreign.append("an encoder-decoder")
    if getattr(config, "max_position_embeddings", None) is None:
        foreign.append("no max_position_embeddings (ALiBi or recurrent)")
    if foreign:
        raise ModelConfigError(
            f"model type {config.model_type}",
            expected="a decoder with position ids whose layers all keep keys and values",
            found=", ".join(foreign),
            fix="use a dense attention model",
        )


def check_window(config: Any, capacity: int) -> None:
    """Refuses a context beyond a sliding window, which the tree mask does not model."""
    kinds = getattr(config, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None) if slides else None
    if window is not None and capacity > window:
        raise ModelConfigError(
            "sliding-window attention",
            expected=f"prompt, new tokens and draft within {window} tokens",
            found=f"{capacity}",
            fix="shorten the prompt or lower max_new_tokens",
        )
