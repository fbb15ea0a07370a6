"""Triton twins of `verify_tree` and `walk_tree`: checks, arguments, one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specctl.kernels.aot import Case
from specctl.kernels.checks import require_at_most
from specctl.kernels.verify_tree.acceptance import Acceptance, Judged, NearLaw, RunnerUp, Walk
from specctl.kernels.verify_tree.kernel import (
    JUDGED,
    NEAR_LAW,
    RUNNER_UP,
    RUNTIME_SIZES,
    STRICT,
    walk_kernel,
)

MAX_NODES, MAX_DEPTH = 1024, 64
TUNED: dict[int, int] = {64: 1, 256: 2, 1024: 4}
"""Warps by slots. One warp reduces in registers; more go through shared memory at every step."""


def verify_tree(parent: Tensor, admitted: Tensor, max_depth: int) -> Tensor:
    """See `specctl.kernels.verify_tree.verify_tree`."""
    path = torch.empty((len(parent), max_depth + 1), dtype=torch.int64, device=parent.device)
    outputs = (path, None, None, None, None)
    _launch("verify_tree", outputs, (parent, None, None), max_depth, Judged(admitted))
    return path


def walk_tree(
    parent: Tensor,
    token_ids: Tensor,
    target_ids: Tensor,
    max_depth: int,
    acceptance: Acceptance | None,
) -> Walk:
    """See `specctl.kernels.verify_tree.walk_tree`."""
    rows, device = len(parent), parent.device

    def column(*width: int) -> Tensor:
        return torch.empty((rows, *width), dtype=torch.int64, device=device)

    found = Walk(column(max_depth + 1), column(max_depth + 1), column(), column(), column())
    _launch("walk_tree", found, (parent, token_ids, target_ids), max_depth, acceptance)
    return found


def _launch(
    op: str,
    outputs: tuple[Tensor | None, ...],
    tree: tuple[Tensor, Tensor | None, Tensor | None],
    max_depth: int,
    acceptance: Acceptance | None,
) -> None:
    num_rows, num_slots = tree[0].shape
    require_at_most(op, "slots of a tree", num_slots, MAX_NODES)
    require_at_most(op, "levels", max_depth, MAX_DEPTH)
    if not num_rows:
        return
    block = next(size for size in TUNED if size >= num_slots)
    walk_kernel[(num_rows,)](
        *outputs,
        *(None if part is None else part.contiguous() for part in tree),
        **_arguments(acceptance),
        num_slots=num_slots,
        max_depth=max_depth,
        BLOCK_N=block,
        BLOCK_D=_block_of(max_depth),
        num_warps=TUNED[block],
    )


def _block_of(max_depth: int) -> int:
    return 16 if max_depth < 16 else 128


NOTHING: dict[str, Any] = {
    "admitted": None,
    "top_ids": None,
    "ids_stride": 0,
    "top_logits": None,
    "greedy": None,
    "bound": None,
    "bound_stride": 0,
    "distance": None,
    "threshold": None,
    "threshold_stride": 0,
    "denied": None,
    "vocab_size": 0,
    "law": None,
    "law_row": 0,
    "law_node": 0,
    "law_token": 0,
    "LAW": STRICT,
    "IS_RATIO": False,
}


def _arguments(acceptance: Acceptance | None) -> dict[str, Any]:
    """What the kernel is told of an acceptance."""
    if acceptance is None:
        return NOTHING
    if isinstance(acceptance, Judged):
        return NOTHING | {"admitted": acceptance.admitted.contiguous(), "LAW": JUDGED}
    if isinstance(acceptance, NearLaw):
        return NOTHING | _near_law(acceptance) | _denied(acceptance.denied)
    return NOTHING | _runner_up(acceptance) | _denied(acceptance.denied)


def _near_law(given: NearLaw) -> dict[str, Any]:
    return {
        "distance": given.distance.contiguous(),
        "threshold": given.threshold,
        "threshold_stride": given.threshold.stride(0),
        "LAW": NEAR_LAW,
    }


def _runner_up(given: RunnerUp) -> dict[str, Any]:
    strides = (0, 0, 0) if given.law is None else given.law.stride()
    ids = _evenly(given.top_ids)
    return {
        "top_ids": ids,
        "ids_stride": ids.stride(1),
        "top_logits": given.top_logits.contiguous(),
        "greedy": given.greedy.contiguous(),
        "bound": given.bound,
        "bound_stride": given.bound.stride(0),
        "law": given.law,
        **dict(zip(("law_row", "law_node", "law_token"), strides, strict=True)),
        "LAW": RUNNER_UP,
        "IS_RATIO": given.form == "ratio",
    }


def _evenly(ids: Tensor) -> Tensor:
    """Pairs at one distance from node to node: the first two of top-k need no copy."""
    row, node, own = ids.stride()
    return ids if own == 1 and row == ids.shape[1] * node else ids.contiguous()


def _denied(denied: Tensor | None) -> dict[str, Any]:
    if denied is None or not len(denied):
        return {}
    return {"denied": denied.contiguous(), "vocab_size": len(denied)}


def _case(name: str, block: int, levels: int, max_registers: int, **given: str) -> Case:
    """One law at one size; `given` types the arguments that it reads, the others are absent."""
    ids = ("path", "tokens", "bonus_ids", "num_accepted", "first_rejected")
    tree = ("parent", "token_ids", "target_ids")
    types = dict.fromkeys((*ids, *tree), "*i64") | given
    sizes = dict.fromkeys(RUNTIME_SIZES, "i32") | {"law_row": "i64"}
    absent = {
        argument: value
        for argument, value in NOTHING.items()
        if argument not in given and argument not in sizes
    }
    constexprs = absent | {"LAW": LAWS[name], "IS_RATIO": True, "BLOCK_N": block, "BLOCK_D": levels}
    types |= sizes | dict.fromkeys(constexprs, "constexpr")
    return Case(
        name=f"{name}, {block} slots",
        kernel=walk_kernel,
        signature={argument: types[argument] for argument in walk_kernel.arg_names},
        constexprs=constexprs,
        divisible=(*ids, *tree),
        num_warps=TUNED[block],
        max_registers=max_registers,
    )


LAWS = {"strict": STRICT, "judged": JUDGED, "runner up": RUNNER_UP, "near law": NEAR_LAW}
_TOP = {"top_ids": "*i64", "top_logits": "*fp32", "greedy": "*i1", "bound": "*fp32"}
_CUT = {"denied": "*i1", "law": "*bf16"}
_NEAR = {"distance": "*fp32", "threshold": "*fp64", "denied": "*i1"}
AOT_CASES: tuple[Case, ...] = (
    _case("strict", 64, 16, 40),
    _case("judged", 64, 16, 40, admitted="*i1"),
    _case("runner up", 64, 16, 56, **_TOP, **_CUT),
    _case("near law", 64, 16, 48, **_NEAR),
    _case("runner up", 256, 16, 88, **_TOP, **_CUT),
    _case("runner up", 1024, 128, 160, **_TOP, **_CUT),
    _case("near law", 1024, 128, 104, **_NEAR),
)
