"""Declaration of families (kinds of shapes, budgets or acceptances), and bounds of fields.

A family's file holds its record (the parameters), its rule (the code that decides), its words on
the command line and the values that tuning searches. It declares them as one `Family`, listed in
`families.py`.
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
    """Names of the features that every record of the kind reads."""
    kind: str

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the features that the rule reads, in order; artifacts state them."""
        return self.always_reads


class Budget(Record):
    """The sharing of verification in a batch."""

    kind: str


class Acceptance(Record):
    """The draft tokens that the target's logits admit."""

    kind: str


# --------------------------------------------------------------------------- search grids

Grid = dict[str, tuple[str, ...]]
"""Values of each setting, as written in a policy's words."""


def grid(**settings: str) -> Grid:
    """A grid from each setting's values, separated by spaces."""
    return {name: tuple(values.split()) for name, values in settings.items()}


LEVELS = "1 2 3 4 5 6 7 8 10 12 16"
WINDOWS = "2 3 4 6 8 10 15 20"
PROBS = "0.05 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9"


@dataclass(frozen=True)
class Scaled:
    """Values relative to a load."""

    factors: tuple[float, ...]  # times `unit`
    unit: str  # `batch size`, or `best static rate`, its tokens/s over the training prompts
    as_is: tuple[str, ...] = ()  # absolute values


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of a policy's part; every family must state the fields without a default."""

    record: type[Record]  # its parameters; the default of field `kind` is its name in JSON
    rule: Callable[..., Any]
    """From a record to the rule that decides. Shapes: `(record, device)`; acceptances: `(record,
    device, eos_ids)`; budgets: `(record, batch_size, max_tokens, device)`."""
    words: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Its names on the command line with implied settings; empty for fitted families."""
    grids: Mapping[str, Mapping[str, tuple[str, ...] | Scaled]] = field(default_factory=dict)
    """Values that tuning searches, by word, which may have settings (`stop:signal=entropy`)."""
    short: tuple[str, ...] = ()
    """Settings that words may give as numbers alone, in this order: `chain:5`, `eagle2:4x2/8`."""

    @property
    def kind(self) -> str:
        """Its name in records."""
        return str(self.record.model_fields["kind"].default)


@dataclass(frozen=True, kw_only=True)
class ShapeFamily(Family):
    """A family of shapes, with properties that other rooms use."""

    is_static: bool  # all rounds draft and submit trees of one size, and nothing is learned
    is_deep: bool  # records must have more nodes than levels
    is_timed: bool  # the rule works between levels, so a profile times it
    reads_entropy: bool  # the rule may read entropies, so a log must hold them
    is_ranked: Callable[[Any], bool]
    """Of a record: nodes unknown to a log cannot change the choice of likelier known ones, so that
    replay's bounds are close. True for expansion and selection by joint probability alone, and for
    chains, which end with the log."""
    kernel: Literal["static", "bins", "gates", "pruned"] | None
    """Kind of decision kernel in captured rounds; None if the torch rule decides between graphs."""
    chain: Callable[[Any], Record] | None
    """From a record to its restriction to the drafter's likeliest path, for engines that draft
    chains; None if every record is a chain."""
    withholds: Callable[[Any], str | None]
    """Of a record: the reason, as a clause, why draft tokens may not be drawn from the drafter: the
    rule may withhold a token from verification because of its value. None if it never does."""
    shared_grid: Grid = field(default_factory=dict)  # coarser values for use with a budget
    fitted_grid: Grid = field(default_factory=dict)  # settings of fitted artifacts to vary
    shared_fitted_grid: Grid = field(default_factory=dict)  # the same, for use with a budget
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Paths of the fitted grid's settings that are nested in the record."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceFamily(Family):
    """A family of acceptances."""

    is_lossless: bool  # the emitted text follows the target's own distribution


def always(record: Record) -> bool:
    """A property of every record of a family."""
    del record
    return True


def never(record: Record) -> bool:
    """A property of no record of a family."""
    del record
    return False


def prunes(record: Record) -> str | None:
    """`ShapeFamily.withholds` for families that draft trees or prune tokens."""
    del record
    return "drafts trees or prunes tokens"
