"""transformers: assisted generation, set by the *assistant's* generation configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from specctl.engines.engine import (
    Engine,
    Export,
    MeanRound,
    Serving,
    as_json,
    fixed_shape,
    is_chain,
    made,
    parsed,
)
from specctl.policy import (
    Chain,
    ChainSchedule,
    Policy,
    Ratio,
    RootOnly,
    Shape,
    SignalStop,
    as_chain,
    at_batch_size,
    build_shape,
)
from specctl.policy.family import Depth
from specctl.records import Probability, Record

FILE = "generation_config.json"


class AssistantConfig(Record):
    """The settings of assisted generation in the assistant's configuration."""

    num_assistant_tokens: Depth
    num_assistant_tokens_schedule: Literal["constant"] = "constant"
    # Drafting ends after a token below this probability; 0 switches it off. 0.4 is the library's
    # default.
    assistant_confidence_threshold: Annotated[Probability, Field(lt=1)] = 0.4
    transformers_version: str | None = None


def loss(shape: Shape) -> str | None:
    if isinstance(shape, RootOnly) or is_chain(shape):
        return None
    if isinstance(shape, SignalStop) and shape.top_k == 1:
        if shape.signal != "confidence":
            return f"its stop on {shape.signal}: transformers stops on a token's own probability"
        if not shape.keep_last:
            return "chains without their last uncertain token: transformers submits it"
        if not 0 < shape.threshold < 1:
            return f"its threshold {shape.threshold:g}, which always or never stops"
        return None
    if isinstance(shape, ChainSchedule):
        return "lengths of larger batches: transformers decodes one request at a time"
    return (
        f"the choice of {shape.kind} in every round: transformers drafts chains of one length, or "
        "up to its own stop"
    )


def nearest(shape: Shape, mean: MeanRound | None) -> Shape | None:
    if isinstance(shape, ChainSchedule):
        return at_batch_size(shape, 1)
    chain = as_chain(Policy(shape=shape)).shape
    if isinstance(chain, SignalStop) and chain.signal == "confidence" and 0 < chain.threshold < 1:
        return chain.model_copy(update={"keep_last": True})
    return fixed_shape(chain, mean)


def write(policy: Policy, serving: Serving) -> Export:
    """The file, and lines of Python with the same effect."""
    shape = policy.shape
    if isinstance(shape, RootOnly):
        plainly = "transformers decodes plainly without an assistant_model."
        return Export(code=("target.generate(**inputs)",), notes=(plainly,))
    if serving.drafter is not None:
        serving.drafter_for("transformers", ["draft_model"])
    threshold = shape.threshold if isinstance(shape, SignalStop) else 0.0
    fields = {
        "num_assistant_tokens": build_shape(shape).max_depth,
        "assistant_confidence_threshold": threshold,
    }
    config = made(AssistantConfig, fields, "transformers' generation configuration")
    values = config.model_dump(exclude_none=True).items()
    code = [f"assistant.generation_config.{name} = {value!r}" for name, value in values]
    samples = isinstance(policy.acceptance, Ratio)
    more = ", do_sample=True" if samples else ""
    code.append(f"target.generate(**inputs, assistant_model=assistant{more})")
    notes = ["transformers decodes one request at a time with an assistant."]
    if not samples:
        notes.append("With do_sample=True it samples drafts and verifies them by p/q, as +ratio.")
    if threshold:
        notes.append(
            "If scikit-learn is installed, transformers adapts the threshold to the acceptances "
            "that it sees: serve without it to keep the threshold."
        )
    content = {FILE: as_json(config, indent=2) + "\n"}
    return Export(code=tuple(code), files=content, notes=tuple(notes))


def read(files: Mapping[str, str]) -> Policy:
    """The policy of an assistant's configuration."""
    config = parsed(AssistantConfig, files[FILE], f"transformers' {FILE}")
    window, threshold = config.num_assistant_tokens, config.assistant_confidence_threshold
    if not threshold:
        return Policy(shape=Chain(num_draft_tokens=window))
    shape = SignalStop(signal="confidence", threshold=threshold, window=window)
    return Policy(shape=shape)


TRANSFORMERS = Engine(
    name="transformers",
    title="transformers",
    command="",
    checked="5.24: it drafts and accepts as we do (tests/engines/test_assisted.py)",
    files=(FILE,),
    budgets=("per_request",),
    loss=loss,
    draws=lambda shape: None,  # with do_sample=True it samples its drafts
    nearest=nearest,
    write=write,
    read=read,
    max_batch_size=1,
)
