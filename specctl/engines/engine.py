"""Serving engines: the policies that each one runs, and its settings for a policy.

    vLLM           chains, also by batch size; with our plugin, every rule that grows a chain
    SGLang         static trees and chains, also by batch size
    transformers   chains, and the confidence stop
    llama.cpp      chains, and its own confidence stop

The settings of an engine are a strict record, for writing and for reading back. It rejects values
that the engine would refuse, cap or ignore, before any file is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from specctl.engines.settings import TraceSettings
from specctl.errors import EngineError, UsageError
from specctl.formatting import listed
from specctl.policy import (
    Chain,
    ChainSchedule,
    PerRequest,
    Policy,
    Ratio,
    RootOnly,
    Shape,
    StaticTree,
    build_shape,
)
from specctl.policy.family import MAX_TOKENS
from specctl.policy.rules import is_fixed
from specctl.records import Record, describe_violation
from specctl.replay.config import Engine as Batching
from specctl.runtime.checkpoints import WORDS, Kind
from specctl.runtime.words import words_of

GgufWeights = Literal["float32", "float16", "q8_0"]
"""Number format of the matrices of GGUF files; norms are float32."""


class EngineDrafter(Record):
    """The drafter that an engine loads."""

    model: Annotated[str, Field(min_length=1)]  # a folder or hub id
    method: Kind
    block_size: int | None = None  # tokens that a block drafter drafts a round, if known
    architecture: str | None = None  # by its config.json; None if that was not read


def label_of(policy: Policy) -> str:
    """A policy in words, or its name if it has none."""
    return words_of(policy) or policy.name


@dataclass(frozen=True)
class EngineSettings:
    """The settings of an engine for a policy, for a page."""

    title: str
    lines: Sequence[str] = ()  # of a command or of Python; none if the engine lacks the policy
    notes: Sequence[str] = ()  # sentences


@dataclass(frozen=True)
class Serving:
    """The serving that a policy is exported for.

    Attributes:
        drafter: None if it is not known.
        max_batch_size: most requests that the engine runs together, if known.
        max_draft_tokens: most tokens that the engine may draft, if a policy that is followed may
            become longer than this one.
        reference: the name by which the plugin loads a policy; may raise.
        trace: the log that the plugin is to write.
        folder: absolute folder of the files, if they are written.
        target: the target's folder or file, if known. weights: of GGUF files.
        synthetic_rates: accepted rates by position that the engine makes up, if any.
    """

    drafter: EngineDrafter | None = None
    max_batch_size: int | None = None
    max_draft_tokens: int | None = None
    reference: Callable[[Policy], str] = label_of
    trace: TraceSettings | None = None
    folder: Path | None = None
    target: str | None = None
    weights: GgufWeights = "float16"
    synthetic_rates: tuple[float, ...] | None = None

    def path(self, name: str) -> str:
        """The path of a file in flags."""
        return name if self.folder is None else str(self.folder / name)

    def drafter_for(
        self, engine: str, kinds: Collection[Kind], models: Mapping[Kind, str] | None = None
    ) -> EngineDrafter:
        """The drafter; `UsageError` if it is not known, `EngineError` for a kind that the engine
        does not run.

        Args:
            models: regular expressions of the architectures that the engine has a model for, by
                kind; a kind that is not there is not checked.
        """
        if self.drafter is None:
            raise UsageError(
                f"export to {engine} needs the drafter, and the policy names no pair",
                hint="give --drafter, a folder or hub id, and --method if it is not a folder; or "
                "leave --target out too, for the embedded pair",
            )
        if self.drafter.method not in kinds:
            raise EngineError(
                f"the drafter {self.drafter.model} is of kind {self.drafter.method}, and {engine} "
                f"drafts with {listed(kinds)} here",
                hint="export for another pair, or to another engine",
            )
        mark, named = (models or {}).get(self.drafter.method), self.drafter.architecture
        if mark and named is not None and not re.fullmatch(mark, named):
            raise EngineError(
                f"the drafter {self.drafter.model} is {WORDS[self.drafter.method]} of architecture "
                f"{named}, and {engine} has no model of that name that drafts",
                hint=_other_name(mark, named),
            )
        return self.drafter


def _other_name(mark: str, named: str) -> str:
    """The next step for an architecture that an engine lacks: SGLang names heads otherwise."""
    for word in ("Eagle3", "Eagle"):
        if re.fullmatch(mark, other := named.removeprefix(word) + word):
            return f'write "architectures": ["{other}"] into a copy of its config.json'
    return "export for another pair, or to another engine"


@dataclass(frozen=True)
class Export:
    """The settings of an engine for a policy."""

    flags: tuple[str, ...] = ()  # words of the server's command line
    environment: Mapping[str, str] = field(default_factory=dict)
    code: tuple[str, ...] = ()  # lines of Python, for an engine that is a library
    files: Mapping[str, str] = field(default_factory=dict)  # content by name
    notes: tuple[str, ...] = ()  # sentences on conditions and limits
    # writers of further files, to a path, by name
    made: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)
    target: str | None = None  # the served model, if it is another than the target's name


@dataclass(frozen=True)
class MeanRound:
    """The mean round of a policy on a log: drafted levels, and verified nodes, root counted."""

    levels: float
    tokens: float


@dataclass(frozen=True)
class Engine:
    """A serving engine.

    Attributes:
        command: the server's command, in front of the flags.
        checked: the version that it was written for, and its test.
        files: names of the files that `write` may write.
        budgets: kinds that the engine runs.
        loss: the part of a shape that the engine lacks, as a clause; None if it lacks nothing.
        draws: `loss` for drafts that are sampled and verified by p/q.
        nearest: the nearest shape that the engine runs. Its size is that of the mean round; None
            if the mean round is needed and not known.
        write: the settings for a policy that the engine runs.
        read: the policy of the files that `write` wrote.
        batching: how replay simulates its batches.
        max_batch_size: most requests that it decodes together with drafts; None: no bound.
        has_plugin: specctl's plugin runs inside it, and can log.
        has_synthetic: it can accept draft tokens at given rates, to time a policy without its
            drafter.
    """

    name: str
    title: str
    command: str
    checked: str
    files: tuple[str, ...]
    budgets: tuple[str, ...]
    loss: Callable[[Shape], str | None]
    draws: Callable[[Shape], str | None]
    nearest: Callable[[Shape, MeanRound | None], Shape | None]
    write: Callable[[Policy, Serving], Export]
    read: Callable[[Mapping[str, str]], Policy]
    batching: Batching = "specctl"
    max_batch_size: int | None = None
    has_plugin: bool = False
    has_synthetic: bool = False

    def runs(self, policy: Policy) -> bool:
        """Whether the engine runs a policy as it is."""
        return not self.losses(policy)

    def losses(self, policy: Policy) -> tuple[str, ...]:
        """The parts of a policy that the engine lacks, as clauses."""
        found = []
        if not policy.lossless:
            kind = policy.acceptance.kind
            found.append(f"its acceptance {kind}: {self.title} admits draft tokens by its own rule")
        elif isinstance(policy.acceptance, Ratio) and (lost := self.draws(policy.shape)):
            found.append(lost)
        if policy.budget.kind not in self.budgets:
            kind = policy.budget.kind
            found.append(f"its budget {kind}: {self.title} verifies all that a request submits")
        elif isinstance(policy.shape, ChainSchedule) and not isinstance(policy.budget, PerRequest):
            found.append("its budget: the engine looks lengths up before a budget could share them")
        if lost := self.loss(policy.shape):
            found.append(lost)
        return tuple(found)

    def nearest_to(self, policy: Policy, mean: MeanRound | None = None) -> Policy | None:
        """The nearest policy that the engine runs, which may be the policy itself.

        None if the size of the mean round is needed and not given.
        """
        shape: Shape | None = policy.shape
        if self.loss(policy.shape) is not None:
            shape = self.nearest(policy.shape, mean)
        if shape is None:
            return None
        shared = not isinstance(shape, RootOnly | ChainSchedule)
        kept = shared and policy.budget.kind in self.budgets
        found = Policy(shape=shape, budget=policy.budget if kept else PerRequest())
        drawn = isinstance(policy.acceptance, Ratio) and not isinstance(shape, RootOnly)
        if drawn and self.draws(shape) is None:
            return found.model_copy(update={"acceptance": policy.acceptance})
        return found


def fixed_shape(
    shape: Shape, mean: MeanRound | None, most_tokens: int = MAX_TOKENS
) -> Chain | StaticTree | None:
    """The static shape with the width of a rule and the size of its mean round.

    The largest round is no measure: it may have 700 nodes where the mean has 5. Without a mean,
    only shapes whose rounds have one size give a result.
    """
    rule = build_shape(shape)
    if mean is None and not is_fixed(rule):
        return None
    levels = rule.max_depth if mean is None else round(mean.levels)
    depth = min(max(levels, 1), rule.max_depth)
    if rule.top_k == 1:
        return Chain(num_draft_tokens=depth)
    tokens = rule.max_tokens if mean is None else round(mean.tokens)
    most = min(most_nodes(depth, rule.top_k), most_tokens)
    size = min(max(tokens, depth + 1), most)
    return StaticTree(depth=depth, top_k=rule.top_k, num_tokens=size)


def is_chain(shape: Shape) -> bool:
    """Whether it drafts chains of one length: a tree of width 1 does, too."""
    return isinstance(shape, Chain) or (isinstance(shape, StaticTree) and shape.top_k == 1)


def most_nodes(depth: int, top_k: int) -> int:
    """Nodes that EAGLE-2 drafts, root counted: `top_k` at level 1, its square at each further."""
    return 1 + top_k + (depth - 1) * top_k**2


Parsed = TypeVar("Parsed", bound=Record)


def parsed(kind: type[Parsed], text: str, what: str) -> Parsed:
    """A record from JSON of an engine; `EngineError` with the first violation and its field."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise refused(what, describe_violation(error)) from error


def refused(what: str, problem: str) -> EngineError:
    """The error for settings that the engine would reject, or that specctl does not write."""
    return EngineError(f"{what}: {problem}", hint="correct that, or export the policy again")


def made(kind: type[Parsed], fields: Mapping[str, Any], what: str) -> Parsed:
    """A record of plain values; `EngineError` if the engine would reject them."""
    return parsed(kind, json.dumps(fields), what)


def as_json(record: Record, indent: int | None = None) -> str:
    """The fields of a record that are set, as JSON."""
    return json.dumps(record.model_dump(mode="json", exclude_none=True), indent=indent)
