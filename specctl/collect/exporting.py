"""A trace set as plain tables, for tools that know nothing of commits."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from specctl.collect.files import segment_path
from specctl.collect.foreign import File, InspectionError, inspect_files
from specctl.collect.places import enclosing_set
from specctl.collect.reader import TraceSet
from specctl.durable import TRY_AGAIN, make_folder, output_errors, sync_file, sync_folder
from specctl.errors import OutputError, UsageError
from specctl.stores import is_store_url
from specctl.trace import TABLES, TOKEN_COLUMNS, token_mode


def export(traces: TraceSet, out: str | Path, *, format: str, tokens: str) -> list[Path]:
    """Writes one plain file a table: texts instead of dictionaries, all commits one after another.

    Args:
        out: a folder without files of these names.
        format: parquet or csv. tokens: keep or drop, of the ids as the set stores them.

    Raises:
        OutputError: it cannot be written, or holds such a file; then none is written or changed.
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
        _check_outside_sets(folder)
        make_folder(folder.absolute())
        paths = {table: folder / f"{table}.{format}" for table in TABLES}
        for path in paths.values():
            _check_absent(path)
        with ExitStack() as staged:
            written = [
                (staged.enter_context(_staged(traces, table, path, tokens)), path)
                for table, path in paths.items()
            ]
            for temporary, path in written:
                _place(temporary, path)
        return list(paths.values())


def lost_ids(traces: TraceSet, tokens: str) -> str | None:
    """A warning where token ids are asked for and the sets hold none; else None."""
    if tokens != "keep" or token_mode(traces.header.collect) != "drop":
        return None
    return "--tokens keep: the ids were dropped when this was collected; their columns are empty"


def _check_outside_sets(folder: Path) -> None:
    if enclosing_set(folder / "x") is not None:
        raise OutputError(
            f"export folder {folder}",
            expected="a folder outside of trace sets",
            found=f"one in {enclosing_set(folder / 'x')}",
            fix="choose another folder",
        )


def _check_word(option: str, found: str, *words: str) -> None:
    if found not in words:
        raise UsageError(option, expected=" or ".join(words), found=repr(found), fix="choose one")


def _check_absent(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise OutputError(
            f"export file {path}",
            expected="a name that is free",
            found="a file of this name",
            fix="remove it, or name another folder",
        )


def _place(temporary: Path, path: Path) -> None:
    """Gives a finished file its name. Not by a link: what is for other tools may be on any disk."""
    _check_absent(path)
    os.replace(temporary, path)
    sync_folder(path.parent.absolute())


@contextmanager
def _staged(traces: TraceSet, table: str, path: Path, tokens: str) -> Iterator[Path]:
    """A table in a temporary file beside its place, synced; removed in the end."""
    import polars as pl

    left_out = () if tokens == "keep" else TOKEN_COLUMNS[table]
    texts = pl.col(pl.Categorical).cast(pl.String)
    rows = traces.scan(table).drop(left_out).with_columns(texts)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with _sinking(traces, path):
            if path.suffix == ".csv":
                rows.sink_csv(temporary)
            else:
                rows.sink_parquet(temporary, compression="zstd")
        sync_file(temporary)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _sinking(traces: TraceSet, path: Path) -> Iterator[None]:
    """polars tells a full disk, and what it cannot decode, as errors of its own, much alike."""
    import polars as pl

    try:
        yield
    except (pl.exceptions.PolarsError, OSError) as error:
        _check_sources(traces)
        raise OutputError(
            f"export file {path}",
            expected="a place that can be written",
            found=getattr(error, "strerror", None) or str(error)[:200],
            fix=TRY_AGAIN,
        ) from error


def _check_sources(traces: TraceSet) -> None:
    """Refuses a file that cannot be read, behind an error that may be its fault."""
    files = [
        File(segment_path(log.place, segment), segment, log.place.at(segment.key))
        for log in traces.logs
        for segment in log.segments
    ]
    with suppress(InspectionError):  # the disk that is full
        inspect_files(files)
