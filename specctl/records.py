"""Strict records: frozen, no unknown fields, no NaN; JSON, canonical and of results; float32."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from specctl.errors import RecordError, did_you_mean
from specctl.lazy import np

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]


class _Plain(str):
    """Text that is shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


class TypedModel(BaseModel):
    """A model that refuses fields and assignments with `RecordError`; JSON with pydantic's own
    error, which tells the place in a file."""

    if not TYPE_CHECKING:  # else its fields would not be known as arguments

        def __init__(self, /, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise _refused(type(self), error) from None

        __init__.__pydantic_base_init__ = True  # JSON goes past it

        def __setattr__(self, name: str, value: Any) -> None:
            try:
                super().__setattr__(name, value)
            except ValidationError as error:
                raise _refused(type(self), error) from None


def _refused(kind: type[BaseModel], error: ValidationError) -> RecordError:
    place, fix = violated_rule(error).place, ""
    if place and place[0] not in kind.model_fields:
        names = [name for name in kind.model_fields if name != "kind"]
        fix = did_you_mean(place[0], names, f"its fields are {', '.join(names) or 'none'}")
    return RecordError(f"{kind.__name__}, {describe_violation(error)}", hint=fix)


class Record(TypedModel):
    """Frozen, strict, no unknown fields, no NaN: nothing is guessed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    learned: ClassVar[tuple[str, ...]] = ()
    """Fields that an artifact keeps in safetensors, not in its manifest."""

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """pydantic's arguments, with the sizes of learned fields in place of their values."""
        for name, value in super().__repr_args__():
            is_long = name in self.learned and isinstance(value, tuple)
            yield name, _Plain(f"<{len(value)} values>") if is_long else value


def option(
    value: Any,
    help: str,
    *,
    name: str | None = None,
    default: str | None = None,
    repeats: bool = False,
    group: str | None = None,
    **bounds: Any,
) -> Any:
    """An option of a verb: a field of a model, or the default of the verb's own parameter.

    See `specctl.cli.verbs`.

    Args:
        value: its default.
        help: without a full stop and the bounds, which the command line adds.
        name: if it differs from the field's; `--out -o` has a short form too.
        default: in words, if it depends on other options.
        repeats: a tuple is given by repeating the option, not separated by commas.
        group: common, model, sampling or advanced; None: advanced for a model's field, else common.
    """
    extra: dict[str, Any] = {"option": name, "default": default, "repeats": repeats, "group": group}
    return Field(value, description=help, json_schema_extra=extra, **bounds)


def require(holds: bool, rule: str) -> None:  # noqa: FBT001
    """Raises a ValueError with the broken rule, for validators of records."""
    if not holds:
        raise ValueError(rule)


def increasing(values: Array) -> bool:
    """Whether the values rise strictly."""
    return all(low < high for low, high in pairwise(values))


# --------------------------------------------------------------------------- float32


def floor_float32(value: float) -> float:
    """The largest float32 not above `value`.

    Thresholds are compared in float32 at run time. Rounding down keeps every decision `x <= t`;
    rounding to nearest could move a threshold past a data point.
    """
    require(abs(value) <= MAX_FLOAT32, f"magnitude exceeds float32, {MAX_FLOAT32:.3g}")
    nearest = np.float32(value)
    if float(nearest) <= value:  # as Python floats: numpy would round `value` to float32 first
        return float(nearest)
    return float(np.nextafter(nearest, np.float32(-np.inf)))


def ceil_float32(value: float) -> float:
    """The smallest float32 not below `value`; keeps every decision `x < t` in float32."""
    return -floor_float32(-value)


MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
Float32 = Annotated[float, AfterValidator(floor_float32)]
Array = tuple[Float32, ...]
Matrix = tuple[Array, ...]


# --------------------------------------------------------------------------- JSON


def canonical_json(value: Any) -> str:
    """JSON with sorted keys, no spaces, no NaN: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def json_digest(text: str) -> str:
    """`sha256:<hex>` of a text's UTF-8 bytes."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


_PLAIN = (
    (r"^Value error, |Input should be ", ""),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    ("greater than", "above"),
    ("less than", "below"),
    ("a valid integer.*", "a whole number"),
    ("a valid number.*", "a number"),
    ("a valid (boolean|bool).*", "true or false"),
    (r"a valid dictionary or instance of (\w+)", r"a \1"),
    (r"a valid (\w+)$", r"a \1"),
    ("String should match pattern", "not of the pattern"),
    (r"Input tag (.*) found using '(\w+)' .* expected tags:", r"\2 \1 is none of"),
)
"""Phrases of pydantic, and plain ones."""


class Violation(NamedTuple):
    """The first violation of a pydantic error."""

    place: tuple[str, ...]  # names of fields, outermost first
    rule: str  # in plain words
    kind: str  # pydantic's
    is_value: bool  # the rule describes a valid value


def violated_rule(error: ValidationError) -> Violation:
    """The first violation of a pydantic error."""
    # Thousands of values may be invalid, and url, context and input would repeat each.
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place, message = tuple(str(part) for part in first["loc"]), first["msg"]
    return Violation(
        place, in_plain_words(message), first["type"], message.startswith("Input should be")
    )


def in_plain_words(message: str) -> str:
    """A message of pydantic, or of a parser that uses it, in plain words."""
    for theirs, ours in _PLAIN:
        message = re.sub(theirs, ours, message)
    return message


def describe_violation(error: ValidationError) -> str:
    """First violation of a pydantic error: `field: message`, or the message without a field."""
    place, rule, kind, is_value = violated_rule(error)
    known = {"extra_forbidden": "there is no such field", "missing": "it is missing"}
    no_record = "it has no kind, as records have"
    known |= {"json_invalid": "text that is no JSON", "union_tag_not_found": no_record}
    known |= {"model_attributes_type": no_record, "string_too_short": "it is empty"}
    known |= {"frozen_instance": "records are frozen, and model_copy(update=...) makes another"}
    text = known.get(kind, f"not {rule}" if is_value else rule)
    return f"{'.'.join(place)}: {text}" if place else text


HELD_OUT_FRAC = 0.2
"""Share of the prompts that `fit`, `ladder`, `tune` and `recalibrate` hold out by default."""
HELD_OUT: float = option(
    HELD_OUT_FRAC, "Share of prompts held out", name="--held-out", gt=0, lt=1, group="common"
)
MAX_POSITIONS_READ = 200_000
"""Most positions that verbs read by default; bounds their memory."""
MAX_POSITIONS: int = option(
    MAX_POSITIONS_READ,
    "Positions read at most, a seeded sample of whole prompts",
    name="--max-positions",
    ge=1000,
)


def finite(value: Any) -> Any:
    """The value with NaN and infinities, which JSON lacks, as None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_bytes(value: Any) -> bytes:
    """Indented JSON, with null for NaN and infinities."""
    return (json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n").encode()
