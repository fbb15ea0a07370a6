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
from specctl.logs.acceptance_lists import KINDS, align
from specctl.logs.imported_log import HEADER_NAME, POSITIONS_NAME, ImportedLog, publish_new
from specctl.logs.importing import SUMMARY_NAME, parse_depths
from tests.cli.command import passes, refuses
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


def aligned(entries: list[int], num_generated: int, predicts: str = "same") -> list[int]:
    return align(np.array(entries, np.int64), num_generated, predicts).accepted.tolist()


def kinds(entries: list[int], num_generated: int, predicts: str = "same") -> dict[str, int]:
    return dict(align(np.array(entries, np.int64), num_generated, predicts).misaligned)


def test_entry_zero_is_the_prefill_and_entry_p_the_round_after_p_tokens() -> None:
    """Text of 5 tokens: rounds may start at positions 1, 2, 3, 4 with 4, 3, 2, 1 left."""
    assert aligned([1, 3, 2, 1, 2], 5) == [2, 1, 0, 1]
    assert kinds([1, 3, 2, 1, 2], 5) == {}


def test_the_published_simulator_reads_one_entry_earlier() -> None:
    assert aligned([3, 2, 1, 2, 1], 5, "next") == [2, 1, 0, 1]
    assert kinds([3, 2, 1, 2, 1], 5, "next") == {}
    assert kinds([3, 2, 1, 2], 5, "next") == {}  # the last entry has nothing to draft


@pytest.mark.parametrize(
    ("entries", "num_generated", "accepted", "found"),
    [
        ([1, 3, 2], 5, [2, 1], {"missing": 2}),
        ([1, 3, 2, 1, 2, 1, 1], 5, [2, 1, 0, 1], {"surplus": 2}),
        ([1, 3, 0, 2, 0], 5, [2], {"below_one": 2, "behind_below_one": 1}),
        ([1, 9, 2, 1, 3], 5, [4, 1, 0, 1], {"beyond_end": 2}),
        ([4, 3, 2, 1, 2], 5, [2, 1, 0, 1], {"first_not_one": 1}),
        ([], 5, [], {"missing": 5}),
        ([], 0, [], {}),
        ([1], 1, [], {}),
        ([1, 1], 0, [], {"surplus": 2}),
        ([0, 0], 2, [], {"below_one": 1, "first_not_one": 1}),
    ],
)
def test_misfits(
    entries: list[int], num_generated: int, accepted: list[int], found: dict[str, int]
) -> None:
    assert aligned(entries, num_generated) == accepted
    assert kinds(entries, num_generated) == found


@given(LISTS, st.integers(0, 15), st.sampled_from(["same", "next"]))
def test_what_is_kept_is_within_the_text_and_what_is_not_is_counted(
    entries: list[int], num_generated: int, predicts: str
) -> None:
    found = align(np.array(entries, np.int64), num_generated, predicts)
    kept = found.accepted
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
    assert kinds(entries, size) == {}
    assert aligned(entries, size) == [entry - 1 for entry in entries[1:]]


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


def test_text_is_cut_to_what_all_lists_reach(tmp_path: Path) -> None:
    """The n-gram list ends after 3 entries: a text of 3 tokens, with rounds at 1 and 2."""
    row = request("a", 5, eagle=[1, 4, 2, 1, 2], ngram=[1, 1, 1])
    traces = import_rows(tmp_path, row, max_misaligned=0.5)
    assert traces.positions.remaining.tolist() == [2, 1]
    assert traces.lengths("eagle").accepted.tolist() == [2, 1]  # 3 accepted, cut at the new end
    assert traces.header.num_cut_tokens == 2
    assert traces.header.drafters["ngram"].misaligned == {"missing": 2}
    assert traces.header.drafters["eagle"].misaligned == {}


def test_a_drafter_can_be_chosen_so_that_others_do_not_cut(tmp_path: Path) -> None:
    row = request("a", 5, eagle=[1, 3, 2, 1, 2], ngram=[1])
    traces = import_rows(tmp_path, row, drafters=("eagle",))
    assert traces.drafters == ("eagle",)
    assert traces.positions.num_rows == 4


def test_requests_without_rounds_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [request("x", 0, eagle=[]), request("y", 1, eagle=[1]), request("z", 2, eagle=[1, 2])]
    traces = import_rows(tmp_path, *rows)
    assert traces.positions.prompt_ids == ("z",)
    assert traces.header.num_without_rounds == 2


