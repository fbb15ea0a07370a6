"""Token ids in a trace set: kept, or left out (docs/trace-format.md, "Token ids")."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal

from specctl.collect.prompts import Prompt
from specctl.records import canonical_json
from specctl.trace import TOKEN_COLUMNS, arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

TokenMode = Literal["keep", "drop"]


def token_header(mode: TokenMode) -> dict[str, Any]:
    """The entry in `header.collect`; nothing where tokens are kept."""
    return {} if mode == "keep" else {"tokens": {"mode": mode}}


def without_tokens(table: str, rows: pa.Table) -> pa.Table:
    """Rows whose token columns are null."""
    import pyarrow as pa

    rows = rows.cast(arrow_schema(table))
    for name in TOKEN_COLUMNS[table]:
        index = rows.schema.get_field_index(name)
        rows = rows.set_column(index, rows.schema.field(index), pa.nulls(len(rows), pa.int32()))
    return rows


def text_digest(prompt: Prompt) -> str:
    """Of a prompt's text and how it is decoded, so that `--resume` notices another text."""
    text = canonical_json({"chat": prompt.chat, "turns": list(prompt.turns)}).encode()
    return "sha256:" + hashlib.sha256(text).hexdigest()
