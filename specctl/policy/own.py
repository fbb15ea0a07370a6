"""A rule of one's own, an object of Python in the place of a family: for replay and decoding from
Python. JSON has no form of it, so no artifact, registry or engine can have it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from specctl.errors import UsageError
from specctl.lazy import Device, Tensor
from specctl.policy.family import Shape, ShapeFamily
from specctl.policy.rules import Frontier, Level, Plan, ShapeRule, is_closed
from specctl.records import require
from specctl.tree import DraftPool


class OwnShape(Shape):
    """A rule of one's own: best a dataclass that derives from `specctl.policy.rules.BaseShape`."""

    kind: Literal["own"] = "own"
    name: str = Field(min_length=1)
    """Its identity in traces: another rule, or other settings, need another name."""
    rule: Any = Field(exclude=True)  # a `ShapeRule`

    @model_validator(mode="after")
    def _is_rule(self) -> Self:
        methods = (name for name, value in vars(ShapeRule).items() if callable(value))
        names = (*ShapeRule.__annotations__, *(name for name in methods if name[0] != "_"))
        lacking = [name for name in names if not hasattr(self.rule, name)]
        require(not lacking, f"the rule {self.name} lacks {', '.join(lacking)} of ShapeRule")
        return self

    @property
    def is_chain(self) -> bool:
        """Whether its trees have one node a level."""
        return bool(self.rule.top_k == self.rule.width == 1)


@dataclass
class CheckedShape:
    """A rule of which every frontier and tree is checked: the verified text is the target's own
    only of trees."""

    name: str
    rule: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def grow(self, plan: Plan, level: Level) -> Frontier:
        found = self.rule.grow(plan, level)
        index, keep = found.index, found.keep
        inside = (index >= level.start) & (index < level.pool.num_slots)
        first = keep[:, 1:] <= keep[:, :-1]
        if index.shape[1] > self.rule.width or not bool(inside.all() & first.all()):
            raise UsageError(
                f"the rule {self.name} grows from other places than its level's, or too many",
                hint="return at most width places of the level in the pool, the kept ones first",
            )
        return Frontier(index, keep)

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        found: Tensor = self.rule.select(plan, pool)
        exists = pool.joint_logp.gather(1, found.clamp(min=0)) > float("-inf")
        if not (bool(exists.all()) and is_closed(found, pool.parent, self.rule.max_tokens)):
            raise UsageError(
                f"the rule {self.name} submits what is no tree",
                hint="return ascending places, root first, each with its parent, -1 behind them, "
                "at most max_tokens",
            )
        return found


def own_shape(record: OwnShape, device: Device) -> CheckedShape:
    """The rule on a device, where it has one."""
    rule = copy.copy(record.rule)
    if hasattr(rule, "device"):
        rule.device = device
    return CheckedShape(record.name, rule)


def _as_chain(record: OwnShape) -> OwnShape:
    if not record.is_chain:
        raise UsageError(
            f"the rule {record.name} drafts trees, and engines draft chains",
            hint="give it top_k and width 1, or replay it without an engine",
        )
    return record


OWN = ShapeFamily(
    record=OwnShape,
    rule=own_shape,
    is_static=False,
    is_deep=False,
    is_timed=True,
    reads_entropy=True,
    is_ranked=lambda record: record.is_chain,
    kernel=None,
    chain=_as_chain,
    withholds=lambda record: "may withhold tokens for their probability",
)
