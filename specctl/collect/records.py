"""What a trace set stores as JSON: canonical bytes that hold a digest of themselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from specctl.errors import TraceCorruptError, TraceSchemaError
from specctl.policy.parse import canonical_json, describe_violation
from specctl.trace import TRACE_VERSION, is_known_schema, schema_id

NEWER = "read it with the specctl that wrote it, or collect again"
RESTORE = "restore the file"
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


def _check_moment(text: str) -> str:
    datetime.fromisoformat(text)
    return text


Moment = Annotated[str, Field(pattern=r"^[0-9T:.-]{19,26}\+00:00$"), AfterValidator(_check_moment)]
"""UTC, ISO 8601."""


class TraceRecord(BaseModel):
    """Base of what is stored as JSON: frozen, strict, no unknown fields, no NaN.

    Attributes:
        body_digest: of all other fields, so that no altered bit passes; None in records that were
            written before there was one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    ADDED: ClassVar[tuple[str, ...]] = ("body_digest",)
    """Fields that records of the first writers lack; a record without them has none of them."""

    trace_version: int = TRACE_VERSION
    body_digest: Digest | None = None

    def to_bytes(self) -> bytes:
        """Canonical JSON without the added fields that are not set: equal records, equal bytes."""
        value: dict[str, Any] = self.model_dump(mode="json")
        absent = {name for name in self.ADDED if value[name] is None}
        return _canonical({name: value[name] for name in value.keys() - absent})

    @cached_property
    def digest(self) -> str:
        """`sha256:<hex>` of the record's bytes."""
        return _sha256(self.to_bytes())

    def sealed(self) -> Self:
        """With the digest of its other fields, as every writer stores it."""
        return self.model_copy(update={"body_digest": self._digest_of_body()})

    @property
    def is_sound(self) -> bool:
        """Whether its fields are those that it was sealed with, if it was."""
        return self.body_digest in (None, self._digest_of_body())

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, whose digests are its own."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("digest", None)
        if copied.body_digest is not None:
            copied.__dict__["body_digest"] = copied._digest_of_body()
        return copied

    def _digest_of_body(self) -> str:
        value = json.loads(self.to_bytes())
        value.pop("body_digest", None)
        return _sha256(_canonical(value))


RecordT = TypeVar("RecordT", bound=TraceRecord)


def _canonical(value: dict[str, Any]) -> bytes:
    return canonical_json(value).encode()


def _sha256(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def parse_record(path: str, content: bytes, kind: type[RecordT], fix: str = RESTORE) -> RecordT:
    """A record from its bytes; the version is judged before the fields, which it governs.

    Args:
        fix: what to do about altered bytes.

    Raises:
        TraceSchemaError: another version, unknown fields or values.
        TraceCorruptError: not JSON, not canonical, or not what was sealed.
    """
    value = _parse_json(path, content, fix)
    version = value.get("trace_version") if isinstance(value, dict) else None
    if version != TRACE_VERSION:
        expected = f"trace_version {TRACE_VERSION}"
        raise TraceSchemaError(path, expected=expected, found=f"{version!r}", fix=NEWER)
    try:
        record = kind.model_validate(value)
    except ValidationError as error:
        raise TraceSchemaError(
            path,
            expected="the fields of docs/trace-format.md",
            found=describe_violation(error),
            fix=NEWER,
        ) from error
    if record.to_bytes() != content or not record.is_sound:
        expected = "canonical JSON with the digest of its own fields"
        raise TraceCorruptError(path, expected=expected, found="altered bytes", fix=fix)
    return record


def _parse_json(path: str, content: bytes, fix: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        found = f"{len(content)} other bytes"
        raise TraceCorruptError(path, expected="JSON", found=found, fix=fix) from error


def check_schema_id(path: str, table: str, found: str) -> None:
    """Refuses columns that this version was not built for.

    Raises:
        TraceSchemaError: the id is none that was ever the one of `table`.
    """
    if not is_known_schema(table, found):
        raise TraceSchemaError(
            f"{path}, table {table}",
            expected=f"schema {schema_id(table)[:19]}…",
            found=f"{found[:19]}…",
            fix=NEWER,
        )
