"""Per-position acceptance to a folder: lists on their texts, what is refused, what is written."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specctl.artifacts.manifest import digest_of
from specctl.errors import (
    InputError,
    OutputError,
    TraceCorruptError,
    TraceError,
    TraceSchemaError,
    UsageError,
)
from specctl.logs.acceptance_lists import KINDS, DrafterLists
from specctl.logs.imported_log import HEADER_NAME, POSITIONS_NAME, ImportedLog, publish_new
from specctl.logs.importing import SUMMARY_NAME, parse_depths
from specctl.records import canonical_json
from tests.cli.command import passes, refuses, specctl
from tests.logs.import_cases import (
    COUNTERS,
    answer,
    choice,
    import_rows,
    imported,
    metrics,
    request,
    scrape,
    write_rows,
)
from tests.replay.positions import check_positions

LISTS = st.lists(st.integers(0, 12), max_size=20)


def placed(entries: list[int], num_generated: int, predicts: str = "same") -> DrafterLists:
    lists = DrafterLists()
    lists.add(np.array(entries, np.int64), num_generated, predicts, 1)
    return lists


def aligned(*given: Any) -> Any:
    """Accepted draft tokens by position, and misaligned entries by kind."""
    found = placed(*given)
    return found.accepted[0].tolist(), dict(found.misaligned)


@pytest.mark.parametrize(
    ("entries", "num_generated", "predicts", "accepted", "misaligned"),
    [
        # A text of 5 tokens: rounds may start at positions 1, 2, 3, 4 with 4, 3, 2, 1 left.
        ([1, 3, 2, 1, 2], 5, "same", [2, 1, 0, 1], {}),
        ([3, 2, 1, 2, 1], 5, "next", [2, 1, 0, 1], {}),  # as the published simulator reads
        ([3, 2, 1, 2], 5, "next", [2, 1, 0, 1], {}),  # the last entry has nothing to draft
        ([1, 3, 2], 5, "same", [2, 1], {"missing": 2}),
        ([1, 3, 2, 1, 2, 1, 1], 5, "same", [2, 1, 0, 1], {"surplus": 2}),
        ([1, 3, 0, 2, 0], 5, "same", [2], {"below_one": 2, "behind_below_one": 1}),
        ([1, 9, 2, 1, 3], 5, "same", [4, 1, 0, 1], {"beyond_end": 2}),
        ([4, 3, 2, 1, 2], 5, "same", [2, 1, 0, 1], {"first_not_one": 1}),
        ([], 5, "same", [], {"missing": 5}),
        ([], 0, "same", [], {}),
        ([1], 1, "same", [], {}),
        ([1, 1], 0, "same", [], {"surplus": 2}),
        ([0, 0], 2, "same", [], {"below_one": 1, "first_not_one": 1}),
    ],
)
def test_entries_are_placed_or_counted(
    entries: list[int],
    num_generated: int,
    predicts: str,
    accepted: list[int],
    misaligned: dict[str, int],
) -> None:
    assert aligned(entries, num_generated, predicts) == (accepted, misaligned)


@given(LISTS, st.integers(0, 15), st.sampled_from(["same", "next"]))
def test_what_is_kept_is_within_the_text_and_what_is_not_is_counted(
    entries: list[int], num_generated: int, predicts: str
) -> None:
    found = placed(entries, num_generated, predicts)
    [kept] = found.accepted
    remaining = num_generated - np.arange(1, len(kept) + 1)
    assert ((kept >= 0) & (kept <= remaining)).all()
    assert set(found.misaligned) <= set(KINDS)
    assert found.misaligned == +Counter(found.misaligned)
    assert sum(found.misaligned.values()) <= found.num_entries + found.misaligned["first_not_one"]
    lost = max(num_generated - 1, 0) - len(kept)
    counted = ("missing", "below_one", "behind_below_one")
    assert lost <= sum(found.misaligned[kind] for kind in counted)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=20))
def test_a_fitting_list_is_kept_whole(steps: list[int]) -> None:
    size = len(steps)
    entries = [1] + [min(step, size - p + 1) for p, step in enumerate(steps[1:], start=1)]
    assert aligned(entries, size) == ([entry - 1 for entry in entries[1:]], {})


GOOD = request("a", 5, eagle=[1, 3, 2, 1, 2], ngram=[1, 1, 1, 1, 1])


# --------------------------------------------------------------------------- reading


def test_two_requests_by_hand(tmp_path: Path) -> None:
    second = {**request("b", 3, prompt=7, eagle=[1, 2, 2], ngram=[1, 3, 1]), "category": "code"}
    traces = import_rows(tmp_path, GOOD, second)
    positions = traces.positions
    check_positions(positions)
    assert positions.prompt_ids == ("a", "b")
    assert [positions.categories[c] for c in positions.category] == ["", "code"]
    assert positions.start.tolist() == [0, 4, 6]
    assert positions.remaining.tolist() == [4, 3, 2, 1, 2, 1]
    assert positions.context_tokens.tolist() == [4, 5, 6, 7, 8, 9]
    assert traces.lengths("eagle").accepted.tolist() == [2, 1, 0, 1, 1, 1]
    assert traces.lengths("ngram").accepted.tolist() == [0, 0, 0, 0, 2, 0]


Z = {**request("a", 3), "acc": {"acc_len": [1, 2, 1]}, "acc_eagle_three": [1, 1, 1]}
"""Bare lists, and one drafter without a name."""
EAGLE_DEPTH = ("offered_depth", "offered_depth_inferred", "num_censored")


@pytest.mark.parametrize(
    ("rows", "options", "drafters", "remaining", "num_cut"),
    [
        # The n-gram list ends after 3 entries: a text of 3 tokens, with rounds at 1 and 2.
        ([request("a", 5, eagle=[1, 4, 2, 1, 2], ngram=[1, 1, 1])], {"max_misaligned": 0.5},
         {"eagle": [2, 1], "ngram": [0, 0]}, [2, 1], 2),
        ([request("a", 5, eagle=[1, 3, 2, 1, 2], ngram=[1])], {"drafters": ("eagle",)},
         {"eagle": [2, 1, 0, 1]}, [4, 3, 2, 1], 0),
        ([request("x", 0, eagle=[]), request("y", 1, eagle=[1]), request("z", 2, eagle=[1, 2])],
         {}, {"eagle": [1]}, [1], 0),
        ([Z], {}, {"acc": [1, 0], "eagle_three": [0, 0]}, [2, 1], 0),
    ],
    ids=["cut to what all lists reach", "a chosen drafter", "without rounds", "bare and unnamed"],
)  # fmt: skip
def test_positions_that_all_lists_cover(
    tmp_path: Path,
    rows: list[Any],
    options: dict[str, Any],
    drafters: dict[str, list[int]],
    remaining: list[int],
    num_cut: int,
) -> None:
    traces = import_rows(tmp_path, *rows, **options)
    found = {name: traces.lengths(name).accepted.tolist() for name in traces.drafters}
    assert found == drafters
    assert traces.positions.remaining.tolist() == remaining
    assert traces.positions.prompt_ids == (rows[-1]["id"],)
    assert traces.header.num_cut_tokens == num_cut
    assert traces.header.num_without_rounds == len(rows) - 1


def test_whole_numbers_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\n" + json.dumps({**GOOD, "id": 12}).encode() + b"\r\n\n")
    traces = imported(path, tmp_path / "out").log
    assert traces is not None
    assert traces.positions.prompt_ids == ("12",)


@pytest.mark.parametrize(
    ("row", "depths", "expected", "censored"),
    [
        (GOOD, None, (2, True, 1), [1, 0, 0, 0]),
        (GOOD, {"eagle": 3, "ngram": 4}, (3, False, 0), [0, 0, 0, 0]),
        (GOOD, {"eagle": 2}, (2, False, 1), [1, 0, 0, 0]),
        # With two tokens left nothing more than the two that were offered could be accepted.
        (request("a", 4, eagle=[1, 3, 3, 2]), None, (2, True, 1), [1, 0, 0]),
    ],
)
def test_depth_is_inferred_and_marked_or_stated(
    tmp_path: Path, row: Any, depths: dict[str, int] | None, expected: Any, censored: list[int]
) -> None:
    traces = import_rows(tmp_path, row, offered_depths=depths)
    eagle = traces.header.drafters["eagle"]
    assert tuple(getattr(eagle, name) for name in EAGLE_DEPTH) == expected
    assert traces.lengths("eagle").is_censored.tolist() == censored


# --------------------------------------------------------------------------- refusals


def refused(tmp_path: Path, *rows: Any, **options: Any) -> str:
    """The refusal of a file; nothing is left behind."""
    with pytest.raises(InputError) as refusal:
        import_rows(tmp_path, *rows, **options)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source.jsonl"]
    return str(refusal.value)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"id": "b"', "which is no JSON from column 11 on"),
        ("[1, 2]", "a JSON object"),
        ("7", "a JSON object"),
        ({**GOOD, "id": None}, "'id'"),
        ({**GOOD, "id": " "}, "'id'"),
        ({**GOOD, "id": True}, "'id'"),
        ({**GOOD, "id": "\ud800"}, "surrogate"),
        ({**GOOD, "id": "b", "prompt_token_ids": []}, "at least 1 item"),
        ({**GOOD, "id": "b", "prompt_token_ids": "5 5"}, "'prompt_token_ids'"),
        ({**GOOD, "id": "b", "generated_token_ids": None}, "'generated_token_ids'"),
        ({**GOOD, "id": "b", "generated_token_ids": [7, -1]}, "-1 at index 1"),
        ({**GOOD, "id": "b", "acc_ngram": None}, "'acc_ngram'"),
        ({**GOOD, "id": "b", "acc_ngram": {}}, "'acc_ngram'"),
        ({**GOOD, "id": "b", "acc_ngram": {"acc_len": {}}}, "a valid list, found an object"),
        ({**GOOD, "id": "b", "acc_ngram": {"acc_len": [1, 2.0]}}, "2.0 at index 1"),
        ({**GOOD, "id": "b", "acc_ngram": {"acc_len": [1, True]}}, "True at index 1"),
        ({**GOOD, "id": "b", "acc_ngram": {"acc_len": [1, "2"]}}, "'2' at index 1"),
        ({**GOOD, "id": "b", "acc_ngram": {"acc_len": [1, -3]}}, "-3 at index 1"),
        ({**GOOD, "id": "b", "acc_ngram": {"acc_len": [1, 10**30]}}, "index 1"),
        ({**GOOD, "id": "b", "category": 3.5}, "'category'"),
        ('{"id": "b", "acc_eagle": {"acc_len": [NaN]}}', "NaN"),
        ('{"id": "b", "acc_eagle": {"acc_len": [1e999]}}', "1e999"),
        ('{"id": "b", "id": "c"}', "each key once"),
        ("\0" * 512, "expected JSON, found 512 NUL bytes; remove them"),
        ('{"id": ' + "9" * 5000 + "}", "sane size"),
        ('{"id": ' + "[" * 100_000 + "}", "sane size"),
        (GOOD, "which line 1 has too"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, bad: Any, says: str) -> None:
    line = refused(tmp_path, GOOD, "", bad)
    assert "source.jsonl, line 3" in line
    assert says in line
    assert len(line) < 500


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (json.dumps(GOOD).encode() + b'\n{"id": "caf\xe9"}\n', "line 2: .* UTF-8 text, .*xe9"),
        (json.dumps(GOOD).encode() + b'\n{"id": "b"', "line 2: .* without a line end"),
        (b"", "an empty file"),
        (b"\n \n", "an empty file"),
        (b"hello\nworld", "'hello'"),
        (None, "a file that can be read"),
    ],
)
def test_files_that_hold_no_records(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "file"
    path.mkdir() if content is None else path.write_bytes(content)
    for format in ("auto", "specdecode-bench"):
        if content != b"hello\nworld" or format == "auto":
            with pytest.raises(InputError, match=says):
                imported(path, tmp_path / "out", format=format)
    with pytest.raises(InputError, match="a file that can be read"):
        imported(tmp_path / "absent", tmp_path / "out")


def test_lists_that_do_not_fit_are_refused_above_a_share(tmp_path: Path) -> None:
    """Of 500 entries 5 are missing: exactly 1%."""
    row = request("b", 500, eagle=[1] * 495)
    line = refused(tmp_path, GOOD, row, max_misaligned=0.009, drafters=("eagle",))
    assert "drafter eagle" in line
    assert "5 missing (first in line 2)" in line
    traces = import_rows(tmp_path, row, max_misaligned=0.01)
    assert traces.header.drafters["eagle"].misaligned == {"missing": 5}


def test_a_last_round_that_is_not_whole_is_counted_and_no_misfit(tmp_path: Path) -> None:
    """The most that a round of the file accepts is 3: what lacks that many entries may be cut."""
    whole, cut = [1, 4, 3, 2, 1, 4, 3, 2], request("b", 11, eagle=[1, 4, 3, 2, 1, 4, 3, 2])
    log = import_rows(tmp_path, request("a", 8, eagle=whole), cut, max_misaligned=0)
    assert log.header.drafters["eagle"].misaligned == {"last_round": 3}
    assert (log.header.num_cut_tokens, log.positions.num_rows) == (3, 14)
    warned = specctl("import", tmp_path / "source.jsonl", "-o", tmp_path / "again")
    assert warned.code == 0
    assert warned.err.startswith(
        "warning: eagle: 3 entries are missing or left over at the ends of"
    )
    (tmp_path / "more").mkdir()
    rows = [request(str(size), size, eagle=whole) for size in (8, 5, 11, 12, 4)]
    line = refused(tmp_path / "more", *rows)
    for kind in ("4 missing (first in line 4)", "4 surplus (first in line 5)"):
        assert kind in line
    assert "6 last_round (first in line 2)" in line


@pytest.mark.parametrize(
    ("row", "says"),
    [  # one drafter cannot hide behind another
        (request("a", 100, eagle=[1] * 100, ngram=[1] * 98), "drafter ngram"),
        (request("a", 5, eagle=[0, 2, 0, 0, 1]), "below 1, although the bonus token counts"),
        (request("a", 1, eagle=[1]), "two generated tokens"),
    ],
)
def test_lists_without_use(tmp_path: Path, row: Any, says: str) -> None:
    assert says in refused(tmp_path, row, max_misaligned=0.015)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"entry_predicts": "previous"}, "--entry-predicts"),
        ({"max_misaligned": float("nan")}, "--max-misaligned"),
        ({"max_misaligned": -0.1}, "--max-misaligned"),
        ({"offered_depths": {"eagle": 1}}, "eagle=1, 2 accepted"),
        ({"offered_depths": {"medusa": 4}}, "medusa=4, no such drafter"),
        ({"questions": Path("q.jsonl")}, "--questions"),
    ],
)
def test_options(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        import_rows(tmp_path, GOOD, **options)


@pytest.mark.parametrize("text", ["", "eagle", "eagle=", "eagle=-1", "=4", "eagle=1e3", "5"])
def test_bad_depths(text: str) -> None:
    with pytest.raises(UsageError, match="--offered-depth"):
        parse_depths(text)
    assert parse_depths("eagle=5, ngram=20") == {"eagle": 5, "ngram": 20}


@pytest.mark.parametrize("row", [{"prompt": "hello"}, {"generated_token_ids": []}, {}])
def test_unknown_format_names_the_known_ones(tmp_path: Path, row: dict[str, Any]) -> None:
    line = refused(tmp_path, row)
    for name in ("specdecode-bench", "spec-bench", "vllm-requests", "vllm-prometheus"):
        assert name in line


# --------------------------------------------------------------------------- the folder


def test_written_folder_opens_equal(tmp_path: Path) -> None:
    traces = import_rows(tmp_path, GOOD)
    again = ImportedLog.open(tmp_path / "out")
    assert again.digest == traces.digest
    assert again.header.source_name == "source.jsonl"
    for name in traces.drafters:
        np.testing.assert_array_equal(again.lengths(name).accepted, traces.lengths(name).accepted)
    with pytest.raises(UsageError, match="eagle or ngram"):
        traces.lengths("medusa")


def test_equal_sources_give_equal_digests(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert import_rows(tmp_path / "one", GOOD).digest == import_rows(tmp_path / "two", GOOD).digest


def test_an_empty_folder_is_filled_and_a_used_place_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert import_rows(tmp_path, GOOD).positions.num_rows == 4
    before = (tmp_path / "out" / HEADER_NAME).read_bytes()
    with pytest.raises(OutputError, match="an empty folder"):
        import_rows(tmp_path, request("other", 4, eagle=[1, 1, 1, 1]))
    with pytest.raises(OutputError, match="nothing was touched"):
        publish_new(tmp_path, {"new": b""}, lambda _: None)
    assert (tmp_path / "out" / HEADER_NAME).read_bytes() == before


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specctl.logs.imported_log.os.fsync", fail)
    with pytest.raises(OutputError, match="no space left"):
        import_rows(tmp_path, GOOD)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source.jsonl"]


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        (POSITIONS_NAME, lambda data: data[:-1], TraceCorruptError),
        (POSITIONS_NAME, lambda data: data.replace(b"PAR1", b"PAR2"), TraceCorruptError),
        (HEADER_NAME, lambda data: data[:-1], TraceCorruptError),
        (HEADER_NAME, lambda data: data + b"\n", TraceCorruptError),
        (HEADER_NAME, lambda data: data.replace(b'version":1', b'version":2'), TraceSchemaError),
        (HEADER_NAME, lambda data: data.replace(b'"num_cut', b'"num_put'), TraceSchemaError),
        (HEADER_NAME, lambda data: data.replace(b'"eagle"', b'"aegle"'), TraceSchemaError),
    ],
    ids=["cut", "flipped", "cut header", "longer header", "version", "field", "schema"],
)
def test_damage_is_found(tmp_path: Path, name: str, change: Any, error: type[TraceError]) -> None:
    import_rows(tmp_path, GOOD)
    path = tmp_path / "out" / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(error):
        ImportedLog.open(tmp_path / "out")


def _other_column(folder: Path, name: str, other: str, *, with_digest: bool) -> None:
    """Puts a column in another's place."""
    path = folder / POSITIONS_NAME
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index(name), name, table[other]), path)
    if with_digest:
        data, header = path.read_bytes(), json.loads((folder / HEADER_NAME).read_text())
        header |= {"positions_digest": digest_of(data), "positions_size_bytes": len(data)}
        (folder / HEADER_NAME).write_text(canonical_json(header))


