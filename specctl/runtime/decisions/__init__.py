"""What computes a policy's decisions; the rule stays the same.

    auto     on CUDA the fused kernels, in rounds that stay on the device (`runtime.graphs`);
             torch elsewhere, and for policies without such kernels
    fused    those kernels, or a refusal
    torch    the rule's own tensors, in the ordinary loop
    onnx     what the policy learned (bin of Φ, closing gates, log-odds of nodes) comes from the
             ONNX twin of its artifact, run by onnxruntime on the loop's device; ordinary loop

They decide alike: docs/artifact-format.md says how exactly. onnxruntime is imported where `onnx`
is chosen and nowhere else, and never captured in a graph.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from specctl.errors import UsageError
from specctl.policy import Shape
from specctl.policy.rules import ShapeRule

Decisions = Literal["auto", "fused", "torch", "onnx"]

__all__ = ["Decisions", "check_decided", "check_decisions", "decided_by"]


def check_decisions(word: str) -> Decisions:
    """The backend of that name.

    Raises:
        UsageError: no backend of the ordinary loop.
    """
    for known in get_args(Decisions):
        if word == known:
            return known  # type: ignore[no-any-return]
    raise UsageError(
        "decisions",
        expected=", ".join(get_args(Decisions)),
        found=repr(word),
        fix="name one of them; auto has the fused kernels decide on CUDA",
    )


def check_decided(decisions: Decisions, reason: str) -> None:
    """Refuses the ordinary loop, which runs for this reason, where fused decisions are asked for.

    Raises:
        UsageError: they are.
    """
    if decisions == "fused":
        raise UsageError(
            "fused decisions",
            expected="rounds that stay on a CUDA device",
            found=reason,
            fix="use decisions auto, which says what it takes instead",
        )


def decided_by(
    decisions: Decisions, shape: Shape, rule: ShapeRule, device: torch.device
) -> ShapeRule:
    """The rule of a shape with its decisions computed by that backend; `auto` is the rule here.

    Raises:
        UsageError: `onnx` for a shape without a twin, where it is not installed, or on a device
            that onnxruntime does not compute all of the twin on.
    """
    if check_decisions(decisions) != "onnx":
        return rule
    from specctl.runtime.decisions.twins import by_twin

    return by_twin(shape, rule, device)
