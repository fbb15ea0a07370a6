"""Families: the declaration of one kind of shape, budget or acceptance, and bounds of fields.

A family's file holds its record (the parameters), its rule (the code that decides), its words on
the command line and the values that tuning searches; it declares them as one `Family`, which stands
as a line in the table of `families.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from specctl.records import Record

MAX_DEPTH, MAX_TOP_K, MAX_TOKENS = 64, 64, 1024
"""Bounds that keep a hostile or mistyped record from asking for absurd memory."""
Depth = Annotated[int, Field(ge=1, le=MAX_DEPTH)]
Length = Annotated[int, Field(ge=0, le=MAX_DEPTH)]
"""Draft tokens of a chain; 0 is plain decoding."""
TopK = Annotated[int, Field(ge=1, le=MAX_TOP_K)]
NumTokens = Annotated[int, Field(ge=2, le=MAX_TOKENS)]


class Shape(Record):
    """The growth of a tree, and the choice of its submitted nodes."""

    always_reads: ClassVar[tuple[str, ...]] = ()
    """Names of the features that every record of the kind decides by."""
    kind: str

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the features that decide, in order; artifacts state them."""
        return self.always_reads


class Budget(Record):
    """The sharing of verification in a batch."""

    kind: str


class Acceptance(Record):
    """The draft tokens that the target's logits admit."""

    kind: str


# --------------------------------------------------------------------------- search grids

Grid = dict[str, tuple[str, ...]]
"""Values of each setting, as they are written behind the name of a policy."""


def grid(**settings: str) -> Grid:
    """A grid from each setting's values, separated by spaces."""
    return {name: tuple(values.split()) for name, values in settings.items()}


LEVELS = "1 2 3 4 5 6 7 8 10 12 16"
WINDOWS = "2 3 4 6 8 10 15 20"
PROBS = "0.05 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9"


@dataclass(frozen=True)
class Scaled:
    """Values that only a load makes absolute."""

    factors: tuple[float, ...]  # times `unit`
    unit: str  # `batch size`, or `best static rate`, its tokens/s over the training prompts
    as_is: tuple[str, ...] = ()  # values that are not scaled


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of a policy's part. A fact without a default has to be stated by every family."""

    record: type[Record]  # its parameters; the default of field `kind` names it in JSON
    rule: Callable[..., Any]
    """From a record to the rule that decides. Shapes: `(record, device)`; acceptances: `(record,
    device, eos_ids)`; budgets: `(record, batch_size, max_tokens, device)`."""
    words: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Its names on the command line, with settings that they imply; none for a family that needs a
    fit."""
    grids: Mapping[str, Mapping[str, tuple[str, ...] | Scaled]] = field(default_factory=dict)
    """Values that tuning searches, by word; `stop:signal=entropy` is a word with a fixed setting.
    A budget's may be `Scaled`."""

    @property
    def kind(self) -> str:
        """Its name in records."""
        return str(self.record.model_fields["kind"].default)


@dataclass(frozen=True, kw_only=True)
class ShapeFamily(Family):
    """A family of shapes, with the facts that other rooms rely on."""

    is_static: bool  # every round drafts and submits a tree of one size, and nothing is learned
    is_deep: bool  # a record demands more nodes than levels
    is_timed: bool  # the rule works between levels, so that a profile times it
    reads_entropy: bool  # the rule may look at entropies, which a log then has to hold
    is_ranked: Callable[[Any], bool]
    """Of a record: its known nodes stand whatever is unknown below less likely ones, so that
    replay's bounds are close. True of shapes that expand and submit by joint probability alone,
    and of chains, which end where the log does."""
    kernel: Literal["static", "bins", "gates", "pruned"] | None
    """The kind of parameter buffer by which kernels decide in captured rounds; None where the
    torch rule decides between graphs."""
    chain: Callable[[Any], Record] | None
    """Of a record: the record whose rule grows and cuts the drafter's likeliest path alone, as
    engines do that draft chains; None where every record is such a chain."""
    withholds: Callable[[Any], str | None]
    """Of a record: the reason why its drafts may not be drawn from the drafter, as a clause: the
    rule may keep a drafted token from verification for what it is. None if it never does."""
    shared_grid: Grid = field(default_factory=dict)
    """Coarser values where a budget trims the tree anyway."""
    fitted_grid: Grid = field(default_factory=dict)
    shared_fitted_grid: Grid = field(default_factory=dict)
    """`fitted_grid`, `shared_fitted_grid`: the same of fitted artifacts, whose other settings
    stay."""
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Where a setting of the fitted grid stands in the record, if not at the top."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceFamily(Family):
    """A family of acceptances."""

    is_lossless: bool  # the emitted text follows the target's own distribution, whatever the shape


def always(record: Record) -> bool:
    """A fact that holds for every record of a family."""
    del record
    return True


def never(record: Record) -> bool:
    """A fact that holds for no record of a family."""
    del record
    return False


def prunes(record: Record) -> str | None:
    """`ShapeFamily.withholds` of families that draft trees or prune tokens."""
    del record
    return "drafts trees or prunes tokens"
