"""Lossy acceptance inside a captured round: MARS by the kernel's walk."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specctl.kernels.bookkeeping import Laid
from specctl.kernels.node_features import node_features
from specctl.kernels.verify_tree import RunnerUp
from specctl.policy import Acceptance, Mars, Strict
from specctl.runtime.graphs.state import Rows


@dataclass(frozen=True)
class Relaxation:
    """MARS's second choice (`kernels.verify_tree.RunnerUp`).

    Attributes:
        bound: `[1]` float32. denied: `[V]` bool. form: of closeness.
    """

    bound: Tensor
    denied: Tensor
    form: Literal["ratio", "difference"]

    def of(self, laid: Laid, logits: Tensor, law: Tensor | None, state: Rows) -> RunnerUp:
        """What may be followed besides, given raw logits `[T, V]`.

        Args:
            law: `[T, V]` whose -inf are excluded; None where nothing is.
        """
        found = node_features(logits, 2, 1)
        return RunnerUp(
            found.top_ids[laid.node_at],
            found.top_two[laid.node_at],
            state.greedy,
            self.bound.expand(len(state.greedy)).contiguous(),
            self.form,
            self.denied,
            law,
            laid.node_at,
        )


def unsupported_acceptance(acceptance: Acceptance) -> str | None:
    """Why an acceptance cannot be captured; None if it can."""
    if isinstance(acceptance, Strict):
        return None
    if isinstance(acceptance, Mars) and acceptance.mode == "sound":
        return None
    mode = f", mode {acceptance.mode}" if isinstance(acceptance, Mars) else ""
    return f"acceptance {acceptance.kind}{mode} decides by torch rules alone"


def relaxation_of(
    acceptance: Acceptance, vocab_size: int, eos_ids: Collection[int], device: torch.device
) -> Relaxation | None:
    """Of a supported acceptance; None for a strict one. EOS is denied whatever it says."""
    if not isinstance(acceptance, Mars):
        return None
    denied = torch.zeros(vocab_size, dtype=torch.bool)
    denied[[token for token in {*acceptance.deny_token_ids, *eos_ids} if token < vocab_size]] = True
    theta = acceptance.theta
    value = {"ratio": theta, "margin": -theta}.get(acceptance.form)
    if value is None:
        value = math.log(theta) if theta > 0 else -math.inf
    bound = torch.tensor([value], dtype=torch.float32, device=device)
    form: Literal["ratio", "difference"] = "ratio" if acceptance.form == "ratio" else "difference"
    return Relaxation(bound, denied.to(device), form)
