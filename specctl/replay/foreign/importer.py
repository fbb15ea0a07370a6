"""Any accepted file to what it can give: traces to replay, or a summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.errors import InputError, UsageError
from specctl.policy.parse import canonical_json
from specctl.replay.foreign.folder import publish_new, refuse_used
from specctl.replay.foreign.lines import OnBytes, Spot, json_objects, text_lines
from specctl.replay.foreign.prometheus import is_metrics, summarise_counters
from specctl.replay.foreign.spec_bench import is_answer, summarise_answers
from specctl.replay.foreign.specdecode_bench import is_acceptance, read_acceptance
from specctl.replay.foreign.traces import ImportedTraces, save_traces
from specctl.replay.foreign.vllm_requests import is_response, summarise_requests

ACCEPTANCE, ANSWERS, REQUESTS, COUNTERS = (
    "specdecode-bench",
    "spec-bench",
    "vllm-requests",
    "vllm-prometheus",
)
FORMATS = ("auto", ACCEPTANCE, ANSWERS, REQUESTS, COUNTERS)
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
    """How to read a file. All but `format` concern one format each and are refused elsewhere.

    Attributes:
        drafters, offered_depths, entry_predicts, max_misaligned: of `specdecode-bench`; see
            `read_acceptance` and `save_traces`. None for the default.
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
    """What an import gave: `traces` where it can be replayed, `summary` where not."""

    format: str
    traces: ImportedTraces | None = None
    summary: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        if self.traces is None:
            return {"format": self.format, **(self.summary or {})}
        header = self.traces.header.model_dump(mode="json")
        return {"format": self.format, "digest": self.traces.digest, "header": header}


def import_file(
    source: str | Path,
    out: Path | None,
    options: ImportOptions = ImportOptions(),
    *,
    on_bytes: OnBytes | None = None,
) -> Imported:
    """Reads a foreign file; what it gives is written to `out`, whole or not at all.

    Args:
        out: a new or empty folder; needed for traces, optional for a summary.
        on_bytes: called with the bytes of each line read.

    Raises:
        UsageError: an option that does not fit the format. InputError: the file.
        OutputError: the folder.
    """
    path = Path(source)
    if out is not None:
        refuse_used(out)  # before minutes of reading
    format = _format(path, options.format)
    _check_options(format, options, out)
    if format == ACCEPTANCE:
        return Imported(format, traces=_import_traces(path, out, options, on_bytes))
    imported = Imported(format, summary=_summarise(path, format, options, on_bytes))
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
    if is_metrics(line):
        return COUNTERS
    if not line.lstrip().startswith(("{", "[")):
        raise _unknown(spot, repr(line.strip()[:40]) if line else "an empty file")
    spot, row = next(json_objects(path), (spot, {}))
    tests = {ACCEPTANCE: is_acceptance, ANSWERS: is_answer, REQUESTS: is_response}
    matching = [name for name, test in tests.items() if test(row)]
    if len(matching) != 1:
        raise _unknown(spot, f"keys {sorted(row)[:8]} of {' and '.join(matching) or 'none'}")
    return matching[0]


def _format(path: Path, stated: str) -> str:
    if stated not in FORMATS:
        raise UsageError(
            "--format",
            expected=f"one of {', '.join(FORMATS)}",
            found=repr(stated),
            fix="name one of them",
        )
    return detect_format(path) if stated == "auto" else stated


def _unknown(spot: Spot, found: str) -> InputError:
    return spot.refuse(
        f"a record of {', '.join(FORMATS[1:])}", found, "state the format with --format"
    )


def _check_options(format: str, options: ImportOptions, out: Path | None) -> None:
    """An option of another format would be ignored in silence."""
    for name, (flag, owner) in OWNERS.items():
        if owner != format and getattr(options, name) not in (None, ()):
            raise UsageError(
                flag, expected=f"a file of format {owner}", found=format, fix=f"leave {flag} out"
            )
    if format == ACCEPTANCE and out is None:
        raise UsageError(
            "--out", expected="a folder for the traces", found="none", fix="state -o FOLDER"
        )


def _import_traces(
    path: Path, out: Path | None, options: ImportOptions, on_bytes: OnBytes | None
) -> ImportedTraces:
    assert out is not None, "the options were checked"
    reading: dict[str, Any] = {
        "entry_predicts": options.entry_predicts or "same",
        "max_misaligned": 0.01 if options.max_misaligned is None else options.max_misaligned,
    }
    table = read_acceptance(path, drafters=options.drafters, on_bytes=on_bytes, **reading)
    depths = options.offered_depths or {}
    return save_traces(out, table, path, source_format=ACCEPTANCE, offered_depths=depths, **reading)


def _summarise(
    path: Path, format: str, options: ImportOptions, on_bytes: OnBytes | None
) -> dict[str, Any]:
    if format == ANSWERS:
        return summarise_answers(path, questions=options.questions, on_bytes=on_bytes)
    if format == REQUESTS:
        return summarise_requests(path, on_bytes=on_bytes)
    return summarise_counters(path, on_bytes=on_bytes)


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