@pytest.mark.parametrize(
    ("name", "other", "says"),
    [
        ("num_accepted_eagle", "num_accepted_ngram", "sha256"),
        ("num_accepted_eagle", "position", "within what remains"),
        ("remaining", "position", "as many tokens remaining"),
        ("position", "remaining", "positions 1, 2"),
        ("category", "position", "the columns of its header"),
    ],
)
def test_rows_are_checked_even_where_digests_fit(
    tmp_path: Path, name: str, other: str, says: str
) -> None:
    import_rows(tmp_path, GOOD)
    _other_column(tmp_path / "out", name, other, with_digest=says != "sha256")
    with pytest.raises(TraceCorruptError, match=says):
        ImportedLog.open(tmp_path / "out")


def test_other_folders_are_refused(tmp_path: Path) -> None:
    imported(write_rows(tmp_path / "m.json", metrics(1, 1)), tmp_path / "summary")
    assert (tmp_path / "summary" / SUMMARY_NAME).is_file()
    for folder in (tmp_path / "summary", tmp_path / "absent"):
        with pytest.raises(TraceError, match="specctl import"):
            ImportedLog.open(folder)


# --------------------------------------------------------------------------- the verb


def test_traces_for_a_person_and_for_a_script(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "s.jsonl", GOOD)
    shown = passes("import", source, "-o", tmp_path / "one", "--offered-depth", "eagle=4").out
    for named in ("eagle", "inferred", "4 (0 tokens cut off)", "token i"):
        assert named in shown
    told = json.loads(
        passes("import", source, "-o", tmp_path / "two", "--drafter", "ngram", "--json").out
    )
    assert told["format"] == "specdecode-bench"
    traces = ImportedLog.open(tmp_path / "two")
    assert told["digest"] == traces.digest
    assert told["header"]["num_positions"] == 4
    assert traces.drafters == ("ngram",)


@pytest.mark.parametrize("kind", ["answers", "requests", "counters"])
def test_summaries(tmp_path: Path, kind: str) -> None:
    source = {
        "answers": lambda path: write_rows(path, answer(1, choice(), category="qa")),
        "requests": lambda path: write_rows(path, metrics(2, 1, 1)),
        "counters": lambda path: scrape(path, *COUNTERS),
    }[kind](tmp_path / "source")
    assert "not replayed" in passes("import", source).out
    told = json.loads(passes("import", source, "--json", "-o", tmp_path / "out").out)
    assert told == json.loads((tmp_path / "out" / "summary.json").read_text())


def test_refusals(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "s.jsonl", GOOD)
    assert "--out" in refuses(2, "import", source)
    assert "--format" in refuses(2, "import", source, "--format", "csv")
    assert "--offered-depth" in refuses(2, "import", source, "--offered-depth", "five")
    assert "absent" in refuses(4, "import", tmp_path / "absent")
    assert "line 1" in refuses(4, "import", write_rows(tmp_path / "b", "{"), "-o", tmp_path / "o")
    assert "something else" in refuses(6, "import", source, "-o", tmp_path)
