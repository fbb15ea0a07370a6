"""`trace.json`: what a trace set was collected from and how (docs/trace-format.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, JsonValue, ValidationError

from specctl.collect.places import HEADER_NAME, Place
from specctl.collect.records import NEWER, Digest, TraceRecord, check_schema_id, parse_record
from specctl.errors import TraceError, TraceSchemaError
from specctl.policy import Policy, policy_digest
from specctl.policy.parse import describe_violation
from specctl.runtime.observe import Sampling
from specctl.stores import KeyAbsentError
from specctl.trace import TABLES, schema_id

PAIR_FIELDS = ("target_digest", "drafter_digest", "tokenizer_digest")


class _Tokens(BaseModel):
    """`collect.tokens`: what became of token ids."""

    model_config = ConfigDict(extra="forbid", strict=True)

    mode: Literal["keep", "hash", "drop"]
    key_digest: str | None = None
    vocab_size: int | None = None


class _Domain(BaseModel):
    """What merging reads of `collect.domain`; `specctl.collect.domain` reads all of it."""

    model_config = ConfigDict(extra="allow", strict=True)

    hardware: list[str] | None = None


class _Collect(BaseModel):
    """Entries of `collect` that this package looks into; the others are only compared."""

    model_config = ConfigDict(extra="allow", strict=True)

    tokens: _Tokens = _Tokens(mode="keep")
    domain: _Domain | None = None


def _check_collect(collect: dict[str, JsonValue]) -> dict[str, JsonValue]:
    try:
        _Collect.model_validate(collect)
    except ValidationError as error:
        raise ValueError(describe_violation(error)) from error
    return collect


class TraceHeader(TraceRecord):
    """Identity of a trace set; see the format page for each field."""

    schema_ids: dict[str, Digest]
    target_digest: Digest
    drafter_digest: Digest | None
    tokenizer_digest: Digest
    sampling: dict[str, JsonValue]
    policy: dict[str, JsonValue]
    policy_digest: Digest
    collect: Annotated[dict[str, JsonValue], AfterValidator(_check_collect)]
    specctl_version: str


def make_header(
    policy: Policy,
    sampling: Sampling,
    *,
    target_digest: str,
    drafter_digest: str | None,
    tokenizer_digest: str,
    collect: dict[str, Any],
) -> TraceHeader:
    """The header of a collection that starts now.

    Args:
        collect: JSON values that must be equal on resume, e.g. `max_new_tokens`; leave out what
            may differ between sittings, such as a limit on prompts.
    """
    from specctl import __version__

    return TraceHeader(
        schema_ids={table: schema_id(table) for table in TABLES},
        target_digest=target_digest,
        drafter_digest=drafter_digest,
        tokenizer_digest=tokenizer_digest,
        sampling=vars(sampling).copy(),
        policy=policy.model_dump(mode="json"),
        policy_digest=policy_digest(policy),
        collect=collect,
        specctl_version=__version__,
    ).sealed()


def read_header(place: Place) -> TraceHeader:
    """Reads `trace.json` strictly.

    Raises:
        TraceError: no such place, or not a trace set.
        TraceSchemaError: another version, unknown schema ids, tables or fields.
        TraceCorruptError: not JSON, or altered bytes.
    """
    where = place.at(HEADER_NAME)
    try:
        content = place.read(HEADER_NAME)
    except KeyAbsentError as error:
        is_there = place.root is None or place.root.is_dir()
        raise TraceError(
            f"trace set {place.name}",
            expected=f"a folder or bucket with {HEADER_NAME}",
            found="another folder" if is_there else "no such folder",
            fix="name what `specctl collect` wrote",
        ) from error
    header = parse_record(where, content, TraceHeader)
    for table in TABLES:
        check_schema_id(where, table, header.schema_ids.get(table, "none"))
    for table in header.schema_ids.keys() - TABLES.keys():
        raise TraceSchemaError(
            where,
            expected=f"tables {' and '.join(TABLES)}",
            found=f"{table!r}",
            fix=NEWER,
        )
    return header
