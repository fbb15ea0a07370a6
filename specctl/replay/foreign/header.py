"""`import.json`: where imported acceptance came from and how it was read (docs/import.md)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from specctl.errors import TraceCorruptError, TraceError, TraceSchemaError
from specctl.policy.base import Record
from specctl.policy.parse import canonical_json, describe_violation

IMPORT_VERSION = 1
"""Raised when a reader of the previous version would misread a folder."""
HEADER_NAME, POSITIONS_NAME = "import.json", "positions.parquet"
PREFIX = "num_accepted_"
"""Of the column of each drafter."""
COLUMNS = {
    "request_id": "dictionary",
    "category": "dictionary",
    "position": "int32",
    "context_tokens": "int32",
    "remaining": "int32",
}
"""Columns that every import has, before one int32 `num_accepted_<drafter>` a drafter."""
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]


class ImportedDrafter(Record):
    """One drafter's lists.

    Attributes:
        offered_depth: draft tokens that each round of the log offered.
        offered_depth_inferred: taken as the most that was accepted, since nobody stated it.
        num_censored: positions where all of them were accepted before the text ended: more might
            have been.
        num_entries, misaligned: as in `table.DrafterReport`.
    """

    offered_depth: Count
    offered_depth_inferred: bool
    max_accepted: Count
    num_censored: Count
    num_entries: Count
    misaligned: dict[str, Count]


class ImportHeader(Record):
    """Identity of an import; see the format page for each field."""

    import_version: int = IMPORT_VERSION
    schema_id: Digest
    source_format: str
    source_name: str
    source_digest: Digest
    source_size_bytes: Count
    entry_predicts: Annotated[str, Field(pattern="^(same|next)$")]
    max_misaligned: Annotated[float, Field(ge=0, le=1)]
    drafters: dict[str, ImportedDrafter]
    num_requests: Count
    num_positions: Count
    num_without_rounds: Count
    num_cut_tokens: Count
    positions_digest: Digest
    positions_size_bytes: Count
    specctl_version: str

    def to_bytes(self) -> bytes:
        """Canonical JSON: equal headers give equal bytes."""
        return canonical_json(self.model_dump(mode="json")).encode()

    @property
    def digest(self) -> str:
        """Identity of the import; the header lists the digest of the positions."""
        return digest_of(self.to_bytes())


def digest_of(data: bytes) -> str:
    """`sha256:<hex>` of bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def columns_of(drafters: tuple[str, ...]) -> dict[str, str]:
    """Every column of an import with its type."""
    return {**COLUMNS, **{PREFIX + name: "int32" for name in drafters}}


def schema_id(drafters: tuple[str, ...]) -> str:
    """`sha256:<hex>` over version, names and types of the columns."""
    return digest_of(canonical_json([IMPORT_VERSION, [*columns_of(drafters).items()]]).encode())


def read_header(root: Path) -> ImportHeader:
    """Reads `import.json` strictly.

    Raises:
        TraceError: not the folder of an import that can be replayed.
        TraceSchemaError: another version, other columns or fields.
        TraceCorruptError: not the JSON that specctl writes.
    """
    path = root / HEADER_NAME
    if not path.is_file():
        raise TraceError(
            f"import folder {root}",
            expected=f"a folder with {HEADER_NAME}",
            found="another folder" if root.is_dir() else "no such folder",
            fix="name a folder that `specctl import` wrote from per-position acceptance",
        )
    content = path.read_bytes()
    header = _parse(path, content)
    if header.to_bytes() != content:
        raise _damaged(path, "other bytes")
    wanted = schema_id(tuple(header.drafters))
    if header.schema_id != wanted:
        raise _other_schema(path, f"schema {wanted[:19]}…", f"{header.schema_id[:19]}…")
    return header


def _parse(path: Path, content: bytes) -> ImportHeader:
    """The version is judged before the fields, which it governs."""
    try:
        value: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"{len(content)} bytes of something else") from error
    version = value.get("import_version") if isinstance(value, dict) else None
    if version != IMPORT_VERSION:
        raise _other_schema(path, f"import_version {IMPORT_VERSION}", repr(version)[:40])
    try:
        return ImportHeader.model_validate(value)
    except ValidationError as error:
        found = describe_violation(error)
        raise _other_schema(path, "the fields of docs/import.md", found) from error


def _damaged(path: Path, found: str) -> TraceCorruptError:
    return TraceCorruptError(
        str(path), expected="the JSON that specctl wrote", found=found, fix="import the file again"
    )


def _other_schema(path: Path, expected: str, found: str) -> TraceSchemaError:
    return TraceSchemaError(str(path), expected=expected, found=found, fix="import the file again")
