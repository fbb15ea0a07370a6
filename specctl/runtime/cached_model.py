"""A transformers decoder with explicit positions and slots, and the cache of the slots.

Target and small-model drafter share it: both read a prompt and evaluate tree nodes behind it. All
arithmetic is the model's own code. A slot is one request's row of keys and values. Active requests
occupy slots 0..B-1, so that a forward works on a view; when a request leaves, the last active one
moves into its slot (`move`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from specctl.errors import ModelConfigError
from specctl.kernels.commit_kv import commit_kv
from specctl.kernels.dispatch import current
from specctl.runtime.attention import Pass, Prompt


class SlotCache(Cache):
    """A transformers cache over one `[2 L, slots, H, S, D]` tensor on each device that has layers.

    The model calls `update`. The runtime calls `stage` before a forward, which sets where it
    writes, and `commit` after verification, which keeps the accepted entries.

    Args:
        layers: the device of each layer. capacity: S, tokens a slot can hold.
        like: `[H, D]`, one layer's key of one token, for heads and dtype; None allocates at the
            first use.
    """

    def __init__(
        self,
        layers: Sequence[torch.device],
        num_slots: int,
        capacity: int,
        like: Tensor | None = None,
    ) -> None:
        super().__init__(layers=[])  # the base class stores by layer, this one by device
        self.num_slots, self.capacity, self.num_layers = num_slots, capacity, len(layers)
        # The place of each layer among those of its device.
        self._at = [(device, layers[:index].count(device)) for index, device in enumerate(layers)]
        self._parts: dict[torch.device, Tensor] = {}
        if like is not None:
            self._allocate(like)
        self._slots, self._width, self._appends = slice(0, 0), 0, False
        self._reads: Pass | Prompt = Prompt()

    def stage(self, reads: Pass | Prompt, num_new: int, slot: int = 0) -> None:
        """Prepares the next forward: a pass over slots 0..B-1, or a prompt into one slot."""
        width = reads.before + num_new if isinstance(reads, Prompt) else reads.width
        if width > self.capacity:
            raise ModelConfigError(
                f"a request needs {width} tokens, but the KV cache holds {self.capacity}; "
                "shorten the prompt or lower max_new_tokens"
            )
        num_rows = 1 if isinstance(reads, Prompt) else reads.num_rows
        self._slots, self._reads, self._width = slice(slot, slot + num_rows), reads, width
        # The new entries of a single text end where attention does.
        self._appends = isinstance(reads, Prompt) or (reads.exact and num_rows == 1)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **_: object
    ) -> tuple[Tensor, Tensor]:
        """Stores `[1, H, T, D]` and returns the visible entries, `[B, H, width, D]`."""
        if not self._parts:
            if key_states.shape != value_states.shape:
                raise ModelConfigError(
                    f"keys {tuple(key_states.shape[1:])} and values "
                    f"{tuple(value_states.shape[1:])} have different sizes; models with "
                    "latent attention cannot run here"
                )
            self._allocate(key_states[0, :, 0])
        reads, end = self._reads, self._width
        both = self.of_layer(layer_idx)[:, self._slots, :, :end]
        keys, values = both[0], both[1]
        if self._appends:
            keys[:, :, end - key_states.shape[2] :] = key_states
            values[:, :, end - key_states.shape[2] :] = value_states
        else:
            assert isinstance(reads, Pass)
            reads = reads.on(keys.device)
            keys[reads.row, :, reads.place] = key_states[0].transpose(0, 1)
            values[reads.row, :, reads.place] = value_states[0].transpose(0, 1)
        return keys, values

    def commit(self, offset: Tensor, path: Tensor) -> None:
        """Keeps the accepted path of each request; see `kernels.commit_kv`."""
        for device, part in self._parts.items() if path.shape[1] > 1 else ():
            with current(device):
                commit_kv(part[:, : len(offset)], offset.to(device), path.to(device))

    def move(self, source: int, target: int) -> None:
        for part in self._parts.values() if source != target else ():
            part[:, target] = part[:, source]

    def of_layer(self, layer: int) -> Tensor:
        """`[2, slots, H, S, D]`: keys and values of a layer."""
        device, index = self._at[layer]
        return self._parts[device][2 * index : 2 * index + 2]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Entries before the staged forward, for transformers; positions are explicit."""
        del layer_idx
        return self._reads.before if isinstance(self._reads, Prompt) else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Visible entries and their offset, for models that size masks by the cache."""
        del query_length, layer_idx
        return self._width, 0

    @property
    def is_compileable(self) -> bool:
        return False

    def _allocate(self, like: Tensor) -> None:
        heads, dim = like.shape
        with torch.inference_mode(False):  # so that it may be written in and out of that mode
            for device, last in dict(self._at).items():
                size = (2 * last + 2, self.num_slots, heads, self.capacity, dim)
                self._parts[device] = torch.zeros(size, dtype=like.dtype, device=device)


@dataclass(frozen=True)
class ForwardResult:
    """The outputs of a forward."""

    logits: Tensor  # `[T', V]`
    features: Tensor | None  # `[T, layers * H]`, captured states, or None


class CachedModel:
    """Forward passes over slots of a shared cache.

    Args:
        model: a decoder-only causal LM, loaded with `attention.ATTENTION`, in eval mode; its
            layers may be on several devices, connected by hooks of accelerate.
        aux_layers: indices of decoder layers whose *input* is captured, low to high; empty for
            none (EAGLE-3's three fused states).
    """

    def __init__(self, model: PreTrainedModel, aux_layers: tuple[int, ...] = ()) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        check_model(self.config)
        self.device = model.device
        self.layers = decoder_layers(model, self.config.num_hidden_layers)
        self._of_layers = [next(layer.parameters()).device for layer in self.layers]
        self.cache: SlotCache | None = None
        # transformers renames it from 5.24 on, a family at a time.
        named = "cache" in inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if named else "past_key_values"
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
    def devices(self) -> tuple[torch.device, ...]:
        """Devices of the layers, first the one of tokens and logits."""
        return tuple(dict.fromkeys([self.device, *self._of_layers]))

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def context_tokens(self) -> int:
        """Positions that the model was trained for."""
        return int(self.config.max_position_embeddings)

    @property
    def window(self) -> int | None:
        """Tokens of the sliding window; None without one."""
        kinds = getattr(self.config, "layer_types", None)
        default = getattr(self.config, "use_sliding_window", True)
        slides = "sliding_attention" in kinds if kinds else default
        return getattr(self.config, "sliding_window", None) if slides else None

    def capture(self, aux_layers: tuple[int, ...]) -> None:
        """Sets the layers whose inputs are returned as features."""
        for hook in self._hooks:
            hook.remove()
        self.aux_layers = aux_layers
        self._hooks = [
            self.layers[index].register_forward_pre_hook(self._keep(index), with_kwargs=True)
            for index in aux_layers
        ]

    def allocate(self, num_slots: int, capacity: int) -> None:
        """Allocates a cache of `num_slots` requests of up to `capacity` tokens."""
        if self.window is not None and capacity > self.window:
            raise ModelConfigError(
                f"prompt, new tokens and draft take {capacity} tokens, more than the sliding "
                f"window of {self.window}; shorten the prompt or lower max_new_tokens"
            )
        if self._key is None:  # heads and dtype, by a forward of one token
            self.cache = SlotCache(self._of_layers, 1, 1)
            with torch.inference_mode():
                self.extend(0, 0, torch.zeros(1, 1, dtype=torch.int64, device=self.device))
            self._key = self.cache.of_layer(0)[0, 0, :, 0]
        self.cache = None  # frees the old cache before the new one is allocated
        self.cache = SlotCache(self._of_layers, num_slots, capacity, self._key)

    def extend(
        self, slot: int, offset: int, token_ids: Tensor, *, last_only: bool = True
    ) -> ForwardResult:
        """Appends text `[1, T]` to a slot: logits of the last token or of all, features of all."""
        size = token_ids.shape[1]
        positions = torch.arange(offset, offset + size, device=self.device)[None]
        return self._run(Prompt(offset), token_ids, positions, slot, int(last_only))

    def forward(self, reads: Pass) -> ForwardResult:
        """Runs a pass over slots 0..B-1, without waiting for the device."""
        return self._run(reads, reads.token_ids[None], reads.position_ids[None], 0, 0)

    def _run(
        self, reads: Pass | Prompt, token_ids: Tensor, position_ids: Tensor, slot: int, keep: int
    ) -> ForwardResult:
        assert self.cache is not None, "allocate() comes first"
        self.cache.stage(reads, token_ids.shape[1], slot)
        output = self.model(
            input_ids=token_ids,
            # Nodes past the last position are never emitted, but must stay in bounds.
            position_ids=position_ids.clamp(max=self.context_tokens - 1),
            use_cache=True,
            logits_to_keep=keep,
            attention_mask=self._no_mask,
            reads=reads,
            **{self._cache_argument: self.cache},
        )
        features = None
        if self.aux_layers:
            states = [self._captured.pop(index).to(self.device) for index in self.aux_layers]
            features = torch.cat(states, -1)[0]
        return ForwardResult(output.logits[0], features)

    def _keep(self, index: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._captured[index] = args[0] if args else kwargs["hidden_states"]

        return hook


def decoder_layers(model: PreTrainedModel, num_layers: int) -> nn.ModuleList:
    """Finds the list of decoder layers by its length."""
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not found:
        raise ModelConfigError(
            f"model {type(model).__name__} has no list of {num_layers} decoder layers; use a "
            "decoder-only model"
        )
    return found[0]


def check_model(config: Any) -> None:
    """Rejects architectures whose state is not a plain key-value cache."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    unknown = sorted(kinds - {"full_attention", "sliding_attention"})
    if getattr(config, "is_encoder_decoder", False):
        unknown.append("an encoder-decoder")
    if getattr(config, "max_position_embeddings", None) is None:
        unknown.append("no max_position_embeddings (ALiBi or recurrent)")
    if unknown:
        raise ModelConfigError(
            f"model type {config.model_type} is not supported: it has {', '.join(unknown)}",
            hint="use a decoder with position ids and keys and values in every layer",
        )
