"""Training of the EAGLE-3 head: unrolled steps over target features (training-time test).

At step s the head sits at slot i, reads token i + 1 + s, takes its own previous output as hidden,
stands at position i + s, sees the true slots up to i and its own steps 1..s, and predicts what
the target says after token i + 1 + s. That is what the runtime does on a chain from slot i.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from specctl.runtime.eagle3 import parameter_parts
from specctl.runtime.eagle3_head import Eagle3Config, Eagle3Head

from .features import Example

NUM_STEPS = 5
STEP_DECAY = 0.9  # weight of a step relative to the one before


def new_head(
    target: Any, draft_ids: Tensor, intermediate_size: int, layers: tuple[int, ...]
) -> Eagle3Head:
    """An untrained head over the target's embedding; `lm_head` starts from the embedding's rows.

    Feature layers are written out, as serving engines want them.

    Args:
        target: a Llama of transformers. draft_ids: target ids that the head may draft, sorted.
    """
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    names += ("max_position_embeddings", "rms_norm_eps", "rope_parameters")
    config = Eagle3Config(
        **{name: getattr(target.config, name) for name in names},
        target_hidden_size=target.config.hidden_size,
        intermediate_size=intermediate_size,
        draft_vocab_size=len(draft_ids),
        aux_layers=layers,
    )
    embedding = target.get_input_embeddings().weight
    head = Eagle3Head(config, embedding.detach().clone(), config.max_position_embeddings)
    head.set_vocabulary(draft_ids - torch.arange(len(draft_ids)))
    with torch.no_grad():
        head.lm_head.weight.copy_(embedding[draft_ids])
    return head


class UnrolledAttention:
    """Attention of step 0 (causal) and of later steps (true slots up to i, then own steps)."""

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots  # [B, M]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def first(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Step 0 over all slots `[B, H, T, D]`."""
        self.keys, self.values = [key], [value]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def later(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Step s at the chosen slots `[B, H, M, D]`."""
        self.keys.append(key)
        self.values.append(value)
        groups = query.shape[1] // key.shape[1]
        keys = [k.repeat_interleave(groups, 1) for k in self.keys]
        values = [v.repeat_interleave(groups, 1) for v in self.values]
        query = query * query.shape[-1] ** -0.5
        hidden = self.slots[:, None, :, None] < torch.arange(keys[0].shape[2], device=query.device)
        prefix = (query @ keys[0].mT).masked_fill(hidden, float("-inf"))
        own = [(query * k).sum(-1, keepdim=True) for k in keys[1:]]
        weights = torch.cat([prefix, *own], -1).softmax(-1).to(values[0].dtype)
        size = keys[0].shape[2]
        context = weights[..., :size] @ values[0]
        for step, v in enumerate(values[1:]):
            context = context + weights[..., size + step, None] * v
        return context


def unrolled_outputs(
    head: Eagle3Head, token_ids: Tensor, features: Tensor, slots: Tensor, num_steps: int
) -> list[Tensor]:
    """Outputs of `block` at `slots` `[B, M]` for steps 0 .. num_steps - 1, each `[B, M, H]`.

    Slot i needs tokens up to i + num_steps, so slots stay below T - num_steps.
    """
    rows = torch.arange(len(slots), device=slots.device)[:, None]
    attention = UnrolledAttention(slots)
    positions = torch.arange(token_ids.shape[1] - 1, device=slots.device).expand(len(slots), -1)
    fused = head.fuse(features[:, :-1]).float()
    whole = head.block(head.embed(token_ids[:, 1:]), fused, positions, attention.first)
    hidden = whole[rows, slots]
    outputs = [hidden]
    for step in range(1, num_steps):
        embeds = head.embed(token_ids[rows, slots + 1 + step])
        hidden = head.block(embeds, hidden, slots + step, attention.later)
        outputs.append(hidden)
    return outputs


class HeadLoss:
    """The loss of a head on rows of features, and how often its top-1 token is the target's.

    Args:
        unembedding: `[V, H]`, the target's output matrix.
        soft_frac: share of the target's distribution over the draft ids in the label; the rest is
            the target's argmax, and a slot whose argmax is no draft id has no such part.
    """

    def __init__(self, head: Eagle3Head, unembedding: Tensor, soft_frac: float) -> None:
        self.head, self.soft_frac = head, soft_frac
        self.teacher_rows = unembedding[head.target_ids].to(torch.bfloat16)
        draft_ids = torch.arange(len(head.target_ids), device=unembedding.device)
        self.to_draft = draft_ids.new_full((len(unembedding),), -1)
        self.to_draft[head.target_ids] = draft_ids

    def __call__(self, example: Example, slots: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
        """Weighted cross-entropy in nats over the steps; by step, the slots that agree and all
        slots. A step that lies behind the end of every answer has no slots and no weight."""
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        with torch.autocast(slots.device.type, torch.bfloat16):
            outputs = unrolled_outputs(
                self.head, example.token_ids, example.features, slots, NUM_STEPS
            )
        total, weights, counts = torch.zeros((), device=slots.device), 0.0, []
        is_scored = F.pad(example.is_answer[:, 1:], (0, 1))
        # Steps of neighbouring slots share positions: the target speaks once at each.
        predicted = slots[:, :, None] + torch.arange(1, NUM_STEPS + 1, device=slots.device)
        is_used = is_scored & torch.zeros_like(is_scored).scatter(1, predicted.flatten(1), True)
        place = is_used.flatten().cumsum(0).view_as(is_used) - 1
        with torch.no_grad(), torch.autocast(slots.device.type, torch.bfloat16):
            teacher = (example.states[is_used] @ self.teacher_rows.T).float().softmax(-1)
        for step, hidden in enumerate(outputs):
            at = slots + 1 + step
            kept = is_scored[rows, at]
            with torch.autocast(slots.device.type, torch.bfloat16):
                logits = self.head.logits(hidden[kept])
            logp = logits.float().log_softmax(-1)
            labels = self.to_draft[example.labels[rows, at][kept]]
            size, num_labels = len(labels), int((labels >= 0).sum())
            soft = -(teacher[place[rows, at][kept]] * logp).sum() / max(1, size)
            hard = F.nll_loss(logp, labels, ignore_index=-1, reduction="sum") / max(1, num_labels)
            weight = STEP_DECAY**step if size else 0.0
            total = total + weight * (self.soft_frac * soft + (1 - self.soft_frac) * hard)
            weights += weight
            counts.append((int((logp.argmax(-1) == labels).sum()), size))
        return total / (weights or 1.0), counts


def agreement(counts: Iterable[tuple[int, int]]) -> list[float | None]:
    """Share of slots that agree, by step; none where a step has no slots."""
    return [round(right / size, 3) if size else None for right, size in counts]


def choose_slots(example: Example, slot_frac: float, generator: torch.Generator) -> Tensor:
    """`[B, M]` random slots to train at, as many as `slot_frac` of the longest answer's slots."""
    usable = example.token_ids.shape[1] - NUM_STEPS - 1
    # A slot is of use where the token that it predicts was written by the target.
    is_useful = example.is_answer[:, 2 : usable + 2]
    num_slots = max(1, int(slot_frac * int(is_useful.sum(1).max())))
    drawn = torch.rand(is_useful.shape, generator=generator).to(is_useful.device)
    return (is_useful.float() + drawn).topk(num_slots).indices.sort().values


def save_head(head: Eagle3Head, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors` in bfloat16, both in the official naming; the
    embedding stays with the target.

    The fused layers are listed twice, so that both engines take the same states: at the top by
    their inputs, which vLLM reads first (`v1/worker/gpu_model_runner.py`); under
    `eagle_config` one less, by the outputs before them, which is all that SGLang 0.5.23 reads: its
    targets add 1 (`models/llama.py`, `models/qwen2.py`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, state = head.config, head.state_dict()
    tensors: dict[str, Tensor] = {}
    for name, part in parameter_parts(config).items():
        names = [one.replace("layer.", "midlayer.", 1) for one in part]
        pieces = state[name].split([shape[0] for shape in part.values()])
        tensors |= dict(zip(names, pieces, strict=True))
    member = torch.zeros(config.vocab_size, dtype=torch.bool)
    member[head.target_ids.cpu()] = True
    tensors |= {"d2t": head.d2t, "t2d": member}
    for name, tensor in tensors.items():
        dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
        tensors[name] = tensor.detach().to("cpu", dtype).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    listing = "eagle_aux_hidden_state_layer_ids"
    outputs = [layer - 1 for layer in config.aux_layers]
    facts = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        **config.model_dump(exclude={"aux_layers", "norm_before_residual"}),
        "rope_theta": config.rope_parameters["rope_theta"],
        "hidden_act": "silu",
        "dtype": "bfloat16",
        listing: list(config.aux_layers),
        "eagle_config": {"use_aux_hidden_state": True, listing: outputs},
    }
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
