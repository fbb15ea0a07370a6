"""A serving engine as specctl knows it: the policies that it runs, and how it is told one.

    vLLM           chains, by batch size too; with our plugin every rule that grows a chain
    SGLang         static trees and chains, by batch size too
    transformers   chains, and the confidence stop

What each takes is a strict record. Settings that an engine would refuse, cap or ignore without a
word are refused when the record is made, so before anything is written; what is read back passes
the same record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from specctl.engines.settings import TraceSettings
from specctl.errors import EngineError, UsageError
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
from specctl.runtime.words import words_of

Method = Literal["eagle3", "eagle", "draft_model"]
"""The kind of a drafter, in vLLM's words."""


class EngineDrafter(Record):
    """The drafter that an engine loads.

    Attributes:
        model: a folder or hub id, as the engine takes it.
    """

    model: Annotated[str, Field(min_length=1)]
    method: Method


def label_of(policy: Policy) -> str:
    """A policy in words, or its kinds where no words say it."""
    return words_of(policy) or policy.name


@dataclass(frozen=True)
class EngineSettings:
    """What to set in a serving engine; no lines where it does not run the policy.

    Attributes:
        lines: of a command or of Python. notes: sentences, for one why nothing can be set.
    """

    title: str
    lines: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Serving:
    """The serving that a policy is exported for.

    Attributes:
        drafter: None where it is not known.
        max_batch_size: requests that the engine runs together at most; None where not known.
        max_draft_tokens: tokens that the engine may draft, where a policy that is followed later
            may want more than this one; None: as many as this one.
        reference: from a policy to what the plugin loads it by; may refuse.
        trace: what the plugin is to log.
        folder: absolute, where the files will lie; None where none are written.
    """

    drafter: EngineDrafter | None = None
    max_batch_size: int | None = None
    max_draft_tokens: int | None = None
    reference: Callable[[Policy], str] = label_of
    trace: TraceSettings | None = None
    folder: Path | None = None

    def path(self, name: str) -> str:
        """A file as flags name it."""
        return name if self.folder is None else str(self.folder / name)

    def drafter_for(self, engine: str) -> EngineDrafter:
        """The drafter.

        Raises:
            UsageError: it is not known.
        """
        if self.drafter is None:
            raise UsageError(
                f"export to {engine}: expected the drafter that the engine loads, found none: "
                "the policy names no pair",
                hint="give --drafter, a folder or hub id, and --method if it is not a folder",
            )
        return self.drafter


@dataclass(frozen=True)
class Export:
    """A policy as an engine takes it.

    Attributes:
        flags: words of the server's command line. environment: variables beside them.
        code: lines of Python, for an engine that is a library.
        files: content by name. notes: sentences on what holds beside them.
    """

    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    code: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MeanRound:
    """The mean round of a policy on a log: drafted levels, and verified nodes, root counted."""

    levels: float
    tokens: float


@dataclass(frozen=True)
class Engine:
    """A serving engine.

    Attributes:
        command: the server's own, in front of the flags.
        checked: the version that it was written for, and what says that it is right.
        files: names of all that `write` may write.
        budgets: kinds that it runs.
        loss: what it would lose of a shape, as a clause; None if it runs it as it is.
        draws: the same of drafts that are drawn from the drafter and verified by p/q.
        nearest: the nearest shape that it runs, for one of which something is lost; the mean round
            says how long and large. None where that is not known.
        write: a policy of which nothing is lost.
        read: the policy of flags and files; the inverse of `write`.
        batching: how replay simulates its batches; ours for SGLang and where it has no model.
        max_batch_size: requests that it decodes together with drafts; None: no bound.
        has_plugin: specctl runs inside it, and can log there.
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
    read: Callable[[Sequence[str], Mapping[str, str]], Policy]
    batching: Batching = "specctl"
    max_batch_size: int | None = None
    has_plugin: bool = False

    def runs(self, policy: Policy) -> bool:
        """Whether nothing would be lost of a policy."""
        return not self.losses(policy)

    def losses(self, policy: Policy) -> tuple[str, ...]:
        """Losses of a policy on the engine, as clauses; empty if it runs it."""
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
        """The nearest policy that the engine runs; the same one if that is it.

        None where the size of a rule's mean round is needed, and not given.
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


def fixed_shape(shape: Shape, mean: MeanRound | None) -> Chain | StaticTree | None:
    """The static shape of the width of another, as long and large as its mean round.

    A rule's largest round is no measure: of a mean of 5 nodes it may be 700. None without a mean,
    but of a shape whose rounds are all of one size.
    """
    rule = build_shape(shape)
    if mean is None and not is_fixed(rule):
        return None
    levels = rule.max_depth if mean is None else round(mean.levels)
    depth = min(max(levels, 1), rule.max_depth)
    tokens = rule.max_tokens if mean is None else round(mean.tokens)
    most = min(most_nodes(depth, rule.top_k), MAX_TOKENS)
    return tree_of(depth, rule.top_k, min(max(tokens, depth + 1), most))


def tree_of(depth: int, top_k: int, num_tokens: int) -> Chain | StaticTree:
    """The static shape of a size, root counted; of width 1 a chain."""
    if top_k == 1:
        return Chain(num_draft_tokens=depth)
    return StaticTree(depth=depth, top_k=top_k, num_tokens=num_tokens)


def most_nodes(depth: int, top_k: int) -> int:
    """Nodes that EAGLE-2's tree drafts, root counted: `top_k` of level 1, its square below."""
    return 1 + top_k + (depth - 1) * top_k**2


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """The word behind a flag; None where it is absent."""
    return dict(pairwise(flags)).get(name)


Parsed = TypeVar("Parsed", bound=Record)


def parsed(kind: type[Parsed], text: str, what: str) -> Parsed:
    """A record from JSON of an engine.

    Raises:
        EngineError: the first violation, with its field.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise refused(what, describe_violation(error)) from error


def refused(what: str, found: str) -> EngineError:
    """The refusal of settings that an engine cannot take, or that specctl does not write."""
    return EngineError(
        f"{what}: expected settings within the engine's ranges, as `specctl export` writes them, "
        f"found {found}",
        hint="correct that, or export the policy again",
    )


def made(kind: type[Parsed], fields: Mapping[str, Any], what: str) -> Parsed:
    """A record of plain values; `EngineError` if the engine could not take them."""
    return parsed(kind, json.dumps(fields), what)


def as_json(record: Record) -> str:
    """The fields of a record that are set, for an engine."""
    return json.dumps(record.model_dump(mode="json", exclude_none=True))
