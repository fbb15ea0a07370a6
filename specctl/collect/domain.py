"""Where what traces show will hold: the domain of the evidence that is fitted from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from specctl.artifacts import Domain
from specctl.artifacts.facts import Range
from specctl.collect.header import TraceHeader
from specctl.collect.reader import TraceSet
from specctl.errors import TraceSchemaError
from specctl.parquet import collected
from specctl.policy.parse import canonical_json, describe_violation

if TYPE_CHECKING:
    import polars as pl

T = TypeVar("T")


def domain_of(traces: TraceSet) -> Domain:
    """What the headers record and the rows show; what they do not is unknown.

    Folders of several machines give all of them; anything else that differs is unknown.

    Raises:
        TraceSchemaError: a header whose domain has other fields.
    """
    domains = [_recorded(header) for header in traces.headers]
    merged: dict[str, Any] = {
        name: _common(getattr(domain, name) for domain in domains) for name in Domain.model_fields
    }
    merged["hardware"] = _all_hardware(domains)
    return Domain(**{**merged, **_loads(traces)})


def _recorded(header: TraceHeader) -> Domain:
    """Imported traces, and those of older versions, record at most the number format."""
    stated = header.collect.get("domain") or {"dtype": header.collect.get("dtype")}
    try:
        return Domain.model_validate_json(canonical_json(stated))
    except ValidationError as error:
        raise TraceSchemaError(
            "trace.json, collect.domain",
            expected="the fields of docs/artifact-format.md, domain",
            found=describe_violation(error),
            fix="read it with the specctl that wrote it, or collect again",
        ) from error


def _common(values: Iterable[T]) -> T | None:
    found = list(values)
    return found[0] if all(value == found[0] for value in found) else None


def _all_hardware(domains: list[Domain]) -> tuple[str, ...] | None:
    given = [domain.hardware for domain in domains]
    if None in given:
        return None
    return tuple(sorted({name for names in given for name in names or ()}))


def _loads(traces: TraceSet) -> dict[str, Range | None]:
    """Ranges of the rows; dense ones are of positions, which no requests share."""
    import polars as pl

    rounds = traces.scan("rounds")
    live = rounds.filter(pl.col("kind").cast(pl.String) == "live")
    return {
        "batch_size": _range(live, "batch_size"),
        "context_tokens": _range(rounds, "context_tokens"),
    }


def _range(rounds: pl.LazyFrame, column: str) -> Range | None:
    import polars as pl

    ends = rounds.select(low=pl.col(column).min(), high=pl.col(column).max())
    low, high = collected(ends).row(0)
    return None if low is None else Range(low=low, high=high)