def test_bare_lists_and_one_unnamed_drafter(tmp_path: Path) -> None:
    row = {**request("a", 3), "acc": {"acc_len": [1, 2, 1]}, "acc_eagle_three": [1, 1, 1]}
    assert import_rows(tmp_path, row).drafters == ("acc", "eagle_three")


def test_whole_numbers_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\n" + json.dumps({**GOOD, "id": 12}).encode() + b"\r\n\n")
    traces = imported(path, tmp_path / "out").log
    assert traces is not None
    assert traces.positions.prompt_ids == ("12",)


def test_depth_is_inferred_and_marked_or_stated(tmp_path: Path) -> None:
    for name, depths, expected in (
        ("inferred", None, (2, True, 1)),
        ("stated", {"eagle": 3, "ngram": 4}, (3, False, 0)),
    ):
        (tmp_path / name).mkdir()
        traces = import_rows(tmp_path / name, GOOD, offered_depths=depths)
        eagle = traces.header.drafters["eagle"]
        found = (eagle.offered_depth, eagle.offered_depth_inferred, eagle.num_censored)
        assert found == expected
        assert int(traces.lengths("eagle").is_censored.sum()) == eagle.num_censored


def test_a_stated_depth_may_equal_what_was_accepted(tmp_path: Path) -> None:
    traces = import_rows(tmp_path, GOOD, offered_depths={"eagle": 2})
    assert not traces.header.drafters["eagle"].offered_depth_inferred


def test_acceptance_up_to_the_end_of_the_text_is_not_censored(tmp_path: Path) -> None:
    """Two accepted of two offered: with two tokens left nothing more could be accepted."""
    traces = import_rows(tmp_path, request("a", 4, eagle=[1, 3, 3, 2]))
    assert traces.lengths("eagle").offered_depth == 2
    assert traces.lengths("eagle").is_censored.tolist() == [True, False, False]


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
        ('{"id": "b"', "delimiter"),
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


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"id": "caf\xe9"}\n')
    with pytest.raises(InputError, match=r"line 2: expected UTF-8 text, found byte 0xe9"):
        imported(path, tmp_path / "out")


def test_a_truncated_last_line(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, "id": "b"})[:-40])
    with pytest.raises(InputError, match=r"line 2: .* without a line end"):
        imported(path, tmp_path / "out")


@pytest.mark.parametrize("format", ["auto", "specdecode-bench"])
@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file(tmp_path: Path, content: str, format: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match="an empty file"):
        imported(path, tmp_path / "out", format=format)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(InputError, match="a file that can be read"):
            imported(path, tmp_path / "out")


def test_lists_that_do_not_fit_are_refused_above_a_share(tmp_path: Path) -> None:
    """One entry of 100 is missing: exactly 1%."""
    row = request("b", 100, eagle=[1] * 99)
    line = refused(tmp_path, GOOD, row, max_misaligned=0.009, drafters=("eagle",))
    assert "drafter eagle" in line
    assert "1 missing (first in line 2)" in line
    traces = import_rows(tmp_path, row, max_misaligned=0.01)
    assert traces.header.drafters["eagle"].misaligned == {"missing": 1}


def test_one_drafter_cannot_hide_behind_another(tmp_path: Path) -> None:
    row = request("a", 100, eagle=[1] * 100, ngram=[1] * 98)
    assert "drafter ngram" in refused(tmp_path, row, max_misaligned=0.015)


def test_lists_without_the_bonus_token_are_refused(tmp_path: Path) -> None:
    assert "below 1, although the bonus token counts" in refused(
        tmp_path, request("a", 5, eagle=[0, 2, 0, 0, 1])
    )


