"""`trace.json`: what a trace set was collected from and how (docs/trace-format.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from specctl.errors import TraceCorruptError, TraceError, TraceMismatchError, TraceSchemaError
from specctl.policy import Policy, policy_digest
from specctl.policy.parse import canonical_json, describe_violation
from specctl.runtime.observe import Sampling
from specctl.trace import TABLES, TRACE_VERSION, schema_id

HEADER_NAME = "trace.json"
PAIR_FIELDS = ("target_digest", "drafter_digest", "tokenizer_digest")
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class TraceRecord(BaseModel):
    """Base of what is stored as JSON: frozen, strict, no unknown fields, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    trace_version: int = TRACE_VERSION

    def to_bytes(self) -> bytes:
        """Canonical JSON: equal records give equal bytes."""
        return canonical_json(self.model_dump(mode="json")).encode()


RecordT = TypeVar("RecordT", bound=TraceRecord)


class TraceHeader(TraceRecord):
    """Identity of a trace set; see the format page for each field."""

    schema_ids: dict[str, Digest]
    target_digest: Digest
    drafter_digest: Digest | None
    tokenizer_digest: Digest
    sampling: dict[str, JsonValue]
    policy: dict[str, JsonValue]
    policy_digest: Digest
    collect: dict[str, JsonValue]
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
    )


def read_header(root: Path) -> TraceHeader:
    """Reads `trace.json` strictly.

    Raises:
        TraceError: no such folder, or not a trace set.
        TraceSchemaError: another version, unknown schema ids or fields.
        TraceCorruptError: not JSON.
    """
    path = root / HEADER_NAME
    if not path.is_file():
        raise TraceError(
            f"trace folder {root}",
            expected=f"a folder with {HEADER_NAME}",
            found="another folder" if root.is_dir() else "no such folder",
            fix="name a folder that `specctl collect` wrote",
        )
    header = parse_record(path, path.read_bytes(), TraceHeader)
    for table in TABLES:
        check_schema_id(path, table, header.schema_ids.get(table, "none"))
    return header


def parse_record(path: Path, content: bytes, kind: type[RecordT]) -> RecordT:
    """A record from its bytes; the version is judged before the fields, which it governs."""
    value = _parse_json(path, content)
    version = value.get("trace_version") if isinstance(value, dict) else None
    if version != TRACE_VERSION:
        raise TraceSchemaError(
            str(path),
            expected=f"trace_version {TRACE_VERSION}",
            found=f"{version!r}",
            fix="read it with the specctl that wrote it, or collect again",
        )
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise TraceSchemaError(
            str(path),
            expected="the fields of docs/trace-format.md",
            found=describe_violation(error),
            fix="read it with the specctl that wrote it, or collect again",
        ) from error


def _parse_json(path: Path, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TraceCorruptError(
            str(path), expected="JSON", found=f"{len(content)} other bytes", fix="restore the file"
        ) from error


def check_schema_id(path: Path, table: str, found: str) -> None:
    """Refuses columns that this version was not built for.

    Raises:
        TraceSchemaError: the id is not the one of `table`.
    """
    if found != schema_id(table):
        raise TraceSchemaError(
            f"{path}, table {table}",
            expected=f"schema {schema_id(table)[:19]}…",
            found=f"{found[:19]}…",
            fix="read it with the specctl that wrote it, or collect again",
        )


def check_same_run(root: Path, stored: TraceHeader, wanted: TraceHeader) -> None:
    """Refuses to go on with a set that was begun differently, naming the field.

    Raises:
        TraceMismatchError: a field other than `specctl_version` differs.
    """
    _check_equal(root, stored, wanted, set(TraceHeader.model_fields) - {"specctl_version"})


def check_same_source(root: Path, stored: TraceHeader, wanted: TraceHeader) -> None:
    """Refuses sets whose rows follow different laws: other pair, sampling or columns.

    Policies may differ: every row carries its own policy digest.

    Raises:
        TraceMismatchError: naming the field.
    """
    _check_equal(root, stored, wanted, {*PAIR_FIELDS, "sampling", "schema_ids"})


def _check_equal(root: Path, stored: TraceHeader, wanted: TraceHeader, fields: set[str]) -> None:
    have = _flat(stored.model_dump(include=fields))
    want = _flat(wanted.model_dump(include=fields))
    # Identity before detail: another drafter is named as that, not by its vocabulary size.
    for name in sorted(have.keys() | want.keys(), key=lambda n: (n.startswith("collect."), n)):
        if have.get(name) != want.get(name):
            raise TraceMismatchError(
                f"trace folder {root}, field {name}",
                expected=repr(want.get(name)),
                found=repr(have.get(name)),
                fix="use the same pair and options, or another folder",
            )


def _flat(value: dict[str, Any], stem: str = "") -> dict[str, Any]:
    """Nested dicts as one, so that a message names `sampling.seed` and not all of `sampling`."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{stem}{key}"
        flat |= _flat(inner, f"{name}.") if isinstance(inner, dict) else {name: inner}
    return flat
