"""The page: words for every kind of evidence, escaping, nothing loaded, readable in both themes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from math import nan
from pathlib import Path

import pytest

from specctl.engines.engine import EngineSettings
from specctl.errors import InputError, TraceEmptyError, TraceMismatchError
from specctl.formatting import Table
from specctl.replay.acceptance import TraceFigures, trace_figures
from specctl.replay.ladder.result import ladder_parts
from specctl.replay.results import fewest_calls
from specctl.replay.score import PolicyFigures
from specctl.report import Given, Page, build_page, read_given
from specctl.report.charts import Chart, Series
from specctl.report.page import TERMS, folding, portable
from specctl.stats import Interval
from tests.replay.logs import random_traces
from tests.replay.reports import TWO_PROMPTS, live_traces, write_log
from tests.report.examples import (
    drift_results,
    example,
    ladder_results,
    replay_results,
    run_results,
    tune_results,
)

HOSTILE = "<script>alert('x')</script><img src=//evil.example/x>\"'&$a$"
ARTIFACT = "sha256:" + 64 * "a"
VLLM = EngineSettings(
    "vLLM", ("vllm serve m \\", "  --speculative-config '{\"a\": 1}'"), ("Mind.",)
)


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> TraceFigures:
    traces = random_traces(tmp_path_factory.mktemp("log") / "traces", num_prompts=6, depth=4)
    return trace_figures(traces)


@pytest.fixture(scope="module")
def full_page(evidence: TraceFigures) -> Page:
    run = run_results(artifact_digest=ARTIFACT)
    given = Given(
        replay_results(), ladder_results(), tune_results(load=(1, None)), run, drift_results()
    )
    return build_page(evidence, replace(given, artifact=ARTIFACT, engines=[VLLM]))


@pytest.fixture(scope="module")
def html(full_page: Page) -> str:
    return full_page.html()


class Outline(HTMLParser):
    """What a page consists of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_page_loads_nothing(html: str) -> None:
    outline = Outline(html)
    assert not {name for name, _ in outline.tags} & {"script", "link", "img", "iframe", "object"}
    loads = [a for _, a in outline.tags if {"src", "srcset", "data", "style"} & a.keys()]
    assert not loads
    assert all((a["href"] or "").startswith("#") for a in outline.of("a"))
    style = html.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    [policy] = [a for a in outline.of("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert (policy["content"] or "").startswith("default-src 'none'; style-src 'sha256-")


def test_page_is_accessible(html: str) -> None:
    outline = Outline(html)
    assert outline.of("html")[0]["lang"] == "en"
    assert len(outline.of("h1")) == 1
    figures = outline.of("svg")
    assert len(figures) == 8, "four drawings, each with its twin for phones"
    assert not re.search(r"<svg(?:(?!</svg>).)*#[0-9a-f]{6}\b", html, re.S), "themes give colours"
    assert all(svg["role"] == "img" and len(svg["aria-label"] or "") > 30 for svg in figures)
    assert html.count("<title>") == html.count("<desc>") + 1 == len(figures) + 1
    levels = [int(tag[1]) for tag, _ in outline.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[:2] == [1, 2]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(head.get("scope") in ("col", "row") for head in outline.of("th"))
    assert len(outline.of("caption")) == len(outline.of("table"))
    anchors = {section["id"] for section in outline.of("section")}
    linked = {f"#{anchor}" for anchor in anchors - {"recommendation"}}
    assert {a["href"] for a in outline.of("a")} == linked


def test_every_section_says_something_and_on_what(full_page: Page) -> None:
    keys = [section.key for section in full_page.sections]
    of_traces = ["depth", "category"]
    assert keys == ["recommendation", "policies", "runs", "ladder", "drift", *of_traces, "caveats"]
    for section in full_page.sections[:-1]:
        assert section.reading, section.key
        assert "prompt" in section.basis, section.key


def test_hostile_texts_are_shown_as_texts(tmp_path: Path) -> None:
    prompts = [replace(TWO_PROMPTS[0], category=HOSTILE), TWO_PROMPTS[1]]
    traces = write_log(tmp_path / "log", prompts, target=HOSTILE)
    page = build_page(trace_figures(traces), Given(replay_results(label=HOSTILE)))
    text = page.html()
    assert not {name for name, _ in Outline(text).tags} & {"script", "img"}
    assert text.count("&lt;script&gt;alert(") >= 4  # title, facts, category, policy, figures
    assert page.to_json()["facts"]["target"].startswith(HOSTILE)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Report: /home/me/my models/T + ./H", "Report: T + H"),
        ("/home/me/my models/T  sha256:12", "T  sha256:12"),
        ("a/b + org/model, models/x", "a/b + org/model, models/x"),  # as hub ids look
        ("/home/me/fits/hetero:num_tokens=32: calls", "hetero:num_tokens=32: calls"),
        ("../fits/c2t; ~/fits/c2t, ./c2t", "c2t; c2t, c2t"),
        ('serve \'{"policy": "/home/me/tuned/policy"}\'', 'serve \'{"policy": "tuned"}\''),
        ("specctl profile --policy ./tuned/policy -o x", "specctl profile --policy tuned -o x"),
        ("tokens/s, 1/8, https://a.org/b/c, s3://b/c/d, vLLM's /metrics", None),
    ],
)
def test_a_page_names_no_place_of_its_writer_s_machine(text: str, shown: str | None) -> None:
    """It is made to be forwarded. In titles, tables, notes and drawings alike."""
    parts = (Table(text, (text,), [(text,)]), [Series(text, [1], [1], names=[text])], {text: 1})
    table, [series], _ = portable(parts, ("/home/me/my models/T", "./H"))
    expected = text if shown is None else shown
    assert (table.title, table.columns, table.rows) == (expected, [expected], [[expected]])
    assert (series.label, series.names) == (expected, [expected])


def test_no_path_is_left_on_a_page(evidence: TraceFigures) -> None:
    home, own = "/home/me/my models", "/home/me/fits/hetero:num_tokens=32"
    pair = {"target": f"{home}/T", "drafter": f"{home}/H"}
    ladder, replay = ladder_results(label=own, **pair), replay_results(label=own)
    page = build_page(evidence.model_copy(update=pair), Given(replay, ladder))
    assert "/home/me" not in page.html()
    assert "hetero:<wbr>num_tokens=32" in page.html()
    assert page.title == "Speculative decoding report: T + H"


def test_json_twin_is_json_and_holds_the_figures(full_page: Page, evidence: TraceFigures) -> None:
    twin = json.loads(json.dumps(full_page.to_json(), allow_nan=False))
    depth = twin["sections"]["depth"]["data"][0]
    assert depth["num_at_risk"] == evidence.depths[0].num_at_risk
    assert len(twin["sections"]["category"]["data"]) == len(evidence.categories)


def reading_of(page: Page, key: str) -> str:
    [section] = [section for section in page.sections if section.key == key]
    return " ".join((section.reading, section.missing, *section.notes, section.basis))


COUNTS_ALONE, TIMED = replay_results(timed=False), replay_results()
ALL = Given(TIMED, ladder_results(), tune_results(), run_results())
SLIGHT = Given(ladder=ladder_results(policy_gain=1.05))  # a gain within its interval
STATIC = Given(tune=tune_results(beats=False))
NO_WINS = (
    ladder_results(scored_on_training_prompts=("mine",)),
    ladder_results(without_decision_cost={"mine": "svip"}),
    ladder_results(is_marked=True),  # the log lacks it
)
SLOW = ladder_results(plain=200.0)
ANSWERS = ("recommendation", "ladder")
HELD = TIMED.model_copy(
    update={
        "policies": tuple(
            one.model_copy(update={"pooled": one.pooled.model_copy(update={"is_marked": False})})
            for one in TIMED.policies
        )
    }
)
"""Of a log that holds what all draft."""
FREE: list[tuple[Given, str]] = [
    (Given(HELD.model_copy(update={"free_decisions": ("eagle2",)})), "policies"),
    *((Given(ladder=ladder_results(free_decisions=("mine",))), one) for one in ANSWERS),
    (Given(tune=tune_results().model_copy(update={"free_decisions": ("fancy",)})), ANSWERS[0]),
]
"""Verdicts on a stated clock."""
SAID: list[tuple[Given, str, str]] = [
    (Given(COUNTS_ALONE), "recommendation", "None yet. specctl tune finds one"),
    (Given(COUNTS_ALONE), "policies", "there are no times"),
    (Given(TIMED), "recommendation", "None yet. specctl tune finds one"),
    (Given(TIMED), "policies", "Fewest calls: chain 300. chain: τ 3.00 [2.90, 3.10] tokens"),
    (Given(TIMED), "policies", "No verdict on speed beside chain: see the notes."),
    (Given(TIMED, ladder_results()), "recommendation", "mine beats the best static setting: 1.20"),
    *((one, section, ", if decisions of ") for one, section in FREE),
    (Given(TIMED, ladder_results()), "recommendation", "which flatters it"),
    (
        ALL,
        "recommendation",
        "Best: fancy, × 1.300 [1.200, 1.400] of the best static, × 2.60 of plain.",
    ),
    (ALL, "recommendation", "77 settings on 30 prompts"),
    (ALL, "recommendation", "for 2.5 requests/s at batch size 4"),
    (ALL, "recommendation", "Batches are simulated."),
    (SLIGHT, "recommendation", "static is the best static setting. mine came out at"),
    (STATIC, "recommendation", "fancy, the best on training prompts, is × 1.300 [1.200, 1.400]"),
    (ALL, "policies", "the log lacks 2.0% of the expansions that it wants"),
    (
        ALL,
        "runs",
        "Fastest: best, 1.50 [1.40, 1.60] times as fast as plain decoding. All texts equal",
    ),
    (Given(run=run_results(same=False)), "runs", "The texts of best differ from plain decoding's"),
    (Given(run=run_results()), "caveats", "Measured runs are of one machine"),
    (Given(), "caveats", "No cost model: nothing here is a time"),
    (ALL, "ladder", "Best: mine, × 3.00 [2.90, 3.10] of plain decoding"),
    *((Given(ladder=one), "ladder", "Best: static, ") for one in NO_WINS),
    *((Given(ladder=SLOW), key, "Drafting does not pay here: static is") for key in ANSWERS),
    (ALL, "caveats", "replay.json was made from other traces"),
    (ALL, "caveats", "ladder.json was made from other traces"),
    (ALL, "caveats", "tune.json was made from other traces"),
]


@pytest.mark.parametrize(("given", "key", "words"), SAID, ids=[words[:30] for *_, words in SAID])
def test_strong_evidence_speaks(given: Given, key: str, words: str, evidence: TraceFigures) -> None:
    found = reading_of(build_page(evidence, given), key)
    assert words in found


def marks_of(given: Given) -> list[str]:
    answer = build_page(None, given).sections[0]
    return [f"{value}: {meaning}" for value, meaning in answer.marks]


def test_the_page_begins_with_the_answer(html: str, full_page: Page) -> None:
    """The setting, its gains as in tune.json, what is possible as in ladder.json, the settings of
    the engine and the picture, before anything else is linked to or told."""
    answer, text = full_page.sections[0], html.partition("<nav")[0]
    assert answer.setting == "fancy"
    assert [value for value, _ in answer.marks] == [
        "× 2.60 [2.50, 2.70]",
        "× 1.30 [1.20, 1.40]",
        "130 [130, 130]",
        "× 1.50 [1.40, 1.60]",
        "× 4.00 [3.90, 4.10]",
        "× 7.50 [7.40, 7.60]",
    ]
    parts = ("<h2", "<code>fancy</code>", "× 2.60", "vllm serve m", "Mind.", "<svg", "<table")
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "{&#34;a&#34;:<wbr> 1}" not in text  # as it is typed
    chart = answer.figures[0].chart
    assert [point for one in chart.series for point in one.names or ()] == [
        *("static", "plain decoding", "mine"),
        "fancy",
    ]


def test_short_names_of_a_table_stand_below_it_in_full(evidence: TraceFigures) -> None:
    long = ":".join(("fancy", *(f"setting_{number}=0.123456" for number in range(4))))
    tune = tune_results(beats=False)
    policies = [
        p.model_copy(update={"policy": p.policy.replace("fancy", long)}) for p in tune.policies
    ]
    changed = tune.model_copy(update={"policies": tuple(policies), "winner_on_train": long})
    text = build_page(evidence, Given(tune=changed)).html().replace("<wbr>", "")
    assert f'</table>\n</div>\n<p class="basis">fancy:…: {long}</p>' in text


def test_the_best_possible_is_that_of_the_tuned_load_or_none() -> None:
    ladder = ladder_results()
    assert any(
        "4.00" in mark for mark in marks_of(Given(None, ladder, tune_results(load=(1, None))))
    )
    for load in ((4, None), (1, 2.5)):
        last = marks_of(Given(None, ladder, tune_results(load=load)))[-1]
        assert last.startswith("(not comparable): the best possible")
    other = ladder_results(traces_digest="sha256:" + 64 * "9")
    last = marks_of(Given(None, other, tune_results(load=(1, None))))[-1]
    assert last.startswith("(not comparable)")
    assert (
        marks_of(STATIC)[-1] == "(no data supplied): the best possible: give --ladder ladder.json"
    )
    assert "× 1: it is the best static setting itself" in marks_of(STATIC)


def test_an_estimate_that_a_setting_beats_is_no_limit() -> None:
    ladder = ladder_results(policy_gain=1.7)
    assert "(not known): the best possible: mine beats its estimate" in marks_of(
        Given(None, ladder)
    )
    said = " ".join(map(str, ladder_parts(ladder)))
    assert "no headroom shown" in said
    assert "not known, as mine is faster than the estimate of R_prob" in said


def test_a_run_counts_for_the_artifact_that_was_tuned() -> None:
    """By its digest, or by its label in words; the name of another artifact says nothing."""
    run, tune = run_results(artifact_digest=ARTIFACT), tune_results()
    ours = "× 1.50 [1.40, 1.60]: the speed of plain decoding when it ran on a machine, 48 prompts"
    assert ours in marks_of(Given(tune=tune, run=run, artifact=ARTIFACT))
    assert ours not in marks_of(Given(tune=tune, run=run, artifact="sha256:" + 64 * "b"))
    assert ours not in marks_of(Given(tune=tune, run=run_results()))


def test_a_watch_is_drawn_and_said(full_page: Page) -> None:
    [section] = [one for one in full_page.sections if one.key == "drift"]
    assert section.reading.startswith("threshold no longer fits: the alarm rang at prompt 3 (")
    assert "before prompt 2" in section.reading
    assert any("× 0.80" in note for note in section.notes)
    chart = section.figures[0].chart
    assert [series.label for series in chart.series] == ["all", "tokens per call", "rings here"]
    assert max(chart.series[1].y) == 8
    quiet = drift_results(alarm=False, alarm_at=None, signals=(), price=None)
    page = build_page(None, Given(drift=quiet))
    assert "no alarm" in reading_of(page, "drift")
    [still] = (one.model_copy(update={"moved": False}) for one in drift_results().signals)
    by_day = build_page(None, Given(drift=drift_results(unit="day", signals=(still,))))
    assert "rang at day 3" in reading_of(by_day, "drift")


def test_sections_without_data_are_a_line_that_names_the_option(tmp_path: Path) -> None:
    traces = write_log(tmp_path / "log")
    for page, options in (
        (
            build_page(None, Given(COUNTS_ALONE)),
            ("--run", "--ladder", "--drift", "trace folders"),
        ),
        (build_page(trace_figures(traces), Given()), ("--results", "--run", "--ladder", "--drift")),
    ):
        empty = [section for section in page.sections[1:] if "(no data" in section.missing]
        for section, option in zip(empty, options, strict=True):
            assert section.missing.startswith("(no data supplied: give ")
            assert option in section.missing
            said = (section.reading, *section.tables, *section.figures, *section.notes)
            assert said == ("",)
        missing = [bool(section.missing) for section in page.sections[1:-1]]
        assert missing == sorted(missing), "behind all that has something to say"
        assert page.html().count('class="none"') == sum(missing)
        assert "<p" not in "".join(re.findall(r'class="none">.*?</h2>', page.html(), re.S))


def test_terms_are_explained_where_they_are_first_used(html: str) -> None:
    """In the text that is read, drawings included; titles stand in the list of sections before."""
    body = html.partition("<body>")[2]
    told = [term for term in TERMS if term in body]
    assert {"τ", "R_feat", "R_clair"} <= set(told)
    for term in told:
        before = body[: body.index(f"<dfn>{term}</dfn>")]
        section = before.rpartition("<section")[2]
        assert term not in before.removesuffix(section), term
        assert body.count(f"<dfn>{term}</dfn>") == 1


def test_text_breaks_between_settings_and_keeps_intervals() -> None:
    assert (
        folding("run eagle2:depth=5:top_k=2, at 1:2")
        == "run eagle2:<wbr>depth=5:<wbr>top_k=2, at 1:2"
    )
    assert folding("1.2 [1.1, 1.3].") == '1.2 <span class="whole">[1.1, 1.3]</span>.'
    assert folding("<b> [1, <i>]") == '&lt;b&gt; <span class="whole">[1, &lt;i&gt;]</span>'
    assert folding("- [n/a]") == "- [n/a]"
    assert folding("give --a-b") == 'give <span class="whole">--a-b</span>'


def test_few_prompts_the_fixture_and_no_categories_are_told(tmp_path: Path) -> None:
    prompts = [replace(prompt, category="") for prompt in TWO_PROMPTS]
    traces = write_log(tmp_path / "log", prompts, target="embedded")
    page = build_page(trace_figures(traces), Given())
    assert "The prompts carry no category" in reading_of(page, "category")
    assert [line.split(":")[0] for line in page.warnings] == [
        "These traces come from the embedded pair, a fixture for people and tests",
        "Only 2 prompts",
    ]


def test_the_machine_of_the_traces_is_named(evidence: TraceFigures) -> None:
    for machines, says in (
        (("AMD EPYC", "AMD Ryzen"), "Traces were collected on AMD EPYC and AMD Ryzen. Counts"),
        (None, "Traces name no hardware. Counts"),
    ):
        page = build_page(evidence.model_copy(update={"hardware": machines}), Given())
        assert says in reading_of(page, "caveats")


@pytest.mark.parametrize(
    ("calls", "gain", "says"),
    [
        (
            198,
            Interval(0.99, 0.95, 1.01),
            "No policy needs fewer calls than chain for sure: mine 198, ",
        ),
        (160, Interval(0.80, 0.75, 0.85), "Fewest calls: mine 160, chain 200."),
        (240, Interval(1.20, 1.10, 1.30), "Fewest calls: chain 200, mine 240."),
        (160, Interval(0.80, nan, nan), "mine 160, chain 200; too few prompts for an interval."),
    ],
)
def test_the_fewest_calls_are_those_beyond_chance(calls: int, gain: Interval, says: str) -> None:
    """In `replay` and on the page; and no policy that was fitted on these prompts wins."""
    plain = example(PolicyFigures, policy="chain", calls=200, is_marked=False)
    mine = plain.model_copy(update={"policy": "mine", "calls": calls, "against": {"calls": gain}})
    scores = replay_results(timed=False)
    assert says in fewest_calls(scores, [plain, mine])
    seen = scores.model_copy(update={"scored_on_training_prompts": ("mine",)})
    assert fewest_calls(seen, [plain, mine]) == "Fewest calls: chain 200."


SIZES: list[tuple[dict[str, int], str]] = [
    (
        {"maths": 8, "prose": 9, "one": 1},
        "Most is accepted in maths, τ 1.50 [1.50, 1.50], least in",
    ),
    ({"maths": 8, "prose": 7, "one": 1}, "Fewer than two categories have 8 prompts, so none are"),
    ({"maths": 7, "prose": 7}, "Fewer than two categories have 8 prompts, so none are"),
    ({"one": 7}, "All prompts are of one category, τ 3.00 [n/a] tokens per call."),
]


@pytest.mark.parametrize(("sizes", "says"), SIZES)
def test_no_sentence_compares_categories_of_few_prompts(
    sizes: dict[str, int], says: str, tmp_path: Path
) -> None:
    """One prompt that accepts everything is no category in which most is accepted."""
    paths: dict[str, list[tuple[int, ...]]] = {
        "maths": [(1,), (1,), ()], "prose": [(), (), ()], "one": [(1, 3), (1, 3), (1,)],
    }  # fmt: skip
    prompts = [
        replace(TWO_PROMPTS[0], prompt_id=f"{name}{n}", category=name, positions=paths[name])
        for name, number in sizes.items()
        for n in range(number)
    ]
    page = build_page(trace_figures(write_log(tmp_path / "log", prompts)), Given())
    by_key = {section.key: section for section in page.sections}
    section, depth = by_key["category"], by_key["depth"]
    assert section.reading.startswith(says)
    assert "one" not in section.reading.replace("one category", "").replace("none", "")
    for name, number, _, *figures in section.tables[0].rows:
        few = int(number) < 8
        assert all(("[n/a]" in cell) == few for cell in figures), (name, figures)
        assert (name in " ".join(section.notes)) == few
    on = sizes.get("maths", 0) + sizes.get("one", 0)  # prompts that go on to the second level
    ahead = "2 tokens" if on > 7 else "1 token"
    assert (f"and all {ahead} ahead" in depth.reading) == (sum(sizes.values()) > 7)
    assert ("weakest" in depth.reading) == (sum(sizes.values()) > 7)


def test_a_page_of_two_pairs_is_refused(tmp_path: Path) -> None:
    other = trace_figures(write_log(tmp_path / "log", drafter_digest="sha256:" + 64 * "1"))
    ladder = ladder_results(target_digest="sha256:" + 64 * "1")
    for figures, given, says in (
        (other, Given(replay_results()), r"replay\.json is of another pair: its drafter_digest"),
        (None, Given(ladder=ladder, run=run_results()), r"run\.json is of .* its target_digest"),
    ):
        with pytest.raises(TraceMismatchError, match=says):
            build_page(figures, given)


WHOLE = json.loads(replay_results().model_dump_json())
REFUSED = {
    "{": "text that is no JSON",
    "[]": "not an object",
    json.dumps({n: v for n, v in WHOLE.items() if n != "policies"}): "policies: it is missing",
    json.dumps(WHOLE | {"policies": []}): "policies: Tuple",
    json.dumps(WHOLE | {"kind": "ladder"}): "of kind 'ladder', and not what",
}


@pytest.mark.parametrize(("content", "found"), REFUSED.items(), ids=REFUSED.values())
def test_results_that_cannot_be_read_are_named(tmp_path: Path, content: str, found: str) -> None:
    path = tmp_path / "replay.json"
    path.write_text(content)
    with pytest.raises(InputError, match=re.escape(found)):
        read_given(replay=path)


def test_traces_without_a_draft_are_refused(tmp_path: Path) -> None:
    traces = live_traces(tmp_path / "live")
    with pytest.raises(TraceEmptyError, match="plain decoding"):
        trace_figures(traces)


def test_points_without_a_value_are_not_drawn() -> None:
    nan = float("nan")
    series = Series("a", [1, 2, 3], [1.0, nan, 2.0], [0.5, nan, nan], [1.5, nan, 3.0])
    text = Chart("alt", "x", "y", [series]).svg("chart")
    assert "nan" not in text
    marks = re.findall(r'<use [^>]*fill="var\(--s0\)"', text)
    assert len(marks) == 3  # two points and the legend's
