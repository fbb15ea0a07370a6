"""TensorRT-LLM: `speculative_config` of the file for `trtllm-serve --extra_llm_api_options`.

Written by its documentation (1.3.0rc27 and 1.4.0rc1) and its source (`llmapi/llm_args.py`); no test
ran it. Batch sizes of `draft_len_schedule` are the last ones of their ranges, and beyond the
largest nothing is drafted (pull request 10860, March 2026). Releases before that took them as the
first ones: this file is not for those.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from specctl.engines.engine import (
    Engine,
    Export,
    MeanRound,
    Method,
    Serving,
    fixed_shape,
    made,
    refused,
    tree_of,
)
from specctl.errors import EngineError
from specctl.policy import Chain, ChainSchedule, Policy, RootOnly, Shape, StaticTree, build_shape
from specctl.policy.family import Depth, Length, TopK
from specctl.records import PositiveInt, Record, increasing, require

FILE = "trtllm.yaml"
HEAD = "speculative_config:\n"
DECODING: dict[Method, str] = {"eagle3": "Eagle3", "draft_model": "Draft_Target"}


class TrtllmConfig(Record):
    """`speculative_config`.

    Attributes:
        max_draft_len: levels. max_total_draft_tokens: nodes of a tree, root *not* counted.
        draft_len_schedule: by the last batch size of a range, ascending, draft tokens.
    """

    decoding_type: Literal["Eagle3", "Draft_Target"]
    speculative_model: Annotated[str, Field(min_length=1)]
    max_draft_len: Depth
    use_dynamic_tree: Literal[True] | None = None
    dynamic_tree_max_topK: TopK | None = None  # noqa: N815  the engine's name
    max_total_draft_tokens: PositiveInt | None = None
    draft_len_schedule: Annotated[dict[PositiveInt, Length], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        depth, nodes, width = self.max_draft_len, self.max_total_draft_tokens, self._width
        if width is not None and nodes is not None:
            require(self.decoding_type == "Eagle3", "dynamic trees are for Eagle3 alone")
            require(
                depth <= nodes <= width * depth,
                f"max_total_draft_tokens {nodes} outside {depth} to {width * depth}",
            )
            require(self.draft_len_schedule is None, "a tree has no draft_len_schedule")
        if self.draft_len_schedule is not None:
            sizes, lengths = zip(*self.draft_len_schedule.items(), strict=True)
            require(increasing(sizes), "batch sizes must be strictly increasing")
            require(
                lengths[0] == depth == max(lengths),
                f"the first length, {lengths[0]}, must be the longest and max_draft_len {depth}",
            )
        return self

    @property
    def _width(self) -> int | None:
        given = (self.use_dynamic_tree, self.dynamic_tree_max_topK, self.max_total_draft_tokens)
        require(len({one is None for one in given}) == 1, "a tree needs all three of its settings")
        return self.dynamic_tree_max_topK


def loss(shape: Shape) -> str | None:
    if isinstance(shape, StaticTree):
        most = shape.top_k * shape.depth + 1
        if shape.top_k > 1 and shape.num_tokens > most:
            return f"nodes beyond {most}: TensorRT-LLM verifies at most top_k a level"
        return None
    if isinstance(shape, ChainSchedule):
        if max(shape.num_draft_tokens) > shape.num_draft_tokens[0]:
            return "longer drafts of larger batches: TensorRT-LLM drafts most for the smallest"
        return None
    if isinstance(shape, RootOnly | Chain):
        return None
    return f"the choice of {shape.kind} in every round: TensorRT-LLM drafts a tree of fixed size"


def nearest(shape: Shape, mean: MeanRound | None) -> Shape:
    if isinstance(shape, ChainSchedule):
        most = shape.num_draft_tokens[0]
        if most == 0:
            return RootOnly()
        lengths = tuple(min(length, most) for length in shape.num_draft_tokens)
        return ChainSchedule(from_batch=shape.from_batch, num_draft_tokens=lengths)
    fixed = fixed_shape(shape, mean)
    if isinstance(fixed, Chain):
        return fixed
    most = fixed.top_k * fixed.depth + 1
    return fixed.model_copy(update={"num_tokens": min(fixed.num_tokens, most)})


def write(policy: Policy, serving: Serving) -> Export:
    """The file and its flag."""
    shape = policy.shape
    if isinstance(shape, RootOnly):
        return Export(notes=("TensorRT-LLM decodes plainly without speculative_config.",))
    drafter = serving.drafter_for("TensorRT-LLM")
    if drafter.method not in DECODING:
        raise EngineError(
            "export to TensorRT-LLM",
            expected=f"a drafter of kind {' or '.join(DECODING)}",
            found=drafter.method,
            fix="serve another drafter, or another engine",
        )
    fields: dict[str, Any] = {
        "decoding_type": DECODING[drafter.method],
        "speculative_model": drafter.model,
        "max_draft_len": build_shape(shape).max_depth,
    }
    is_tree = isinstance(shape, StaticTree) and shape.top_k > 1
    if isinstance(shape, StaticTree) and is_tree:
        fields |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": shape.top_k}
        fields["max_total_draft_tokens"] = shape.num_tokens - 1
    if isinstance(shape, ChainSchedule):
        fields["draft_len_schedule"] = last_sizes(shape, serving.max_batch_size)
    made(TrtllmConfig, fields, "TensorRT-LLM's speculative_config")
    # YAML takes JSON's values, and unlike JSON mappings of numbers, as Python writes them.
    lines = (
        f"  {name}: {value if isinstance(value, dict) else json.dumps(value)}\n"
        for name, value in fields.items()
    )
    flags = ["--extra_llm_api_options", serving.path(FILE)]
    if serving.max_batch_size is not None:
        flags += ["--max_batch_size", str(serving.max_batch_size)]
    wide = "Dynamic trees are not for targets with sliding windows or MLA."
    content = {FILE: HEAD + "".join(lines)}
    return Export(tuple(flags), files=content, notes=(wide,) if is_tree else ())


def last_sizes(shape: ChainSchedule, max_batch_size: int | None) -> dict[int, int]:
    """Lengths by the last batch size of each range.

    Raises:
        EngineError: the last range drafts and has no end, as nobody said how large batches get.
    """
    *ranges, last = shape.num_draft_tokens
    found = dict(zip((start - 1 for start in shape.from_batch[1:]), ranges, strict=True))
    if last and max_batch_size is None:
        raise EngineError(
            "export of a schedule to TensorRT-LLM",
            expected="--max-batch-size: beyond the last size in its list it drafts nothing",
            found="none",
            fix=f"give the largest batch that is served with {last} draft tokens",
        )
    return found | ({max(max_batch_size or 1, shape.from_batch[-1]): last} if last else {})


def read(flags: Sequence[str], files: Mapping[str, str]) -> Policy:
    """The policy of a file that `write` wrote; YAML in other words is refused."""
    del flags
    if FILE not in files:
        return Policy(shape=RootOnly())
    what, text = f"TensorRT-LLM's {FILE}", files[FILE]
    entries = [re.fullmatch(r"  (\w+): (.+)", line) for line in text.splitlines()[1:]]
    if not text.startswith(HEAD) or not all(entries):
        raise refused(what, "YAML in other words")
    quoted = (re.sub(r"([{ ])(\d+):", r'\1"\2":', f'"{e[1]}": {e[2]}') for e in entries if e)
    try:
        fields = json.loads("{" + ", ".join(quoted) + "}")
    except ValueError as error:
        raise refused(what, str(error)) from error
    config = made(TrtllmConfig, fields, what)
    if config.draft_len_schedule is not None:
        starts = (1, *(end + 1 for end in config.draft_len_schedule))
        lengths = (*config.draft_len_schedule.values(), 0)
        return Policy(shape=ChainSchedule(from_batch=starts, num_draft_tokens=lengths))
    nodes = config.max_total_draft_tokens or config.max_draft_len
    width = config.dynamic_tree_max_topK or 1
    return Policy(shape=tree_of(config.max_draft_len, width, nodes + 1))


TRTLLM = Engine(
    name="trtllm",
    title="TensorRT-LLM",
    command="trtllm-serve TARGET",
    checked="1.3.0rc27 and 1.4.0rc1, by its documentation alone: no test ran it",
    files=(FILE,),
    budgets=("per_request",),
    loss=loss,
    draws=lambda shape: "that drafts are drawn: TensorRT-LLM drafts the likeliest tokens",
    nearest=nearest,
    write=write,
    read=read,
)
