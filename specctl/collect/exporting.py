"""A trace set as plain tables, for tools that know nothing of commits."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specctl.collect.reader import TraceSet
from specctl.durable import TRY_AGAIN, make_folder, output_errors, sync_file, sync_folder
from specctl.errors import OutputError, UsageError
from specctl.stores import is_store_url
from specctl.trace import TABLES, TOKEN_COLUMNS


def export(traces: TraceSet, out: str | Path, *, format: str, tokens: str) -> list[Path]:
    """Writes one plain file a table: texts instead of dictionaries, all commits one after another.

    Args:
        out: a folder; files of these names in it are replaced.
        format: parquet or csv. tokens: keep or drop, of the ids as the set stores them.

    Raises:
        OutputError: it cannot be written.
        UsageError: another format, another word for `tokens`, or a URL.
    """
    if is_store_url(str(out)):
        raise UsageError(
            "--out", expected="a local folder", found=repr(str(out)), fix="export, then upload it"
        )
    folder = Path(out)
    _check_word("--format", format, "parquet", "csv")
    _check_word("--tokens", tokens, "keep", "drop")
    with output_errors(folder, "export folder"):
        make_folder(folder.absolute())
        return [
            _export(traces, table, folder / f"{table}.{format}", with_tokens=tokens == "keep")
            for table in TABLES
        ]


def _check_word(option: str, found: str, *words: str) -> None:
    if found not in words:
        raise UsageError(option, expected=" or ".join(words), found=repr(found), fix="choose one")


def _export(traces: TraceSet, table: str, path: Path, *, with_tokens: bool) -> Path:
    """Whole under its name, or not there."""
    import polars as pl

    left_out = () if with_tokens else TOKEN_COLUMNS[table]
    texts = pl.col(pl.Categorical).cast(pl.String)
    rows = traces.scan(table).drop(left_out).with_columns(texts)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with _sinking(path):
            if path.suffix == ".csv":
                rows.sink_csv(temporary)
            else:
                rows.sink_parquet(temporary, compression="zstd")
        sync_file(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent.absolute())
    return path


@contextmanager
def _sinking(path: Path) -> Iterator[None]:
    """polars tells a full disk as an error of its own; what it reads was checked before."""
    import polars as pl

    try:
        yield
    except (pl.exceptions.PolarsError, OSError) as error:
        raise OutputError(
            f"export file {path}",
            expected="a place that can be written",
            found=getattr(error, "strerror", None) or str(error)[:200],
            fix=TRY_AGAIN,
        ) from error
