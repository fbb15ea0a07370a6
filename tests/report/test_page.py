"""The page: words for every kind of evidence, escaping, nothing loaded, readable in both themes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from specctl import results
from specctl.errors import InputError, TraceEmptyError, TraceMismatchError
from specctl.formatting import Table, listed
from specctl.replay.trace_figures import trace_figures
from specctl.report import Given, Page, build_page, read_given, write_page
from specctl.report.charts import Chart, Series
from specctl.stats import Interval
from tests.replay.logs import random_traces
from tests.replay.reports import TWO_PROMPTS, live_traces, write_log

HOSTILE = "<script>alert('x')</script><img src=//evil.example/x>\"'&$a$"
CHROMIUM = shutil.which("chromium")
DIGESTS = ("traces_digest", "target_digest", "drafter_digest", "cost_model")
FACTS: dict[str, Any] = {
    **dict.fromkeys(DIGESTS, "sha256:" + 64 * "0"),
    "target": "tiny",
    "drafter": "small",
    "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0},
    "support": {"top_k": 4, "width": 4, "depth": 4, "nested": True},
}


SIZES = results.SideSizes(train=30, held_out=31)


def example(record: Any, /, **given: Any) -> Any:
    """A record with the given fields, all others of the plainest value of their type."""

    def plain(wanted: Any) -> Any:
        origin = get_origin(wanted)
        if origin in (tuple, dict):
            return origin()
        if origin is Literal:
            return get_args(wanted)[0]
        if wanted is Interval:
            return around(1.0)
        if isinstance(wanted, type) and issubclass(wanted, BaseModel):
            return example(wanted)
        return wanted(0) if isinstance(wanted, type) else None

    rest = {n: plain(f.annotation) for n, f in record.model_fields.items() if n not in given}
    return record(**rest, **given)


def around(value: float, apart: float = 0.1) -> Interval:
    return Interval(value, value - apart, value + apart)


def replay_results(*, timed: bool = True, label: str = "eagle2") -> results.ReplayScores:
    policies = []
    for name, calls, rate, is_marked in (("chain", 300, 100.0, False), (label, 200, 150.0, True)):
        ratios = {"mean_acceptance_length": around(3.0), "verified_per_token": around(2.0)}
        ratios |= {"tokens_per_s": around(rate, 5.0)} if timed else {}
        against = {"calls": around(0.9)} | ({"time_us": around(0.8)} if timed else {})
        pooled = example(
            results.PolicyFigures,
            policy=name,
            num_prompts=40,
            calls=calls,
            expansion_support=0.98 if is_marked else 1.0,
            is_marked=is_marked,
            ratios=ratios,
            bounds={"calls": results.Bound(low=calls - 3.0, high=calls + 9.0)},
            against=against,
        )
        policies.append(results.PolicyScores(policy=name, pooled=pooled, by_category=()))
    return example(results.ReplayScores, baseline="chain", policies=tuple(policies), **FACTS)


def ladder_results(*, policy_gain: float = 1.2) -> results.LadderResult:
    rates = {"plain ar": 40.0, "tree static": 100.0, "policy mine": 100 * policy_gain}
    rates |= {"features R_feat": 150.0, "ceiling R_ceil": 400.0}
    rungs = []
    for name, rate in rates.items():
        kind, label = name.split()
        told = {"tokens_per_s": around(rate, 3.0), "against_static": around(rate / 100.0)}
        rungs.append(example(results.Rung, kind=kind, label=label, setting="as given", **told))
    told = {"rungs": tuple(rungs), "best_static": "static", "num_prompts": SIZES}
    return example(results.LadderResult, **told, **FACTS)


def tune_results(*, beats: bool = True) -> results.TuneResult:
    policies = []
    for name, rate, gain in (("static", 100.0, 1.0), ("fancy", 130.0, 1.3)):
        held_out = example(results.HeldOutStanding, rate=around(rate), against=around(gain))
        policies.append(example(results.Standing, policy=name, family=name, held_out=held_out))
    return example(
        results.TuneResult,
        load=results.TunedLoad(batch_size=4, arrival_rate_per_s=2.5),
        approximations="Batches are simulated.",
        objective=example(
            results.TunedObjective, kind="latency", meaning="tokens/s that a request sees"
        ),
        chosen="fancy" if beats else "static",
        beats_static=beats,
        baseline="static",
        winner_on_train="fancy",
        num_settings=77,
        num_prompts=SIZES,
        policies=tuple(policies),
        **FACTS,
    )


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> results.TraceFigures:
    traces = random_traces(tmp_path_factory.mktemp("log") / "traces", num_prompts=6, depth=4)
    return trace_figures(traces)


@pytest.fixture(scope="module")
def full_page(evidence: results.TraceFigures) -> Page:
    return build_page(evidence, Given(replay_results(), ladder_results(), tune_results()))


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
    assert len(figures) > 10
    assert not re.search(r"<svg(?:(?!</svg>).)*#[0-9a-f]{6}\b", html, re.S), "themes give colours"
    assert all(svg["role"] == "img" and len(svg["aria-label"] or "") > 30 for svg in figures)
    assert all(head.get("scope") in ("col", "row") for head in outline.of("th"))
    assert len(outline.of("caption")) == len(outline.of("table"))
    anchors = {section["id"] for section in outline.of("section")}
    assert {a["href"] for a in outline.of("a")} == {f"#{anchor}" for anchor in anchors}


def test_every_section_says_something_and_on_what(full_page: Page) -> None:
    keys = [section.key for section in full_page.sections]
    of_traces = ["pareto", "depth", "category", "tcr", "phi", "confidence"]
    assert keys == ["recommendation", "policies", "ladder", *of_traces, "caveats"]
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


def test_json_twin_is_json_and_holds_the_figures(
    full_page: Page, evidence: results.TraceFigures
) -> None:
    twin = json.loads(json.dumps(full_page.to_json(), allow_nan=False))
    depth = twin["sections"]["depth"]["data"][0]
    assert depth["num_at_risk"] == evidence.depths[0].num_at_risk
    assert twin["sections"]["confidence"]["data"]["edges"][-1] == 1
    assert len(twin["sections"]["pareto"]["data"]) == len(evidence.statics)


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_colours_have_contrast(theme: str) -> None:
    """WCAG 2.1: 4.5 for text, 3 for graphical objects (criteria 1.4.3 and 1.4.11)."""
    css = (files("specctl.report") / "templates" / "page.css").read_text("utf-8")
    blocks = [
        dict(re.findall(r"--([\w-]+): (#\w+);", b)) for b in re.findall(r":root {(.*?)}", css, re.S)
    ]
    colours = dict(zip(("light", "dark", "print"), blocks, strict=True))[theme]
    texts = {"ink paper", "soft paper", "soft box", "ink box", "link paper", "warn warn-box"}
    least = dict.fromkeys(texts, 4.5) | {f"s{style} paper": 3.0 for style in range(7)}
    for pair, ratio in least.items():
        assert contrast(*(colours[name] for name in pair.split())) >= ratio, pair


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def reading_of(page: Page, key: str) -> str:
    [section] = [section for section in page.sections if section.key == key]
    return " ".join((section.reading, section.missing, *section.notes, section.basis))


UNTIMED, TIMED = replay_results(timed=False), replay_results()
ALL = Given(TIMED, ladder_results(), tune_results())
SLIGHT = Given(ladder=ladder_results(policy_gain=1.05))  # a gain within its interval
STATIC = Given(tune=tune_results(beats=False))
SAID: list[tuple[Given, str, str]] = [
    (Given(UNTIMED), "recommendation", "None is made. Time was not judged"),
    (Given(UNTIMED), "policies", "nothing is said of time"),
    (Given(TIMED), "recommendation", "Of the policies replayed, eagle2 is fastest"),
    (Given(TIMED), "recommendation", "which flatters it"),
    (Given(TIMED, ladder_results()), "recommendation", "Run mine (as given): 1.20"),
    (ALL, "recommendation", "Run fancy: 1.300 [1.200, 1.400] times"),
    (ALL, "recommendation", "77 settings on 30 prompts"),
    (ALL, "recommendation", "for 2.5 requests/s at batch size 4"),
    (ALL, "recommendation", "Batches are simulated."),
    (SLIGHT, "recommendation", "Run static (as given), the"),
    (STATIC, "recommendation", "Run static, the best static setting."),
    (ALL, "policies", "eagle2 is marked"),
    (ALL, "policies", "bounded by 197 to 209"),
    (ALL, "caveats", "Support under 99%, bounds given: eagle2."),
    (ALL, "caveats", "replay.json was made from other traces"),
    (ALL, "caveats", "ladder.json was made from other traces"),
    (ALL, "caveats", "tune.json was made from other traces"),
]


@pytest.mark.parametrize(("given", "key", "words"), SAID, ids=[words[:30] for *_, words in SAID])
def test_strong_evidence_speaks(
    given: Given, key: str, words: str, evidence: results.TraceFigures
) -> None:
    found = reading_of(build_page(evidence, given), key)
    assert words in found
    assert not words.startswith("Run ") or found.startswith(words)


def test_few_prompts_the_fixture_and_no_categories_are_told(tmp_path: Path) -> None:
    prompts = [replace(prompt, category="") for prompt in TWO_PROMPTS]
    traces = write_log(tmp_path / "log", prompts, target="embedded")
    page = build_page(trace_figures(traces), Given())
    assert "The prompts carry no category" in reading_of(page, "category")
    assert [line.split(":")[0] for line in page.warnings] == [
        "These traces come from the embedded pair, a fixture for people and tests",
        "Only 2 prompts",
    ]


def test_results_alone_make_a_page() -> None:
    page = build_page(None, Given(replay_results()))
    keys = [section.key for section in page.sections]
    assert keys == ["recommendation", "policies", "ladder", "caveats"]
    assert page.title.endswith("tiny + small")


def test_a_page_of_two_pairs_is_refused(tmp_path: Path) -> None:
    other = trace_figures(write_log(tmp_path / "log", drafter_digest="sha256:" + 64 * "1"))
    with pytest.raises(TraceMismatchError, match=r"replay\.json, drafter_digest"):
        build_page(other, Given(replay_results()))


WHOLE = json.loads(replay_results().model_dump_json())
REFUSED = {
    "{": "text that is no JSON",
    "[]": "not an object",
    json.dumps({n: v for n, v in WHOLE.items() if n != "policies"}): "policies: it is missing",
    json.dumps(WHOLE | {"policies": []}): "policies: Tuple",
    json.dumps(WHOLE | {"kind": "ladder"}): "kind: not 'replay'",
}


@pytest.mark.parametrize(("content", "found"), REFUSED.items(), ids=REFUSED.values())
def test_results_that_cannot_be_read_are_named(tmp_path: Path, content: str, found: str) -> None:
    path = tmp_path / "replay.json"
    path.write_text(content)
    with pytest.raises(InputError, match=re.escape(found)):
        read_given(path)


def test_traces_without_a_draft_are_refused(tmp_path: Path) -> None:
    traces = live_traces(tmp_path / "live")
    with pytest.raises(TraceEmptyError, match="plain decoding alone"):
        trace_figures(traces)


def test_points_without_a_value_are_not_drawn() -> None:
    nan = float("nan")
    series = Series("a", [1, 2, 3], [1.0, nan, 2.0], [0.5, nan, nan], [1.5, nan, 3.0])
    text = Chart("alt", "x", "y", [series]).svg()
    assert "nan" not in text
    marks = re.findall(r'<use [^>]*fill="var\(--s0\)"', text)
    assert len(marks) == 3  # two points and the legend's


def test_numbers_read_well() -> None:
    assert listed(["a", "b", "c"]) == "a, b and c"
    known, unknown = (
        SimpleNamespace(name=name, of=SimpleNamespace(value=value), seen=seen)
        for name, value, seen in (("x", 0.5, around(1.0)), ("y", None, float("nan")))
    )
    columns = {"name": "name", "share": "of.value:.0%", "seen": "seen:.1f"}
    table = Table.of("T", [known, unknown], columns, "legend")
    assert table.columns == ("name", "share", "seen")
    assert table.rows == [["x", "50%", "1.0 [0.9, 1.1]"], ["y", "-", "-"]]


def chromium(folder: Path, page: Path, *options: str) -> tuple[str, str]:
    """Output of headless Chromium and what the page's console said."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--v=0"]
    done = subprocess.run(
        [*command, *options, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_chromium_renders_it_without_a_word_on_the_console(full_page: Page, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(full_page, path)
    picture = tmp_path / "page.png"
    size = "--window-size=1100,2000"
    _, console = chromium(tmp_path, path, f"--screenshot={picture}", size)
    assert console == ""
    assert num_colours(picture) > 50  # styled: without its style sheet the page is black on white
    # The policy is in force: a page that asks for a script is told so.
    text = path.read_text("utf-8").replace("</main>", "<script>0</script></main>")
    path.write_text(text, "utf-8")
    _, console = chromium(tmp_path, path, "--dump-dom")
    assert "Content Security Policy" in console


def num_colours(picture: Path) -> int:
    from matplotlib.image import imread
    from numpy import unique

    return len(unique(imread(picture)[::2, ::2, :3].reshape(-1, 3), axis=0))
