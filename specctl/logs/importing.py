"""`specctl import`: any accepted file to a log to replay, or to a summary, and either in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.artifacts.describe import Description
from specctl.errors import UsageError
from specctl.logs.acceptance_lists import DRAFTER, read_acceptance
from specctl.logs.acceptance_summaries import (
    LOG_MARK,
    summarise_answers,
    summarise_counters,
    summarise_engine_log,
    summarise_requests,
)
from specctl.logs.import_lines import OnBytes, Row, Spot, json_objects, text_lines
from specctl.logs.imported_log import ImportedLog, publish_new, refuse_used, save_import
from specctl.records import canonical_json

ACCEPTANCE, ANSWERS = "specdecode-bench", "spec-bench"
REQUESTS, COUNTERS, ENGINE_LOG = "vllm-requests", "vllm-prometheus", "vllm-log"
FORMATS = ("auto", ACCEPTANCE, ANSWERS, REQUESTS, COUNTERS, ENGINE_LOG)
RECORDS: dict[str, Callable[[Row], bool]] = {
    ACCEPTANCE: lambda row: "generated_token_ids" in row and any(map(DRAFTER.fullmatch, row)),
    ANSWERS: lambda row: "question_id" in row and isinstance(row.get("choices"), list),
    REQUESTS: lambda row: (
        "num_spec_steps" in row
        or (isinstance(row.get("metrics"), dict) and "speculative_decoding" in row["metrics"])
    ),
}
"""Formats of JSON, and whether a record has their keys."""
SUMMARIES = {
    REQUESTS: summarise_requests,
    COUNTERS: summarise_counters,
    ENGINE_LOG: summarise_engine_log,
}
SUMMARY_NAME = "summary.json"
OWNERS = {
    "drafters": ("--drafter", ACCEPTANCE),
    "offered_depths": ("--offered-depth", ACCEPTANCE),
    "entry_predicts": ("--entry-predicts", ACCEPTANCE),
    "max_misaligned": ("--max-misaligned", ACCEPTANCE),
    "questions": ("--questions", ANSWERS),
}
"""The option of each field, and the one format that it belongs to."""


@dataclass(frozen=True)
class ImportOptions:
    """Settings for reading a file. All but `format` concern one format each.

    Attributes:
        drafters, offered_depths, entry_predicts, max_misaligned: of `specdecode-bench`; see
            `read_acceptance` and `save_import`. None for the default.
        questions: of `spec-bench`, the file with the categories.
    """

    format: str = "auto"
    drafters: tuple[str, ...] = ()
    offered_depths: Mapping[str, int] | None = None
    entry_predicts: str | None = None
    max_misaligned: float | None = None
    questions: Path | None = None


@dataclass(frozen=True)
class Imported:
    """The result of an import: `log` where it can be replayed, `summary` where not."""

    format: str
    log: ImportedLog | None = None
    summary: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        if self.log is None:
            return {"format": self.format, **(self.summary or {})}
        header = self.log.header.model_dump(mode="json")
        return {"format": self.format, "digest": self.log.digest, "header": header}


def import_file(
    source: str | Path,
    out: Path | None,
    options: ImportOptions = ImportOptions(),
    *,
    on_bytes: OnBytes | None = None,
) -> Imported:
    """Reads another tool's file; what it gives is written to `out`, whole or not at all.

    Args:
        out: a new or empty folder; needed for a log, optional for a summary.
        on_bytes: called with the bytes of each line read.

    Raises:
        UsageError: an option that does not fit the format. InputError: the file.
        OutputError: the folder.
    """
    path = Path(source)
    if out is not None:
        refuse_used(out)  # before minutes of reading
    if options.format not in FORMATS:
        raise UsageError(
            "--format",
            expected=f"one of {', '.join(FORMATS)}",
            found=repr(options.format),
            fix="name one of them",
        )
    format = detect_format(path) if options.format == "auto" else options.format
    for name, (flag, owner) in OWNERS.items():
        if owner != format and getattr(options, name) not in (None, ()):
            raise UsageError(
                flag, expected=f"a file of format {owner}", found=format, fix=f"leave {flag} out"
            )
    if format == ACCEPTANCE:
        return Imported(format, log=_import_log(path, out, options, on_bytes))
    if format == ANSWERS:
        summary = summarise_answers(path, questions=options.questions, on_bytes=on_bytes)
    else:
        summary = SUMMARIES[format](path, on_bytes=on_bytes)
    imported = Imported(format, summary=summary)
    if out is not None:
        content = canonical_json(imported.to_json()).encode()
        publish_new(out.absolute(), {SUMMARY_NAME: content}, lambda _: None)
    return imported


def detect_format(path: Path) -> str:
    """The format of a file, from its first record.

    Raises:
        InputError: none that is known, naming those that are.
    """
    spot, line = next(text_lines(path), (Spot(str(path), 1), ""))
    if line.startswith(("# HELP ", "# TYPE ", "vllm:")):  # as Prometheus writes
        return COUNTERS
    if not line.lstrip().startswith(("{", "[")) and any(
        LOG_MARK in text for _, text in text_lines(path)
    ):
        return ENGINE_LOG
    found = repr(line.strip()[:40]) if line else "an empty file"
    if line.lstrip().startswith(("{", "[")):
        spot, row = next(json_objects(path), (spot, {}))
        matching = [name for name, has_keys in RECORDS.items() if has_keys(row)]
        if len(matching) == 1:
            return matching[0]
        found = f"keys {sorted(row)[:8]} of {' and '.join(matching) or 'none'}"
    expected = f"a record of {', '.join(FORMATS[1:])}"
    raise spot.refuse(expected, found, "state the format with --format")


def _import_log(
    path: Path, out: Path | None, options: ImportOptions, on_bytes: OnBytes | None
) -> ImportedLog:
    if out is None:
        raise UsageError(
            "--out", expected="a folder for the traces", found="none", fix="state -o FOLDER"
        )
    reading: dict[str, Any] = {
        "entry_predicts": options.entry_predicts or "same",
        "max_misaligned": 0.01 if options.max_misaligned is None else options.max_misaligned,
    }
    table = read_acceptance(path, drafters=options.drafters, on_bytes=on_bytes, **reading)
    depths = options.offered_depths or {}
    return save_import(out, table, path, source_format=ACCEPTANCE, offered_depths=depths, **reading)


def parse_depths(text: str | None) -> dict[str, int] | None:
    """`eagle=5,ngram=20` to numbers by drafter.

    Raises:
        UsageError: anything else.
    """
    if text is None:
        return None
    parts = [part.strip().partition("=") for part in text.split(",")]
    if not all(name and value.isdecimal() and len(value) < 8 for name, _, value in parts):
        raise UsageError(
            "--offered-depth",
            expected="drafter=tokens, comma-separated",
            found=repr(text),
            fix="for example --offered-depth eagle=5,ngram=20",
        )
    return {name: int(value) for name, _, value in parts}


# ----------------------------------------------------------------- in words


def describe_summary(imported: Imported) -> tuple[Description, ...]:
    """A summary for a person: one description, or one for each model of a scrape."""
    summary = imported.summary or {}
    title, why_not = f"summary of {imported.format}", ("not replayed", summary["why_not_replayed"])
    if "by_category" in summary:
        groups = {"all": summary["all"], **summary["by_category"]}
        columns = (*_GROUP_COLUMNS, "τ pooled", "τ by question", "tokens/s")
        rows = tuple(
            (
                name,
                *(str(figures[f"num_{counted}"]) for counted in _GROUP_COLUMNS[1:]),
                f"{figures['mean_acceptance_length']:.3f}",
                f"{figures['mean_of_question_means']:.3f}",
                f"{figures['tokens_per_s']:.1f}",
            )
            for name, figures in groups.items()
        )
        return (Description(title, (why_not,), columns, rows),)
    return tuple(
        _describe_rates(f"{title} {name}".strip(), figures, why_not)
        for name, figures in summary.get("models", {"": summary}).items()
    )


_GROUP_COLUMNS = ("group", "questions", "rounds", "tokens")


def _describe_rates(title: str, figures: dict[str, Any], why_not: tuple[str, str]) -> Description:
    plain = {k: v for k, v in figures.items() if isinstance(v, int | float) and k != "replayable"}
    facts = tuple((name.removeprefix("num_"), f"{value:.6g}") for name, value in plain.items())
    sweep = figures.get("fixed_length_sweep")
    if not sweep:
        return Description(title, (*facts, why_not), _RATE_COLUMNS)
    by_position = zip(
        figures["marginal_prob"], figures["conditional_prob"], sweep["chains"], strict=True
    )
    rows = tuple(
        (
            str(index),
            f"{marginal:.4f}",
            "-" if conditional is None else f"{conditional:.4f}",
            f"{chain['mean_acceptance_length']:.3f}",
        )
        for index, (marginal, conditional, chain) in enumerate(by_position, start=1)
    )
    return Description(
        title, (*facts, ("fixed-length τ", sweep["basis"]), why_not), _RATE_COLUMNS, rows
    )


_RATE_COLUMNS = ("draft token", "marginal", "conditional", "τ if the chain ended here")
