"""`specctl show`: an artifact, a trace set or an import, told apart by what the folder holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.artifacts.codec import load_artifact
from specctl.artifacts.describe import Description, describe_artifact, render
from specctl.errors import InputError


@dataclass(frozen=True)
class Shown:
    """A description for a person and its data for a script."""

    description: Description
    data: dict[str, Any]

    def render(self) -> Any:
        return render(self.description)

    def to_json(self) -> dict[str, Any]:
        return self.data


def describe_named(what: str) -> Shown:
    """Describes what a user names: a folder, a trace set in a bucket, or a snapshot of one.

    Raises:
        InputError: none of the three; ArtifactError or TraceError if damaged.
    """
    from specctl.collect.places import split_reference
    from specctl.stores import is_store_url

    place, snapshot = split_reference(what)
    if snapshot is not None or is_store_url(place):
        return _traces(what)
    return _folder(Path(what))


def _folder(path: Path) -> Shown:
    if (path / "trace.json").is_file():
        return _traces(str(path))
    if (path / "import.json").is_file():
        return _import(path)
    if (path / "config.json").is_file():
        artifact = load_artifact(path)
        data = {"digest": artifact.digest, "manifest": artifact.manifest.model_dump(mode="json")}
        return Shown(describe_artifact(artifact), data)
    raise InputError(
        str(path),
        expected="the folder of an artifact (config.json), of traces (trace.json) or of an import "
        "(import.json)",
        found="a folder without" if path.is_dir() else "no folder",
        fix="check the path",
    )


def _traces(reference: str) -> Shown:
    from specctl.collect.reader import TraceSet

    traces = TraceSet.open(reference)
    header, summary = traces.header, traces.summary()
    collected = header.collect
    facts = (
        ("target", f"{collected.get('target')}  {header.target_digest}"),
        ("drafter", f"{collected.get('drafter')}  {header.drafter_digest}"),
        ("tokenizer", header.tokenizer_digest),
        ("policy", f"{header.policy['shape']}"),
        ("sampling", f"{header.sampling}"),
        *_counts(summary, is_dense="dense" in collected),
    )
    columns, by_category = _by_category(traces)
    description = Description(f"traces {traces.digest}", facts, columns, by_category)
    data = {"digest": traces.digest, "header": header.model_dump(mode="json"), "summary": summary}
    return Shown(description, data)


def _import(path: Path) -> Shown:
    from specctl.replay.foreign.describe import describe_traces
    from specctl.replay.foreign.traces import ImportedTraces

    traces = ImportedTraces.open(path)
    data = {"digest": traces.digest, "header": traces.header.model_dump(mode="json")}
    return Shown(describe_traces(traces), data)


def _counts(summary: dict[str, Any], *, is_dense: bool) -> tuple[tuple[str, str], ...]:
    """What was counted, in words; positions overlap, so of them no tokens are summed."""
    left_out = ("num_emitted", "num_accepted") if is_dense else ()
    words = {"num_rounds": "positions"} if is_dense else {}
    return tuple(
        (words.get(name, name.removeprefix("num_")), f"{value}")
        for name, value in summary.items()
        if name not in left_out
    )


def _by_category(traces: Any) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Columns and rows: what rounds did, or how far the logged trees follow the text."""
    import polars as pl

    is_dense = "dense" in traces.header.collect
    rows = (
        traces.scan("rounds")
        .group_by(pl.col("category").cast(pl.String))
        .agg(
            pl.col("prompt_id").n_unique().alias("prompts"),
            pl.len().alias("rounds"),
            pl.col("num_accepted").mean().alias("accepted"),
            pl.col("fully_accepted").mean().alias("full"),
            pl.col("tcr").mean().alias("tcr"),
        )
        .sort("category")
        .collect()
        .iter_rows()
    )
    if is_dense:
        columns = ("category", "prompts", "positions", "mean path", "to full depth")
        return columns, tuple((*_head(row), f"{row[3]:.2f}", f"{row[4]:.0%}") for row in rows)
    columns = ("category", "prompts", "rounds", "τ", "fully accepted", "mean TCR")
    return columns, tuple(
        (
            *_head(row),
            f"{1 + row[3]:.2f}",
            f"{row[4]:.0%}",
            "-" if row[5] is None else f"{row[5]:.1f}",
        )
        for row in rows
    )


def _head(row: tuple[Any, ...]) -> tuple[str, str, str]:
    category, prompts, rounds = row[:3]
    return category or "-", str(prompts), str(rounds)
