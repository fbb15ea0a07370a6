"""`specctl import`: another tool's file or a server's metrics to a log to replay, or to a summary.

A summary says in two sentences what it means: `acceptance_figures.explain`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.artifacts.describe import Description
from specctl.errors import UsageError, check_choice
from specctl.formatting import number
from specctl.logs.acceptance_figures import ChainClock, explain, shown_range
from specctl.logs.acceptance_lists import DRAFTER, PREDICTS, read_acceptance
from specctl.logs.engine_summaries import (
    DECODE_MARK,
    LOG_MARK,
    SERVER_ARGS,
    SGLANG,
    THROUGHPUT,
    summarise_counters,
    summarise_engine_log,
    summarise_sglang_counters,
    summarise_sglang_log,
)
from specctl.logs.import_lines import OnBytes, Row, Spot, json_objects, text_lines
from specctl.logs.imported_log import ImportedLog, publish_new, refuse_used, save_import
from specctl.logs.response_summaries import (
    sglang_details,
    summarise_answers,
    summarise_requests,
    summarise_sglang_requests,
)
from specctl.logs.sources import Source
from specctl.records import canonical_json

ACCEPTANCE, ANSWERS = "specdecode-bench", "spec-bench"
REQUESTS, COUNTERS, ENGINE_LOG = "vllm-requests", "vllm-prometheus", "vllm-log"
SGLANG_REQUESTS, SGLANG_COUNTERS = "sglang-requests", "sglang-prometheus"
SGLANG_LOG = "sglang-log"
RECORDS: dict[str, Callable[[Row], bool]] = {
    ACCEPTANCE: lambda row: "generated_token_ids" in row and any(map(DRAFTER.fullmatch, row)),
    ANSWERS: lambda row: "question_id" in row and isinstance(row.get("choices"), list),
    REQUESTS: lambda row: (
        "num_spec_steps" in row
        or (isinstance(row.get("metrics"), dict) and "speculative_decoding" in row["metrics"])
    ),
    SGLANG_REQUESTS: lambda row: bool(sglang_details(row)),
}
"""Formats of JSON, and whether a record has their keys."""
LINES: dict[str, Callable[[str], bool]] = {
    COUNTERS: lambda line: line.startswith("vllm:"),
    SGLANG_COUNTERS: lambda line: line.startswith(SGLANG),
    ENGINE_LOG: lambda line: LOG_MARK in line or THROUGHPUT in line,
    SGLANG_LOG: lambda line: DECODE_MARK in line or SERVER_ARGS in line,
}
"""Formats of text, and whether a line is of theirs."""
SUMMARIES = {
    REQUESTS: summarise_requests,
    COUNTERS: summarise_counters,
    ENGINE_LOG: summarise_engine_log,
    SGLANG_REQUESTS: summarise_sglang_requests,
    SGLANG_COUNTERS: summarise_sglang_counters,
    SGLANG_LOG: summarise_sglang_log,
}
_JSON = re.compile(r"\s*(?:\{|\[\s*(?:\{|$))")
"""The beginning of JSON; a line of a log may begin with a time in brackets."""
FORMATS = ("auto", ACCEPTANCE, ANSWERS, *SUMMARIES)
SUMMARY_NAME = "summary.json"
OWNERS = {
    "drafters": ("--drafter", ACCEPTANCE),
    "offered_depths": ("--offered-depth", ACCEPTANCE),
    "entry_predicts": ("--entry-predicts", ACCEPTANCE),
    "max_misaligned": ("--max-misaligned", ACCEPTANCE),
    "questions": ("--questions", ANSWERS),
    "plain": ("--plain", ANSWERS),
}
"""The option of each field, and the one format that it belongs to."""


@dataclass(frozen=True)
class ImportOptions:
    """Settings for reading a file. All but `format` concern one format each.

    Attributes:
        drafters, offered_depths, entry_predicts, max_misaligned: of `specdecode-bench`; see
            `read_acceptance` and `save_import`. None for the default.
        questions: of `spec-bench`, the file with the categories. plain: of the same, the answers of
            plain decoding.

    Raises:
        UsageError: an unknown format or reading.
    """

    format: str = "auto"
    drafters: tuple[str, ...] = ()
    offered_depths: Mapping[str, int] | None = None
    entry_predicts: str | None = None
    max_misaligned: float | None = None
    questions: Path | None = None
    plain: Path | None = None

    def __post_init__(self) -> None:
        check_choice("--format", self.format, FORMATS)
        check_choice("--entry-predicts", self.entry_predicts or PREDICTS[0], PREDICTS)


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
    source: str | Path | Source,
    out: Path | None,
    options: ImportOptions = ImportOptions(),
    *,
    clock: ChainClock | None = None,
    load: str = "",
    on_bytes: OnBytes | None = None,
) -> Imported:
    """Reads another tool's file; what it gives is written to `out`, whole or not at all.

    Args:
        source: a file, or the address of a server's `/metrics`.
        out: a new or empty folder; needed for a log, optional for a summary.
        clock, load: of a cost model, for the best length of a summary; see `explain`.
        on_bytes: called with the bytes of each line read.

    Raises:
        UsageError: an option that does not fit the format. InputError: the source.
        OutputError: the folder.
    """
    text = source if isinstance(source, Source) else Source.of(source)
    if out is not None:
        refuse_used(out)  # before minutes of reading
    format = detect_format(text) if options.format == "auto" else options.format
    for name, (flag, owner) in OWNERS.items():
        if owner != format and getattr(options, name) not in (None, ()):
            raise UsageError(
                flag, expected=f"a file of format {owner}", found=format, fix=f"leave {flag} out"
            )
    if format == ACCEPTANCE:
        return Imported(format, log=_import_log(text, out, options, on_bytes))
    if format == ANSWERS:
        files = {"questions": options.questions, "plain": options.plain}
        summary = summarise_answers(text, **files, on_bytes=on_bytes)
        summary["all"] = explain(summary["all"], clock, load)
    else:
        summary = SUMMARIES[format](text, on_bytes=on_bytes)
        models = summary.get("models")
        if models is None:
            summary = explain(summary, clock, load)
        else:
            summary["models"] = {name: explain(models[name], clock, load) for name in models}
    imported = Imported(format, summary=summary)
    if out is not None:
        content = canonical_json(imported.to_json()).encode()
        publish_new(out.absolute(), {SUMMARY_NAME: content}, lambda _: None)
    return imported


def detect_format(source: Source) -> str:
    """The format of a text: JSON by its first record, other text by all of its lines.

    Raises:
        InputError: none that is known, naming those that are; lines of several.
    """
    spot, line = next(text_lines(source), (Spot(source.name, 1), ""))
    if _JSON.match(line):
        spot, row = next(json_objects(source))
        matching = [name for name, has_keys in RECORDS.items() if has_keys(row)]
        found = f"keys {sorted(row)[:8]} of {' and '.join(matching) or 'none'}"
    else:
        seen: dict[str, Spot] = {}
        for at, text in text_lines(source):
            for name, is_its in LINES.items():
                if name not in seen and is_its(text):
                    seen[name] = at
        if len(seen) > 1:
            first, second = list(seen)[:2]
            what = f"lines of {first}, and here of {second}"
            raise seen[second].refuse("lines of one server", what, "give each server's alone")
        matching, found = list(seen), repr(line.strip()[:40]) if line else "an empty file"
    if len(matching) == 1:
        return matching[0]
    expected = f"a record of {', '.join(FORMATS[1:])}"
    raise spot.refuse(expected, found, "state the format with --format")


def _import_log(
    source: Source, out: Path | None, options: ImportOptions, on_bytes: OnBytes | None
) -> ImportedLog:
    if out is None:
        raise UsageError(
            "--out", expected="a folder for the traces", found="none", fix="state -o FOLDER"
        )
    if source.content is not None:
        raise UsageError(
            "--format", expected="a file", found=source.name, fix="save it, and name the file"
        )
    path = Path(source.name)
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


def describe_summary(imported: Imported) -> list[Any]:
    """A summary for a person: figures and two sentences, for each model of a scrape."""
    summary = imported.summary or {}
    title, why_not = f"summary of {imported.format}", ("not replayed", summary["why_not_replayed"])
    if "by_category" in summary:
        groups = {"all": summary["all"], **summary["by_category"]}
        speed_ups = [name for name in _SPEED_UPS if name in summary["all"]]
        counts = _COUNTS[:1] if speed_ups else _COUNTS  # all would not fit a terminal
        heads = [*counts, "τ pooled", *([] if speed_ups else ["τ by question"]), "tokens/s"]
        columns = ("group", *heads, *(_SPEED_UPS[name] for name in speed_ups))
        rows = tuple(
            (
                name,
                *(str(figures[f"num_{counted}"]) for counted in counts),
                f"{figures['mean_acceptance_length']:.3f}",
                *([] if speed_ups else [f"{figures['mean_of_question_means']:.3f}"]),
                f"{figures['tokens_per_s']:.1f}",
                *(number(figures.get(speed_up)) for speed_up in speed_ups),
            )
            for name, figures in groups.items()
        )
        return [Description(title, (why_not,), columns, rows), *summary["all"]["meaning"]]
    parts: list[Any] = []
    for name, figures in summary.get("models", {"": summary}).items():
        parts.append(_describe_rates(f"{title} {name}".strip(), figures, why_not))
        parts += figures["meaning"]
    return parts


_COUNTS = ("questions", "rounds", "tokens")
_SPEED_UPS = {"speed_up": "×", "speed_up_of_mean_rates": "× of means"}
"""Of `--plain`: Σ tokens / Σ time over its own, and as `speed.py` of Spec-Bench has it."""


def _describe_rates(title: str, figures: dict[str, Any], why_not: tuple[str, str]) -> Description:
    plain = {k: v for k, v in figures.items() if isinstance(v, int | float) and k != "replayable"}
    facts = tuple((name.removeprefix("num_"), f"{value:.6g}") for name, value in plain.items())
    sweep = figures["fixed_length_sweep"]
    if sweep is None:
        return Description(title, (*facts, why_not))
    unknown = [None] * len(sweep["chains"])
    by_position = zip(
        figures.get("marginal_prob", unknown),
        figures.get("conditional_prob", unknown),
        sweep["chains"],
        strict=True,
    )
    rows = tuple(
        (
            str(chain["num_draft_tokens"]),
            *("-" if share is None else f"{share:.4f}" for share in shares),
            shown_range(chain["mean_acceptance_length_range"], ".3f"),
        )
        for *shares, chain in by_position
    )
    how = ", ".join(filter(None, (sweep["if_chains"], sweep["basis"])))
    return Description(title, (*facts, ("fixed-length τ", how), why_not), _RATE_COLUMNS, rows)


_RATE_COLUMNS = ("draft token", "marginal", "conditional", "τ if the chain ended here")
