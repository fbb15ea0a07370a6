"""SGLang: flags of a static tree, and lengths by batch size in its adaptive file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from specctl.engines.engine import (
    Engine,
    EngineDrafter,
    Export,
    Serving,
    fixed_shape,
    most_nodes,
    refused,
)
from specctl.errors import EngineError
from specctl.policy import Chain, ChainSchedule, Policy, RootOnly, Shape, StaticTree, build_shape
from specctl.policy.family import Length
from specctl.records import PositiveInt, Record, describe_violation
from specctl.runtime.checkpoints import Kind

ADAPTIVE_FILE = "sglang-adaptive.json"
ALGORITHMS: dict[Kind, str] = {
    "eagle3": "EAGLE3",
    "eagle": "EAGLE",
    "mtp": "EAGLE",  # Gemma 4's assistants become FROZEN_KV_MTP by themselves
    "dflash": "DFLASH",
    "dspark": "DSPARK",
    "draft_model": "STANDALONE",
}
"""`--speculative-algorithm` by the kind of the drafter (`srt/speculative/spec_info.py`)."""
MODELS: dict[Kind, str] = {
    "eagle3": "LlamaForCausalLMEagle3|Eagle3DeepseekV2ForCausalLM",
    "eagle": "(Llama|Qwen2|Mistral|MistralLarge3)ForCausalLMEagle",
    "mtp": r"Gemma4(Unified)?AssistantForCausalLM|(IQuestQ1|MiMo|MiMoV2|Step3p5)MTP"
    "|(BailingMoe|Deepseek(V3|V4)|GigaChat35|Glm4Moe|Glm4MoeLite|GlmMoeDsa|HYV3|HYV4|LongcatFlash)"
    "ForCausalLM(NextN)?|Dots3NoteForCausalLM(NextN)?|(Bailing(MoeV2|MoeV2_5|MoeV3)|DeepseekV32)"
    "ForCausalLM|(Glm5Next|GlmOcr)ForConditionalGeneration(NextN)?|(Ernie4_5_Moe|ExaoneMoE|"
    "NemotronH|Qwen3Moe|Qwen3Next|Qwen3_5)ForCausalLM(MTP)?|Qwen4ExpForCausalLMMTP|(ExaoneMoe|MiMo|"
    "MiMoV2|MiMoV2Flash|NemotronHPuzzle|Qwen3_5Moe|Step3p5)ForCausalLM|NemotronH_Omni_Reasoning_V3|"
    "(InternS2Mobius|InternS2Preview|Qwen3_5|Qwen3_5Moe|Qwen4Exp|Step3p7)ForConditionalGeneration|"
    "InklingForConditionalGeneration(MTP)?",
    "dflash": "DFlash(2|2Beam)?DraftModel|MiniMaxDFlash2DraftModel|DFlashLagunaForCausalLM|"
    "LiLiCorrDraftModel|MuseGlimmerAssistantModel",
    "dspark": "(|Lfm2)DSparkDraftModel|DSparkMiniMaxDraftModel|(Qwen3|Ling)DSparkModel|"
    "DeepseekV4ForCausalLM(DSpark)?",
}
"""Architectures of its drafters in 0.5.23: `EntryClass` of `srt/models`, and targets that
`srt/configs/model_config.py` renames. Another one it takes for a model of transformers, which does
not draft; a head named after its target's model would load without its weights."""
MOST_NODES = 128
"""Largest tree to export, root counted: the largest in published server commands. SGLang verifies
all nodes in every step and keeps their logits; its kernel that builds trees fails above 1,024."""


class Slot(Record):
    """The lengths of batch sizes from one key of the adaptive file on."""

    candidate_steps: Annotated[tuple[Length, ...], Field(min_length=1)]


SLOTS = TypeAdapter(Annotated[dict[PositiveInt, Slot], Field(min_length=1)])


def loss(shape: Shape) -> str | None:
    if isinstance(shape, StaticTree) and _num_nodes(shape) > MOST_NODES:
        return f"nodes above {MOST_NODES}: SGLang verifies all nodes in every step"
    if isinstance(shape, RootOnly | Chain | StaticTree | ChainSchedule):
        return None
    return f"the choice of {shape.kind} in every round: SGLang drafts a tree of fixed size"


