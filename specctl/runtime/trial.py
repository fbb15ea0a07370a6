"""A head tried on its target: 64 positions of a fixed text, one forward of each.

At every position the head predicts the token that the target prefers there. This compares two
readings of one checkpoint, and shows a head that was not made for this target.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specctl.runtime.cached_model import CachedModel
from specctl.runtime.drafter import Eagle3Drafter
from specctl.runtime.eagle3 import LoadedHead
from specctl.runtime.eagle3_config import Reading

log = logging.getLogger("specctl.models")
NUM_POSITIONS = 64
TEXT = '''def mean(values):
    """The mean of a list of numbers, or None if the list is empty."""
    if not values:
        return None
    total = 0
    for value in values:
        total = total + value
    return total / len(values)

What is the capital of France? The capital of France is Paris, a city on the river Seine with about
two million people. It has been the centre of the country for many hundred years.
'''
"""Long enough for any tokenizer; code and English, as most heads are trained on both."""


@dataclass(frozen=True)
class Outcome:
    """One reading on the text."""

    hits: int  # positions at which the head's likeliest token is the target's
    num_positions: int
    logp: Tensor  # of the target's tokens among the head's, where it can draft them
    most_common: int  # positions of the token that the target prefers most often

    @property
    def is_useless(self) -> bool:
        """No better than one token at all positions."""
        return self.hits <= self.most_common

    def __str__(self) -> str:
        return f"{self.hits} of {self.num_positions} tokens"


def tried(
    loaded: LoadedHead, readings: Sequence[Reading], target: CachedModel, tokenizer: Any
) -> list[Outcome]:
    """The outcome of each reading."""
    room = min(target.context_tokens, target.window or target.context_tokens, NUM_POSITIONS + 1)
    token_ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :room]
    token_ids, size = token_ids.to(target.device), token_ids.shape[1]
    layers = sorted({layer for one in readings for layer in one.config.aux_layers})
    target.capture(tuple(layers))
    target.allocate(1, size)
    result = target.extend(0, 0, token_ids, last_only=False)
    target.capture(())
    target.cache = None
    assert result.features is not None
    states = dict(zip(layers, result.features.chunk(len(layers), -1), strict=True))
    wanted, head, found = result.logits[1:].argmax(-1), loaded.head, list[Outcome]()
    draft_ids = torch.full((int(result.logits.shape[-1]),), -1, device=wanted.device)
    draft_ids[head.target_ids] = torch.arange(len(head.target_ids), device=wanted.device)
    for reading in readings:
        head.config = reading.config
        drafter = Eagle3Drafter(head, reading.config.aux_layers)
        drafter.allocate(1, size, 1)
        features = torch.cat([states[layer][:-1] for layer in drafter.aux_layers], -1)
        outputs = drafter.read_prompt(drafter.cache, 0, 0, token_ids[:, 1:], features)
        logp = head.logits(outputs).float().log_softmax(-1)
        hits = int((head.to_target_ids(logp.argmax(-1)) == wanted).sum())
        own = draft_ids[wanted]
        known = logp[own >= 0].gather(1, own[own >= 0, None])[:, 0]
        found.append(Outcome(hits, len(wanted), known, int(wanted.bincount().max())))
    head.config = loaded.readings[0].config
    return found


def better_reading(loaded: LoadedHead, target: CachedModel, tokenizer: Any, name: str) -> Reading:
    """The reading that predicts its target better; a warning names both, another one a head that
    predicts nothing. `notes` gets the outcome."""
    with torch.inference_mode():
        outcomes = tried(loaded, loaded.readings, target, tokenizer)
    gain, clear = outcomes[-1].logp - outcomes[0].logp, ""
    best = -1 if float(gain.sum()) > 0 and not outcomes[-1].is_useless else 0
    if float(gain.mean().abs()) < 2 * float(gain.std()) / len(gain) ** 0.5:
        clear = ", which the trial hardly tells apart"
    reading, outcome = loaded.readings[best], outcomes[best]
    loaded.notes.append(f"predicts {outcome} of its target in a trial")
    if len(outcomes) > 1:
        ways = [f"{one.words}: {of}" for one, of in zip(loaded.readings, outcomes, strict=True)]
        loaded.notes.append(f"read with {reading.words}; {'; '.join(ways)}")
        log.warning(
            "EAGLE-3 head %s can be read in two ways%s: %s. Read with %s; write %s into its "
            "config.json, which settles it",
            name, clear, "; ".join(ways), reading.words, reading.fix,
        )  # fmt: skip
    if outcome.is_useless:
        log.warning(
            "EAGLE-3 head %s predicts %s of its target, no more than one token everywhere would: "
            "it is of another target or another fine-tune of the same sizes, or is not trained",
            name, outcome,
        )  # fmt: skip
    head = loaded.head
    head.config = reading.config
    return reading
