"""SGLang: flags of a static tree, and lengths by batch size in its adaptive file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from specctl.engines.engine import (
    Engine,
    Export,
    MeanRound,
    Method,
    Serving,
    fixed_shape,
    flag_value,
    made,
    most_nodes,
    refused,
    tree_of,
)
from specctl.errors import EngineError
from specctl.policy import Chain, ChainSchedule, Policy, RootOnly, Shape, StaticTree, build_shape
from specctl.policy.family import Depth, Length, NumTokens, TopK
from specctl.records import PositiveInt, Record, describe_violation, require

ADAPTIVE_FILE = "sglang-adaptive.json"
ALGORITHMS: dict[Method, str] = {"eagle3": "EAGLE3", "eagle": "EAGLE", "draft_model": "STANDALONE"}
MOST_NODES = 128
"""Largest tree to export, root counted: the largest in published server commands. SGLang verifies
all nodes in every step and keeps their logits; its kernel that builds trees fails above 1,024."""


class SglangFlags(Record):
    """`--speculative-num-steps`, `-eagle-topk` and `-num-draft-tokens`; the last counts the root.

    SGLang accepts any three numbers, but more nodes than are drafted fail in the first step of
    serving, and with `eagle_topk` 1 the node count becomes the steps + 1.
    """

    num_steps: Depth
    eagle_topk: TopK
    num_draft_tokens: Annotated[NumTokens, Field(le=MOST_NODES)]

    @model_validator(mode="after")
    def _drafted(self) -> Self:
        steps, found = self.num_steps, self.num_draft_tokens
        most = most_nodes(steps, self.eagle_topk)
        require(steps < found <= most, f"num_draft_tokens {found} outside {steps + 1} to {most}")
        return self


class Slot(Record):
    """The lengths of batch sizes from one key of the adaptive file on."""

    candidate_steps: Annotated[tuple[Length, ...], Field(min_length=1)]


SLOTS = TypeAdapter(Annotated[dict[PositiveInt, Slot], Field(min_length=1)])


def flag_of(field: str) -> str:
    """The flag of a field of `SglangFlags`."""
    return "--speculative-" + field.replace("_", "-")


def loss(shape: Shape) -> str | None:
    if isinstance(shape, StaticTree) and _num_nodes(shape) > MOST_NODES:
        return f"nodes above {MOST_NODES}: SGLang verifies all nodes in every step"
    if isinstance(shape, RootOnly | Chain | StaticTree | ChainSchedule):
        return None
    return f"the choice of {shape.kind} in every round: SGLang drafts a tree of fixed size"


def nearest(shape: Shape, mean: MeanRound | None) -> Shape | None:
    fixed = fixed_shape(shape, mean)
    if isinstance(fixed, StaticTree):
        return fixed.model_copy(update={"num_tokens": min(fixed.num_tokens, MOST_NODES)})
    return fixed


def _num_nodes(shape: Shape) -> int:
    """Nodes of a static shape's round, root counted."""
    rule = build_shape(shape)
    return min(rule.max_tokens, most_nodes(rule.max_depth, rule.top_k))


def write(policy: Policy, serving: Serving) -> Export:
    """Flags of `sglang.launch_server`; lengths by batch size are slots of one candidate each."""
    shape = policy.shape
    if isinstance(shape, RootOnly):
        return Export(notes=("SGLang decodes plainly without --speculative-algorithm.",))
    drafter, rule = serving.drafter_for("SGLang"), build_shape(shape)
    size = {
        "num_steps": rule.max_depth,
        "eagle_topk": rule.top_k,
        "num_draft_tokens": _num_nodes(shape),
    }
    made(SglangFlags, size, "SGLang's flags")
    flags = ["--speculative-algorithm", ALGORITHMS[drafter.method]]
    flags += ["--speculative-draft-model-path", drafter.model]
    for name, value in size.items():
        flags += [flag_of(name), str(value)]
    if serving.max_batch_size is not None:
        flags += ["--max-running-requests", str(serving.max_batch_size)]
    if not isinstance(shape, ChainSchedule):
        wide = "Trees with --page-size above 1 need the flashinfer, fa3 or triton backend."
        return Export(tuple(flags), notes=(wide,) if rule.top_k > 1 else ())
    if drafter.method == "draft_model":
        raise EngineError(
            "SGLang changes lengths by batch size only with an EAGLE drafter; with this draft "
            "model it would warn and keep one length",
            hint="export a chain of one length, or serve an EAGLE drafter",
        )
    lengths = zip(shape.from_batch, shape.num_draft_tokens, strict=True)
    content = {str(start): {"candidate_steps": [length]} for start, length in lengths}
    text = json.dumps(content, indent=2) + "\n"
    flags += ["--speculative-adaptive"]
    flags += ["--speculative-adaptive-config", serving.path(ADAPTIVE_FILE)]
    notes = (
        "A batch counts as the captured size that it is padded to: capture graphs at the last size "
        "of every range (--cuda-graph-bs-decode).",
        "Attention data parallelism, two-batch overlap and PD multiplexing switch this off.",
    )
    return Export(tuple(flags), files={ADAPTIVE_FILE: text}, notes=notes)


def read(flags: Sequence[str], files: Mapping[str, str]) -> Policy:
    """The policy; `EngineError` for a slot of several candidates, which SGLang adapts itself."""
    if ADAPTIVE_FILE in files:
        try:
            slots = dict(sorted(SLOTS.validate_json(files[ADAPTIVE_FILE]).items()))
        except ValidationError as error:
            raise refused("SGLang's adaptive configuration", describe_violation(error)) from error
        moving = [size for size, slot in slots.items() if len(slot.candidate_steps) > 1]
        if moving:
            raise refused(
                f"SGLang's adaptive configuration, batch size {moving[0]}",
                "it has several candidate_steps, among which SGLang adapts itself",
            )
        lengths = [slot.candidate_steps[0] for slot in slots.values()]
        if not any(lengths):
            return Policy(shape=RootOnly())
        starts = (1, *list(slots)[1:])  # batches below the first key take its settings
        return Policy(shape=ChainSchedule(from_batch=starts, num_draft_tokens=tuple(lengths)))
    if "--speculative-algorithm" not in flags:
        return Policy(shape=RootOnly())
    words = {name: flag_value(flags, flag_of(name)) or "" for name in SglangFlags.model_fields}
    numbers = {name: int(word) for name, word in words.items() if word.isdecimal()}
    size = made(SglangFlags, numbers, "SGLang's flags")
    return Policy(shape=tree_of(size.num_steps, size.eagle_topk, size.num_draft_tokens))


SGLANG = Engine(
    name="sglang",
    title="SGLang",
    command="python -m sglang.launch_server --model-path TARGET",
    checked="0.5.23: its own code takes flags and file (tests/engines/test_sglang_files.py)",
    files=(ADAPTIVE_FILE,),
    budgets=("per_request",),
    loss=loss,
    draws=lambda shape: "sampled drafts: SGLang drafts the likeliest tokens",
    nearest=nearest,
    write=write,
    read=read,
)
