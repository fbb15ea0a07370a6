"""The table of families, and policies: JSON, command-line words and rules.

A new family needs a file of its own and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union, cast

from pydantic import Field, ValidationError, model_validator

from specctl.errors import UsageError
from specctl.lazy import Device
from specctl.policy import (
    adasd,
    budgets,
    c2t,
    echo,
    hetero,
    mars,
    own,
    pruning,
    ratio,
    static,
    stops,
    verification,
)
from specctl.policy.budgets import CostedBudget, PerRequest, StepCost
from specctl.policy.family import AcceptanceFamily, Family, ShapeFamily
from specctl.policy.ratio import Ratio
from specctl.policy.rules import BudgetRule, ShapeRule
from specctl.policy.static import RootOnly
from specctl.policy.verification import AcceptanceRule, Strict
from specctl.records import Record, canonical_json, describe_violation, json_digest, require

SHAPES = (
    static.AR,
    static.CHAIN,
    static.SCHEDULE,
    static.EAGLE2,
    static.FULL,
    hetero.HETERO,
    c2t.C2T,
    stops.STOP,
    stops.P_MIN,
    stops.DDD,
    stops.OPT_TREE,
    pruning.THRESHOLD,
    adasd.ADASD_STOP,
    echo.ECHO,
)
BUDGETS = (budgets.PER_REQUEST, budgets.SURVIVAL, budgets.MARGINAL, echo.ECHO_BUDGET)
ACCEPTANCES = (verification.STRICT, ratio.RATIO, mars.MARS, adasd.ADASD_ACCEPT)
Part = Literal["shape", "budget", "acceptance"]
PARTS: dict[Part, tuple[Family, ...]] = {
    "shape": SHAPES,
    "budget": BUDGETS,
    "acceptance": ACCEPTANCES,
}
_OF_RECORD = {family.record: family for part in PARTS.values() for family in part}
_OF_RECORD[own.OwnShape] = own.OWN  # it has no words and no JSON
WORDS: dict[Part, dict[str, dict[str, Any]]] = {
    part: {
        word: {"kind": family.kind, **settings}
        for family in families
        for word, settings in family.words.items()
    }
    for part, families in PARTS.items()
}
"""Records of the words on the command line, with the settings of their sources."""

if TYPE_CHECKING:
    from specctl.policy.family import Acceptance as Acceptance
    from specctl.policy.family import Budget as Budget
    from specctl.policy.family import Shape as Shape
else:

    def _one_of(families: tuple[Family, ...]) -> Any:
        records = tuple(family.record for family in families)
        return Annotated[Union[records], Field(discriminator="kind")]  # noqa: UP007

    Shape, Budget, Acceptance = map(_one_of, ((*SHAPES, own.OWN), BUDGETS, ACCEPTANCES))


class Policy(Record):
    """A shape, a budget and an acceptance; the latter two may be the default."""

    shape: Shape
    budget: Budget = PerRequest()
    acceptance: Acceptance = Strict()

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        """Rejects compositions with a part that could never act."""
        plain = isinstance(self.shape, RootOnly)
        shares = not isinstance(self.budget, PerRequest)
        require(not (plain and shares), "ar drafts nothing that a budget could share")
        strict = isinstance(self.acceptance, Strict)
        require(not plain or strict, "ar drafts nothing that could be accepted or refused")
        if isinstance(self.acceptance, Ratio):
            fault = shape_family(self.shape).withholds(self.shape)
            rule = "ratio needs a chain with a predictable stop, but"
            require(fault is None, f"{rule} {self.shape.kind} {fault}")
            sort = self.budget.kind
            require(not shares, f"{rule} budget {sort} withholds tokens for their probability")
        return self

    @property
    def lossless(self) -> bool:
        """Whether the emitted text follows the target's own distribution."""
        return cast(AcceptanceFamily, family_of(self.acceptance)).is_lossless

    @property
    def name(self) -> str:
        """Kinds of the parts, defaults left out, e.g. `hetero` or `echo+echo_budget`; of a rule of
        one's own its name."""
        parts = (self.shape, *self.additions.values())
        return "+".join(getattr(part, "name", part.kind) for part in parts)

    @property
    def additions(self) -> dict[Part, Any]:
        """Budget and acceptance, defaults left out."""
        parts: dict[Part, Any] = {name: getattr(self, name) for name in PARTS if name != "shape"}
        return {
            name: part for name, part in parts.items() if not isinstance(part, PerRequest | Strict)
        }


def family_of(record: Record) -> Family:
    """The family of a part's record."""
    return _OF_RECORD[type(record)]


def shape_family(shape: Shape) -> ShapeFamily:
    """The family of a shape."""
    return cast(ShapeFamily, _OF_RECORD[type(shape)])


def as_chain(policy: Policy) -> Policy:
    """The policy on the drafter's likeliest path, for engines that draft chains; chains stay."""
    made = shape_family(policy.shape).chain
    return policy if made is None else policy.model_copy(update={"shape": made(policy.shape)})


# --------------------------------------------------------------------------- JSON


def policy_json(policy: Policy) -> str:
    """Canonical JSON of a policy."""
    return canonical_json(policy.model_dump(mode="json"))


def policy_digest(policy: Policy) -> str:
    """`sha256:<hex>` of the canonical JSON; the `policy_digest` column of traces."""
    return json_digest(policy_json(policy))


def parse_policy(text: str) -> Policy:
    """A policy from JSON.

    Raises:
        UsageError: the first violation, with its field.
    """
    try:
        return Policy.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(
            f"policy record (docs/artifact-format.md): {describe_violation(error)}",
            hint="correct that field or fit the policy again",
        ) from error


# --------------------------------------------------------------------------- rules


def build_shape(shape: Shape, device: Device = "cpu") -> ShapeRule:
    """The rule that decides for a shape record, its tables on `device`."""
    rule: ShapeRule = family_of(shape).rule(shape, device)
    return rule


def build_acceptance(
    acceptance: Acceptance, device: Device = "cpu", *, eos_ids: Collection[int] = ()
) -> AcceptanceRule:
    """The rule that decides for an acceptance record, its tables on `device`.

    Args:
        eos_ids: tokens that end a text, which no lossy rule may accept or replace.
    """
    rule: AcceptanceRule = family_of(acceptance).rule(acceptance, device, eos_ids)
    return rule


def build_budget(
    budget: Budget, *, batch_size: int, max_tokens: int, device: Device = "cpu"
) -> BudgetRule:
    """The rule that decides for a budget record, its tables on `device`.

    Args:
        batch_size: requests that share the budget at most.
        max_tokens: nodes that one of them submits at most, root counted.

    Raises:
        UsageError: the cost table is missing or too small, or there are fewer tokens than
            requests.
    """
    rule: BudgetRule = family_of(budget).rule(budget, batch_size, max_tokens, device)
    return rule


StepCosts = Callable[[Shape], StepCost]
"""Step costs of a batch by size, for drafts of a shape."""


def with_costs(policy: Policy, costs: StepCost | StepCosts) -> Policy:
    """The policy with step costs, if its budget lacks them.

    Args:
        costs: the table, or a function from a shape to its table, called only if needed.
    """
    budget = policy.budget
    if isinstance(budget, CostedBudget) and budget.lacks_costs:
        table = costs if isinstance(costs, StepCost) else costs(policy.shape)
        return policy.model_copy(update={"budget": budget.model_copy(update={"costs": table})})
    return policy
