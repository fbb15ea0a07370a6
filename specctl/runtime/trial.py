"""A head tried on its target: 64 positions of a fixed text, one forward of each.

At every position the head predicts the token that the target prefers there. This compares two
readings of one checkpoint, and shows a head that was not made for this target.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from specctl.errors import ModelConfigError
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


def better_reading(loaded: LoadedHead, target: CachedModel, tokenizer: Any, name: str) -> Reading:
    """The reading that predicts its target better; a warning names both, another one a head that
    predicts nothing. `notes` gets the outcome.

    Raises:
        ModelConfigError: a head that predicts NaN.
    """
    head, readings = loaded.head, loaded.readings
    layers = sorted({layer for one in readings for layer in one.config.aux_layers})
    token_ids, logits, states = _read(target, tokenizer, layers)
    wanted = logits[1:].argmax(-1)
    draft_ids = torch.full((logits.shape[-1],), -1, device=wanted.device)
    draft_ids[head.target_ids] = torch.arange(len(head.target_ids), device=wanted.device)
    own, hits, logps = draft_ids[wanted], list[int](), list[Tensor]()
    for reading in readings:
        head.config = reading.config
        drafter = Eagle3Drafter(head, reading.config.aux_layers)
        drafter.allocate(1, token_ids.shape[1], 1)
        features = torch.cat([states[layer][:-1] for layer in drafter.aux_layers], -1)
        outputs = drafter.read_prompt(drafter.cache, 0, 0, token_ids[:, 1:], features)
        logp = head.logits(outputs).float().log_softmax(-1)
        if bool(logp.isnan().any()):
            problem = f"EAGLE-3 head {name} predicts no numbers (NaN) in a trial on its target"
            raise ModelConfigError(problem, hint="use another checkpoint of it")
        hits.append(int((head.to_target_ids(logp.argmax(-1)) == wanted).sum()))
        logps.append(logp[own >= 0].gather(1, own[own >= 0, None])[:, 0])
    one_token = int(wanted.bincount().max())  # hits of the best token at all positions
    gain, clear = logps[-1] - logps[0], ""
    best = -1 if float(gain.sum()) > 0 and hits[-1] > one_token else 0
    if float(gain.mean().abs()) < 2 * float(gain.std()) / len(gain) ** 0.5:
        clear = ", which the trial hardly tells apart"
    reading, outcomes = readings[best], [f"{one} of {len(wanted)} tokens" for one in hits]
    loaded.notes.append(f"predicts {outcomes[best]} of its target in a trial")
    if len(readings) > 1:
        ways = "; ".join(f"{one.words}: {of}" for one, of in zip(readings, outcomes, strict=True))
        loaded.notes.append(f"read with {reading.words}; {ways}")
        log.warning(
            "EAGLE-3 head %s can be read in two ways%s: %s. Read with %s; write %s into its "
            "config.json, which settles it",
            name, clear, ways, reading.words, reading.fix,
        )  # fmt: skip
    if hits[best] <= one_token:
        log.warning(
            "EAGLE-3 head %s predicts %s of its target, no more than one token everywhere would: "
            "it is of another target or another fine-tune of the same sizes, or is not trained",
            name, outcomes[best],
        )  # fmt: skip
    head.config = reading.config
    return reading


def _read(
    target: CachedModel, tokenizer: Any, layers: list[int]
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """The text's ids, the target's logits after each, and its states at the layers."""
    room = min(target.context_tokens, target.window or target.context_tokens, NUM_POSITIONS + 1)
    token_ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :room].to(target.device)
    target.capture(tuple(layers))
    target.allocate(1, token_ids.shape[1])
    result = target.extend(0, 0, token_ids, last_only=False)
    target.capture(())
    target.cache = None
    assert result.features is not None
    states = result.features.chunk(len(layers), -1)
    return token_ids, result.logits, dict(zip(layers, states, strict=True))