def _num_nodes(shape: Shape) -> int:
    """Nodes of a static shape's round, root counted: SGLang fails in the first step of serving if
    fewer are drafted."""
    rule = build_shape(shape)
    return min(rule.max_tokens, most_nodes(rule.max_depth, rule.top_k))


def slots_of(from_batch: Sequence[int], lengths: Sequence[int]) -> dict[str, Any]:
    """The content of `ADAPTIVE_FILE` for one length a stretch of loads."""
    pairs = zip(from_batch, lengths, strict=True)
    return {str(start): {"candidate_steps": [length]} for start, length in pairs}


def write(policy: Policy, serving: Serving) -> Export:
    """Flags of `sglang.launch_server`; lengths by batch size are slots of one candidate each."""
    shape = policy.shape
    if isinstance(shape, RootOnly):
        return Export(notes=("SGLang decodes plainly without --speculative-algorithm.",))
    drafter, rule = serving.drafter_for("SGLang", ALGORITHMS, MODELS), build_shape(shape)
    flags = ["--speculative-algorithm", ALGORITHMS[drafter.method]]
    flags += ["--speculative-draft-model-path", drafter.model]
    is_block = drafter.method in ("dflash", "dspark")
    notes = _block_notes(drafter, shape) if is_block else ()
    flags += ["--speculative-num-steps", "1" if is_block else str(rule.max_depth)]
    flags += ["--speculative-eagle-topk", str(rule.top_k)]
    flags += ["--speculative-num-draft-tokens", str(_num_nodes(shape))]
    if serving.max_batch_size is not None:
        flags += ["--max-running-requests", str(serving.max_batch_size)]
    if not isinstance(shape, ChainSchedule):
        wide = "Trees with --page-size above 1 need the flashinfer, fa3 or triton backend."
        return Export(tuple(flags), notes=(wide,) if rule.top_k > 1 else notes)
    if is_block or drafter.method == "draft_model":
        raise EngineError(
            "SGLang changes lengths by batch size only with an EAGLE drafter; with this drafter it "
            "would warn and keep one length",
            hint="export a chain of one length, or serve an EAGLE drafter",
        )
    text = json.dumps(slots_of(shape.from_batch, shape.num_draft_tokens), indent=2) + "\n"
    flags += ["--speculative-adaptive"]
    flags += ["--speculative-adaptive-config", serving.path(ADAPTIVE_FILE)]
    conditions = (
        "A batch counts as the captured size that it is padded to: capture graphs at the last size "
        "of every range (--cuda-graph-bs-decode).",
        "Attention data parallelism, multi-layer EAGLE, two-batch overlap and PD multiplexing "
        "switch this off.",
    )
    return Export(tuple(flags), files={ADAPTIVE_FILE: text}, notes=conditions)


def _block_notes(drafter: EngineDrafter, shape: Shape) -> tuple[str, ...]:
    """Conditions of a block drafter, whose pass drafts all tokens.

    Raises:
        EngineError: a tree, or a length that SGLang refuses.
    """
    rule, size, kind = build_shape(shape), drafter.block_size, ALGORITHMS[drafter.method]
    if rule.top_k > 1:
        raise EngineError(
            f"SGLang drafts chains with {kind}, no trees",
            hint=f"export chain:{size or rule.max_depth}",
        )
    if size is None or size == rule.max_depth:
        return ()
    if drafter.method == "dspark":
        raise EngineError(
            f"SGLang drafts the whole block of a DSpark drafter, {size} tokens, and not "
            f"{rule.max_depth}",
            hint=f"export chain:{size}",
        )
    return (f"The drafter was trained to draft {size} tokens a round, and not {rule.max_depth}.",)


def read(files: Mapping[str, str]) -> Policy:
    """The policy; `EngineError` for a slot of several candidates, which SGLang adapts itself."""
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


SGLANG = Engine(
    name="sglang",
    title="SGLang",
    command="python -m sglang.launch_server --model-path TARGET",
    checked="0.5.23: its own code takes flags and file (tests/engines/test_sglang_files.py)",
    files=(ADAPTIVE_FILE,),
    budgets=("per_request",),
    loss=loss,
    draws=lambda shape: "sampled drafts: SGLang drafts the likeliest tokens",
    nearest=partial(fixed_shape, most_tokens=MOST_NODES),
    write=write,
    read=read,
)
