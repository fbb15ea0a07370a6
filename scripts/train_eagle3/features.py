"""What a target computes at every slot of its own text, stored once in files of `ROWS` rows.

A file holds, for all slots of its rows one after the other: `token_ids`, `features` (the fused
states, `[n, 3 H]` bfloat16), `states` (the input of the target's output layer, `[n, H]` bfloat16)
and `labels` (the argmax of the target after each token). A slot takes 8 H + 8 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .own_text import Row

ROWS, FORWARD_ROWS = 256, 16
Place = tuple[int, int, int, int]  # file, first slot, tokens, tokens of the prompt
COLUMNS = ("token_ids", "features", "states", "labels")


@torch.inference_mode()
def write_features(
    target: Any, rows: Sequence[Row], layers: Sequence[int], folder: Path, max_length: int
) -> None:
    """Writes the files that the folder lacks or holds in part; rows are cut at `max_length` tokens.

    Args:
        target: a causal LM of transformers, on any device.
        layers: target layers whose input is fused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unembed = target.get_output_embeddings().weight
    for first in range(0, len(rows), ROWS):
        path, chosen = folder / f"{first // ROWS:05d}.safetensors", rows[first : first + ROWS]
        if path.exists() and len(safe_open(path, "pt").get_tensor("lengths")) == len(chosen):
            continue
        ids = [torch.tensor((r.prompt_ids + r.answer_ids)[:max_length]) for r in chosen]
        found: dict[int, tuple[Tensor, ...]] = {}
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        for at in range(0, len(order), FORWARD_ROWS):
            some = order[at : at + FORWARD_ROWS]
            padded = pad_sequence([ids[i] for i in some], batch_first=True).to(target.device)
            output = target.model(padded, use_cache=False, output_hidden_states=True)
            fused = torch.cat([output.hidden_states[layer] for layer in layers], -1)
            for j, i in enumerate(some):
                size = len(ids[i])
                state = output.last_hidden_state[j, :size]
                labels = (state @ unembed.T).argmax(-1)
                found[i] = (ids[i].int(), fused[j, :size], state, labels.int())
        columns = zip(*(found[i] for i in range(len(ids))), strict=True)
        values = {
            name: torch.cat(column).cpu() for name, column in zip(COLUMNS, columns, strict=True)
        }
        values["lengths"] = torch.tensor([len(row) for row in ids])
        values["num_prompt"] = torch.tensor([len(row.prompt_ids) for row in chosen])
        save_file(values, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
        print(f"features of {first + len(chosen):,} of {len(rows):,} rows", flush=True)


class Example(NamedTuple):
    """A batch of rows, padded, with what the target says about it."""

    token_ids: Tensor  # [B, T]
    features: Tensor  # [B, T, 3 H]
    states: Tensor  # [B, T, H]
    labels: Tensor  # [B, T], target ids
    is_answer: Tensor  # [B, T] bool: the token was written by the target

    def to(self, device: str) -> Example:
        """The batch on a device."""
        return Example(*(column.to(device) for column in self))


class FeatureRows:
    """The rows of a folder of features, read from the mapped files when a batch wants them.

    Args:
        keep: numbers of the rows to use, in the order in which they were written.
    """

    def __init__(self, folder: Path, keep: Sequence[int]) -> None:
        self.files = [safe_open(p, "pt") for p in sorted(folder.glob("*.safetensors"))]
        places = []
        for number, file in enumerate(self.files):
            lengths, prompts = file.get_tensor("lengths"), file.get_tensor("num_prompt")
            starts = (lengths.cumsum(0) - lengths).tolist()
            columns = (starts, lengths.tolist(), prompts.tolist())
            places += [(number, *place) for place in zip(*columns, strict=True)]
        self.places = [places[i] for i in keep if i < len(places) and places[i][3] < places[i][2]]
        self.num_tokens = sum(length - prompt for _, _, length, prompt in self.places)

    def batches(self, num_rows: int, seed: int) -> Iterator[list[Place]]:
        """Batches without end, every row once an epoch, of answers of about equal length."""
        rng = Random(seed)
        while True:
            order = rng.sample(self.places, len(self.places))
            window = 32 * num_rows
            batches = []
            for first in range(0, len(order), window):
                some = sorted(order[first : first + window], key=lambda p: p[2] - p[3])
                batches += [some[i : i + num_rows] for i in range(0, len(some), num_rows)]
            rng.shuffle(batches)
            yield from batches

    def example(self, places: Sequence[Place]) -> Example:
        """The rows at the places."""
        columns = []
        for name in COLUMNS:
            rows = [
                self.files[file].get_slice(name)[start : start + length]
                for file, start, length, _ in places
            ]
            columns.append(pad_sequence(rows, batch_first=True))
        ids, features, states, labels = columns
        slot = torch.arange(ids.shape[1])
        lengths, prompts = (torch.tensor([p[k] for p in places])[:, None] for k in (2, 3))
        is_answer = (slot >= prompts) & (slot < lengths)
        return Example(ids.long(), features, states, labels.long(), is_answer)
