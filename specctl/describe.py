"""`specctl show`: describes artifacts, traces, exports and results, by the content of a place."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from specctl.artifacts.card import Description, describe_artifact
from specctl.artifacts.files import MAX_BYTES, kind_of
from specctl.console import Answer
from specctl.errors import InputError, ModelError, StoreError, TraceError
from specctl.formatting import Table, count, sampling
from specctl.logs.parquet import collected
from specctl.registry.names import split_reference
from specctl.registry.opening import is_registry
from specctl.runtime.checkpoints import WORDS, architecture
from specctl.runtime.checkpoints import kind_of as model_kind
from specctl.runtime.gguf import is_gguf
from specctl.runtime.identity import read_config
from specctl.runtime.references import artifact_at
from specctl.stores import is_store_url


def describe_named(what: str) -> Answer:
    """Describes a folder, a trace set in a bucket, a snapshot, or an artifact of a registry.

    Raises:
        InputError: none of these.
        ArtifactError, TraceError: damage.
        RegistryError: an artifact that the registry does not give out.
    """
    from specctl.logs.trace_files import split_reference as split_snapshot

    named, path = split_reference(what), Path(what)
    if named is not None:
        registry, reference = named
        # A snapshot of traces in a bucket looks like the digest of an artifact.
        is_digest = reference.digest is not None
        if reference.alias is not None or (is_digest and is_registry(registry)):
            return _artifact(what)
    place, snapshot = split_snapshot(what)
    digits = what.rpartition("@sha256:")[2]
    if digits != what and not re.fullmatch(r"[0-9a-f]{64}", digits) and not path.exists():
        raise InputError(
            f"{what}: the digest has {len(digits)} characters after @sha256:, not 64 hex digits",
            hint="give the whole digest",
        )
    if is_store_url(place):
        return _bucket(what, place)
    if snapshot is not None or (path / "trace.json").is_file():
        return _traces(what)
    if is_gguf(path) or _is_model(path / "config.json"):
        return _model(path)
    if (path / "config.json").is_file():
        return _artifact(str(path))
    if (result := _result(path)) is not None:
        return result
    if path.name in PARTS and any((path.parent / name).is_file() for name in WHOLES):
        return describe_named(str(path.parent))
    if path.exists():
        return _exported(path)
    raise _unknown(what, "no folder" if named is None else "a name without its version")


def _bucket(what: str, place: str) -> Answer:
    """A trace set by its URL; the error names a registry, or a name in one, as such."""
    try:
        return _traces(what)
    except (TraceError, StoreError):
        above = place.rpartition("/")[0]
        if not is_registry(place) and not (is_store_url(above) and is_registry(above)):
            raise
    raise _unknown(what, "a registry, or a name in one without its version")


WHOLES = ("config.json", "trace.json", "results.json")
"""Files that mark an artifact, a trace set and the folder of `run`."""
PARTS = (*MAX_BYTES, "trace.json", "run.json")
"""Files that say nothing without their folder."""
RESULTS = (
    "recalibration.json",  # before the search of a better policy
    "tune.json",
    "ladder.json",
    "results.json",
    "replay.json",
    "drift.json",
    "summary.json",
    "cost_model.json",
    "runs.json",
)
"""Files of results, in the folders that verbs write."""


def _result(path: Path) -> Answer | None:
    """A file of a verb, in the words of that verb, or a named clock; None of another file."""
    from specctl.replay.cost.files import clock_names, load_cost_model

    file = next((path / name for name in RESULTS if (path / name).is_file()), path)
    data: Any = {"cost_model_version": 1} if str(path) in clock_names() else None
    with suppress(OSError, ValueError, RecursionError):
        data = json.loads(file.read_bytes())
    if isinstance(data, list) and data and all("tokens_per_s" in one for one in data):
        from specctl.cli.running import comparison_table

        return Answer(data, [comparison_table(data, str(file))])
    facts = data if isinstance(data, dict) else {}
    if "cost_model_version" in facts:
        model = load_cost_model(file)
        return Answer(model.model_dump(mode="json"), cost_in_words(model))
    parts = _result_in_words(file, facts)
    return None if parts is None else Answer(facts, parts)


def _result_in_words(file: Path, facts: dict[str, Any]) -> list[Any] | None:
    from specctl.replay.facts import read_result

    kind = facts.get("kind")
    if kind == "tune":
        from specctl.replay.tune.verdict import TuneResult, tune_parts

        return tune_parts(read_result(file, TuneResult, "specctl tune"))
    if kind == "ladder":
        from specctl.replay.ladder.result import LadderResult, ladder_parts

        return ladder_parts(read_result(file, LadderResult, "specctl ladder"))
    if kind in ("replay", "replay-serving", "replay-batch"):
        from specctl.replay import results

        record, words = results.KINDS[kind]
        return words(read_result(file, record, "specctl replay")).shown()
    if kind == "drift":
        from specctl.watch.drift import DriftScores

        return read_result(file, DriftScores, "specctl drift").shown()
    if kind == "recalibrate":
        from specctl.watch.recalibrate import recalibration_parts

        return recalibration_parts(facts)
    if "runs_version" in facts:
        found = [path.read_bytes().count(b"\n") for path in file.parent.glob("*.jsonl")]
        answers = f"{count(sum(found), 'answer')} in {count(len(found), 'file')}, one a policy"
        return [f"{answers}: the same `specctl fit` goes on with them by --resume"]
    if kind == "import":
        from specctl.cli.imported import describe_summary

        return describe_summary(facts)
    return None


def cost_in_words(model: Any) -> list[Any]:
    """The parts of a cost model of any kind."""
    from specctl.replay.cost.engine import render_engine
    from specctl.replay.cost.model import TableCost
    from specctl.replay.cost.rates import EngineCost

    if isinstance(model, TableCost):
        from specctl.replay.cost.profile import render

        return render(model)
    if isinstance(model, EngineCost):
        return render_engine(model)
    rates = [(name, f"{us:g}") for name, us in model if name.endswith("_us")]
    return [Table(model.source, ("rate", "us"), rates)]


def _is_model(config: Path) -> bool:
    with suppress(ModelError):  # an artifact's reader has the words for it
        marks = {"architectures", "model_type", "speculators_model_type", "transformers_version"}
        return config.is_file() and bool(marks & read_config(config).keys())
    return False


def _model(path: Path) -> Answer:
    """A target or drafter, by its kind."""
    kind, named = model_kind(path), architecture(path)
    of = f", {named}" if named else ""
    advice = f"`specctl doctor TARGET {path}` says how it is read"
    facts = {"path": str(path), "kind": kind, "architecture": named}
    return Answer(facts, [f"{path} is {WORDS[kind]}{of}; {advice}"])


def _exported(path: Path) -> Answer:
    """A file of `specctl export`, or a folder of them."""
    from specctl.engines.engine import label_of
    from specctl.engines.export import read_exported

    found = read_exported(path)
    if not found:
        other = "a file of another kind"
        raise _unknown(str(path), kind_of(os.listdir(path)) if path.is_dir() else other)
    data = {engine.name: policy.model_dump(mode="json") for engine, policy in found}
    return Answer(data, [f"{engine.title}: {label_of(policy)}" for engine, policy in found])


def _unknown(what: str, found: str) -> InputError:
    return InputError(
        f"{what} is {found}; show takes an artifact, traces, a model, what a verb wrote, or "
        "PLACE/NAME@ALIAS of a registry",
        hint="`specctl registry show NAME --registry PLACE` has the versions of a name"
        if "@" in what or split_reference(what) is not None or is_registry(what)
        else "check the path",
    )


def _artifact(what: str) -> Answer:
    artifact = artifact_at(what, None)
    data = {"digest": artifact.digest, "manifest": artifact.manifest.model_dump(mode="json")}
    return Answer(data, [describe_artifact(artifact)])


def _traces(reference: str) -> Answer:
    from specctl.logs.trace_set import TraceSet

    traces = TraceSet.open(reference)
    header, summary = traces.header, traces.summary()
    collected = header.collect
    is_dense = "dense" in collected
    engine: Any = collected.get("engine")
    shape = _in_words(header.policy["shape"])
    kind = f"dense, {shape}" if is_dense else f"live, {shape}"
    rows = count(summary["num_rounds"], "position" if is_dense else "round")
    facts = (
        *([("engine", f"{engine['name']} {engine['version']}")] if engine else []),
        ("target", f"{collected.get('target', 'not named')}  {header.target_digest}"),
        ("drafter", f"{collected.get('drafter', 'not named')}  {header.drafter_digest}"),
        ("sampling", f"{sampling(header.sampling)}, seed {header.sampling.get('seed', 0)}"),
        *_counts(summary, is_dense=is_dense),
    )
    columns, by_category, legend = _by_category(traces)
    description = Description(
        f"traces {traces.digest}",
        facts,
        columns,
        by_category,
        verdict=f"{count(summary['num_prompts'], 'prompt')}, {rows}; {kind}",
        details=(
            ("tokenizer", header.tokenizer_digest),
            *((name.removeprefix("num_"), f"{summary[name]:,}") for name in STORED),
        ),
        legend=legend,
    )
    data = {"digest": traces.digest, "header": header.model_dump(mode="json"), "summary": summary}
    return Answer(data, [description])


def _in_words(shape: Any) -> str:
    """`full: depth 5, top_k 4`, without unset fields."""
    settings = [
        f"{name} {value}"
        for name, value in shape.items()
        if value is not None and not isinstance(value, bool)
    ]
    return f"{shape['kind']}: {', '.join(settings)}".replace(f"kind {shape['kind']}, ", "", 1)


STORED = ("num_segments", "num_requests", "num_repeats", "size_bytes")
"""Counts of a trace set that say how it is stored."""


def _counts(summary: dict[str, Any], *, is_dense: bool) -> tuple[tuple[str, str], ...]:
    """The counts in words, without sums of tokens over dense positions, which overlap."""
    left_out = {"num_prompts", "num_rounds", *STORED}
    left_out |= {"num_emitted", "num_accepted"} if is_dense else set()
    notes = {"num_emitted": " tokens, the first of each request not counted: no round drafted it"}
    return tuple(
        (name.removeprefix("num_"), f"{value:,}{notes.get(name, '')}")
        for name, value in summary.items()
        if name not in left_out
    )


def _by_category(traces: Any) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], str]:
    """Columns, rows and legend by category: results of rounds, or how far dense trees follow the
    text."""
    import polars as pl

    is_dense = "dense" in traces.header.collect
    rows = collected(
        traces.scan("rounds")
        .group_by(pl.col("category").cast(pl.String))
        .agg(
            pl.col("prompt_id").n_unique().alias("prompts"),
            pl.len().alias("rounds"),
            pl.col("num_accepted").mean().alias("accepted"),
            pl.col("fully_accepted").mean().alias("full"),
        )
        .sort("category")
    ).iter_rows()
    heads = ("positions", "accepted", "whole path") if is_dense else ("rounds", "τ", "whole path")
    cells = [
        (
            category or "-",
            str(prompts),
            str(rounds),
            f"{accepted + (not is_dense):.2f}",
            f"{full:.0%}",
        )
        for category, prompts, rounds, accepted, full in rows
    ]
    legend = "whole path: accepted to the last level of the tree"
    if is_dense:
        legend = f"accepted: draft tokens of the text that the tree holds, mean; {legend}"
    return ("category", "prompts", *heads), tuple(cells), legend
