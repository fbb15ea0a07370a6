"""A trace set as plain tables, for tools that want one file a table."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from specctl.durable import TRY_AGAIN, make_folder, output_errors, sync_file, sync_folder
from specctl.errors import OutputError, UsageError, check_choice
from specctl.logs.parquet import read_batches
from specctl.logs.trace_files import enclosing_set
from specctl.logs.trace_set import TraceSet
from specctl.stores import is_store_url
from specctl.trace import TABLES, TOKEN_COLUMNS


def export(traces: TraceSet, out: str | Path, *, format: str, tokens: str) -> list[Path]:
    """Writes one file a table: texts instead of dictionaries, all segments one after another.

    Args:
        out: a folder without files of these names.
        format: parquet or csv. tokens: keep or drop, of the ids as the set stores them.

    Raises:
        OutputError: it cannot be written, or holds such a file; then none is written or changed.
        UsageError: another format, another word for `tokens`, or a URL.
        TraceCorruptError: a source that cannot be decoded.
    """
    if is_store_url(str(out)):
        raise UsageError(
            "--out", expected="a local folder", found=repr(str(out)), fix="export, then upload it"
        )
    folder, choices = Path(out), {"--format": ("parquet", "csv"), "--tokens": ("keep", "drop")}
    for (option, words), found in zip(choices.items(), (format, tokens), strict=True):
        check_choice(option, found, words)
    with output_errors(folder, "export folder"):
        above = enclosing_set(folder / "x")
        if above is not None:
            raise OutputError(
                f"export folder {folder}",
                expected="a folder outside of trace sets",
                found=f"one in {above}",
                fix="choose another folder",
            )
        make_folder(folder.absolute())
        paths = {table: folder / f"{table}.{format}" for table in TABLES}
        _check_absent(paths.values())
        with ExitStack() as stack:
            staged = [
                stack.enter_context(_staged(traces, table, path, tokens))
                for table, path in paths.items()
            ]
            _check_absent(paths.values())
            for temporary, path in zip(staged, paths.values(), strict=True):
                os.replace(temporary, path)  # no link: other tools' files may be on any disk
            sync_folder(folder.absolute())
        return list(paths.values())


def _check_absent(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.exists() or path.is_symlink():
            raise OutputError(
                f"export file {path}",
                expected="a name that is free",
                found="a file of this name",
                fix="remove it, or name another folder",
            )


@contextmanager
def _staged(traces: TraceSet, table: str, path: Path, tokens: str) -> Iterator[Path]:
    """A table in a temporary file beside its place, synced; removed in the end."""
    import polars as pl

    left_out = () if tokens == "keep" else TOKEN_COLUMNS[table]
    texts = pl.col(pl.Categorical).cast(pl.String)
    rows = traces.scan(table).drop(left_out).with_columns(texts)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        try:
            if path.suffix == ".csv":
                rows.sink_csv(temporary)
            else:
                rows.sink_parquet(temporary, compression="zstd")
        except (pl.exceptions.PolarsError, OSError) as error:
            # polars says a full disk and a file that it cannot decode much alike.
            for files in traces.segment_files():
                for name, source in files.items():
                    for _ in read_batches(source, [c.name for c in TABLES[name]], 1 << 16):
                        pass
            raise OutputError(
                f"export file {path}",
                expected="a place that can be written",
                found=getattr(error, "strerror", None) or str(error)[:200],
                fix=TRY_AGAIN,
            ) from error
        sync_file(temporary)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
