"""SpecDecode-Bench's per-position acceptance: one JSON object a request.

Keys `id`, `prompt_token_ids`, `generated_token_ids`, and for each drafter `acc_<name>` with
`acc_len` (or the list itself; one unnamed drafter is `acc`), as `request.py` of
github.com/SpecDecode-Bench/simulator reads them; `category` may stand beside them. The format
says nothing of how many tokens were drafted, so that is stated by who imports, or inferred.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from specctl.errors import InputError, UsageError
from specctl.logs.positions import Longs
from specctl.replay.foreign.align import KINDS, PREDICTS, Aligned, align
from specctl.replay.foreign.lines import (
    OnBytes,
    Row,
    Spot,
    counts_of,
    json_objects,
    kind_of,
    text_of,
)
from specctl.replay.foreign.table import (
    AcceptanceTable,
    DrafterReport,
    ReportBuilder,
    TableBuilder,
)

_DRAFTER = re.compile(r"acc(?:_(?P<name>[A-Za-z0-9_]{1,64}))?")


def read_acceptance(
    path: Path,
    *,
    drafters: tuple[str, ...] = (),
    entry_predicts: str = "same",
    max_misaligned: float = 0.01,
    on_bytes: OnBytes | None = None,
) -> AcceptanceTable:
    """Reads and aligns a file.

    Args:
        drafters: names after `acc_` to read; none for all of the first line. Every line must
            hold them: positions are those that all their lists cover.
        entry_predicts: `same` or `next`, see `align.PREDICTS`.
        max_misaligned: largest share of a drafter's entries that may be misaligned.

    Raises:
        InputError: a malformed line, by its number; a request twice; too much misaligned.
        UsageError: an option out of range, or a drafter that the file lacks.
    """
    _check_options(entry_predicts, max_misaligned)
    names, builder, first = drafters, TableBuilder(drafters), dict[str, Spot]()
    reports = {name: ReportBuilder() for name in drafters}
    for spot, row in json_objects(path, on_bytes):
        if not names:
            names = _drafters_of(row, spot)
            builder, reports = TableBuilder(names), {name: ReportBuilder() for name in names}
        request_id = _unused_id(row, spot, first)
        _add(row, spot, request_id, names, entry_predicts, builder, reports)
    table = builder.build({name: report.build() for name, report in reports.items()})
    for name, report in table.reports.items():
        _check_share(path, name, report, max_misaligned)
    _check_rows(path, table)
    return table


def is_acceptance(row: Row) -> bool:
    """Whether a record has the keys of this format."""
    return "generated_token_ids" in row and any(_DRAFTER.fullmatch(key) for key in row)


def _check_options(entry_predicts: str, max_misaligned: float) -> None:
    if entry_predicts not in PREDICTS:
        raise UsageError(
            "--entry-predicts",
            expected=" or ".join(PREDICTS),
            found=repr(entry_predicts),
            fix="name one of them",
        )
    if not 0 <= max_misaligned <= 1:
        raise UsageError(
            "--max-misaligned",
            expected="a share in [0, 1]",
            found=str(max_misaligned),
            fix="0.01 allows one entry in a hundred",
        )


def _drafters_of(row: Row, spot: Spot) -> tuple[str, ...]:
    found = [match for key in sorted(row) if (match := _DRAFTER.fullmatch(key))]
    if not found:
        raise spot.refuse("a key such as 'acc_eagle' or 'acc_ngram'", f"keys {sorted(row)[:8]}")
    return tuple(match["name"] or match[0] for match in found)


def _unused_id(row: Row, spot: Spot, first: dict[str, Spot]) -> str:
    """The request's id; one id twice would count a request twice."""
    request_id = text_of(row, "id", spot)
    earlier = first.setdefault(request_id, spot)
    if earlier is not spot:
        found = f"{request_id[:80]!r}, which {earlier.unit} {earlier.number} has too"
        raise spot.refuse("an id that is not used yet", found)
    return request_id


def _add(
    row: Row,
    spot: Spot,
    request_id: str,
    drafters: tuple[str, ...],
    entry_predicts: str,
    builder: TableBuilder,
    reports: dict[str, ReportBuilder],
) -> None:
    num_prompt = len(counts_of(row.get("prompt_token_ids"), "'prompt_token_ids'", spot))
    if not num_prompt:
        raise spot.refuse("at least one prompt token", "an empty list")
    generated = len(counts_of(row.get("generated_token_ids"), "'generated_token_ids'", spot))
    category = text_of(row, "category", spot) if row.get("category") else ""
    lists: dict[str, Aligned] = {}
    for name in drafters:
        lists[name] = found = align(_entries(row, name, spot), generated, entry_predicts)
        reports[name].add(spot.number, found.num_entries, found.misaligned, found.accepted)
    accepted = {name: found.accepted for name, found in lists.items()}
    builder.add(request_id, category, num_prompt, generated, accepted)


def _entries(row: Row, drafter: str, spot: Spot) -> Longs:
    key = drafter if drafter == "acc" else f"acc_{drafter}"
    value: Any = row.get(key)
    if value is None:
        found = f"keys {sorted(k for k in row if _DRAFTER.fullmatch(k))[:8]}"
        raise spot.refuse(f"key {key!r}", found, "name drafters that every line has (--drafter)")
    if isinstance(value, dict):
        if "acc_len" not in value:
            raise spot.refuse(f"'acc_len' in {key!r}", f"keys {sorted(value)[:8]}")
        key, value = f"{key}.acc_len", value["acc_len"]
    if not isinstance(value, list):
        raise spot.refuse(f"{key!r} as a list of accepted lengths", kind_of(value))
    return counts_of(value, repr(key), spot)


def _check_share(path: Path, drafter: str, report: DrafterReport, limit: float) -> None:
    if report.misaligned_share <= limit:
        return
    kinds = ", ".join(
        f"{count} {kind} (first in line {report.first_line[kind]})"
        for kind, count in report.misaligned.items()
    )
    worst = max(report.misaligned, key=lambda kind: report.misaligned[kind])
    raise InputError(
        f"{path}, drafter {drafter}",
        expected=f"at most {limit:.2%} of the entries misaligned",
        found=f"{report.misaligned_share:.2%} of {report.num_entries}: {kinds}",
        fix=f"{KINDS[worst]}; correct the file, leave the drafter out (--drafter), or raise "
        f"--max-misaligned",
    )


def _check_rows(path: Path, table: AcceptanceTable) -> None:
    if table.positions.num_rows:
        return
    raise InputError(
        str(path),
        expected="a request with at least two generated tokens that its lists cover",
        found=f"{table.num_without_rounds} without",
        fix="name a file with generated text",
    )