def test_nothing_to_replay(tmp_path: Path) -> None:
    assert "two generated tokens" in refused(tmp_path, request("a", 1, eagle=[1]))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"entry_predicts": "previous"}, "--entry-predicts"),
        ({"max_misaligned": float("nan")}, "--max-misaligned"),
        ({"max_misaligned": -0.1}, "--max-misaligned"),
        ({"offered_depths": {"eagle": 1}}, "eagle=1, 2 accepted"),
        ({"offered_depths": {"medusa": 4}}, "medusa=4, no such drafter"),
        ({"questions": Path("q.jsonl")}, "--questions"),
        ({"format": "csv"}, "spec-bench"),
    ],
)
def test_options(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        import_rows(tmp_path, GOOD, **options)


def test_traces_need_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--out"):
        imported(write_rows(tmp_path / "s", GOOD))


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


def test_text_of_no_format(tmp_path: Path) -> None:
    assert "'hello'" in refused(tmp_path, "hello", "world")


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


def test_a_used_place_is_left_alone(tmp_path: Path) -> None:
    import_rows(tmp_path, GOOD)
    before = (tmp_path / "out" / HEADER_NAME).read_bytes()
    with pytest.raises(OutputError, match="an empty folder"):
        import_rows(tmp_path, request("other", 4, eagle=[1, 1, 1, 1]))
    assert (tmp_path / "out" / HEADER_NAME).read_bytes() == before


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert import_rows(tmp_path, GOOD).positions.num_rows == 4


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specctl.logs.imported_log.os.fsync", fail)
    with pytest.raises(OutputError, match="No space left"):
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


def test_laws_are_checked_even_where_digests_fit(tmp_path: Path) -> None:
    traces = import_rows(tmp_path, GOOD)
    path = tmp_path / "out" / POSITIONS_NAME
    table = pq.read_table(path)
    index = table.column_names.index("num_accepted_eagle")
    pq.write_table(table.set_column(index, "num_accepted_eagle", table["position"]), path)
    _sign_again(tmp_path / "out", traces)
    with pytest.raises(TraceCorruptError, match="within what remains"):
        ImportedLog.open(tmp_path / "out")


def test_lawful_changes_are_found_by_the_digest(tmp_path: Path) -> None:
    import_rows(tmp_path, GOOD)
    path = tmp_path / "out" / POSITIONS_NAME
    table = pq.read_table(path)
    index = table.column_names.index("num_accepted_eagle")
    pq.write_table(table.set_column(index, "num_accepted_eagle", table["num_accepted_ngram"]), path)
    with pytest.raises(TraceCorruptError, match="sha256"):
        ImportedLog.open(tmp_path / "out")


def test_publishing_refuses_a_used_place(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(OutputError, match="nothing was touched"):
        publish_new(tmp_path, {"new": b""}, lambda _: None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]


def _sign_again(folder: Path, traces: ImportedLog) -> None:
    data = (folder / POSITIONS_NAME).read_bytes()
    change = {"positions_digest": digest_of(data), "positions_size_bytes": len(data)}
    (folder / HEADER_NAME).write_bytes(traces.header.model_copy(update=change).to_bytes())


def test_other_folders_are_refused(tmp_path: Path) -> None:
    summary = write_rows(
        tmp_path / "m.json",
        {
            "num_spec_steps": 1,
            "acceptance_histogram": [1, 0],
            "num_accepted_draft_tokens": 0,
            "num_draft_tokens": 1,
        },
    )
    imported(summary, tmp_path / "summary")
    assert (tmp_path / "summary" / SUMMARY_NAME).is_file()
    for folder in (tmp_path / "summary", tmp_path / "absent"):
        with pytest.raises(TraceError, match="specctl import"):
            ImportedLog.open(folder)


ROW = request("a", 5, eagle=[1, 3, 2, 1, 2], ngram=[1, 1, 1, 1, 1])


def test_traces_for_a_person_and_for_a_script(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "s.jsonl", ROW)
    shown = passes("import", source, "-o", tmp_path / "one", "--offered-depth", "eagle=4").out
    for named in ("eagle", "inferred", "4 (0 tokens cut off)", "token i"):
        assert named in shown
    told = json.loads(passes("import", source, "-o", tmp_path / "two", "--json").out)
    assert told["format"] == "specdecode-bench"
    assert told["digest"] == ImportedLog.open(tmp_path / "two").digest
    assert told["header"]["num_positions"] == 4


def test_one_drafter(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "s.jsonl", ROW)
    passes("import", source, "-o", tmp_path / "one", "--drafter", "ngram")
    assert ImportedLog.open(tmp_path / "one").drafters == ("ngram",)


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
    source = write_rows(tmp_path / "s.jsonl", ROW)
    assert "--out" in refuses(2, "import", source)
    assert "--format" in refuses(2, "import", source, "--format", "csv")
    assert "--offered-depth" in refuses(2, "import", source, "--offered-depth", "five")
    assert "absent" in refuses(4, "import", tmp_path / "absent")
    assert "line 1" in refuses(4, "import", write_rows(tmp_path / "b", "{"), "-o", tmp_path / "o")
    assert "something else" in refuses(6, "import", source, "-o", tmp_path)
