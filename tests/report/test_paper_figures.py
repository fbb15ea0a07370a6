"""Figures of the papers as they are drawn: their numbers, their sources, none without data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specctl import results
from specctl.replay.trace_figures import trace_figures
from specctl.report import Given, Page, build_page
from specctl.report.charts import MANY, Cells, Chart, Row, Rows, Series
from specctl.report.page import Section
from specctl.report.paper_figures import (
    entropy_section,
    margin_section,
    tcr_section,
    threshold_section,
)
from specctl.report.result_sections import policies_section, runs_section
from tests.replay.logs import random_traces
from tests.replay.reports import live_traces
from tests.report.examples import (
    around,
    example,
    replay_results,
    run_results,
    spread,
    target_margins,
)

NAN = float("nan")


def rows_of(chart: Chart) -> Sequence[Row]:
    assert isinstance(chart, Rows)
    return chart.rows


def of_policies(*policies: results.PolicyScores) -> Section:
    told = {"baseline": "eagle2", "policies": policies}
    return policies_section(replay_results().model_copy(update=told))


def of_traces(**fields: Any) -> results.TraceFigures:
    found: results.TraceFigures = example(results.TraceFigures, **fields)
    return found


# ----------------------------------------------------------------- of results


def test_shares_of_time() -> None:
    run = run_results()
    times = {"draft_us": 30.0, "verify_us": 60.0, "policy_us": 0.0, "other_us": 10.0}
    policies = (run.policies[0].model_copy(update=times), run.policies[1])
    [figure] = runs_section(run.model_copy(update={"policies": policies})).figures
    [timed, without] = rows_of(figure.charts[0])
    assert timed.parts == pytest.approx([0.3, 0.6, 0, 0.1])
    assert without.parts == [0, 0, 0, 0], "no time: no bar, no division by 0"


def drafting(name: str, whole: float | None, **groups: tuple[int, float | None]) -> Any:
    def figures(group: str, num: int, median: float | None) -> results.PolicyFigures:
        told: dict[str, Any] = {"policy": name, "group": group, "num_requests": num}
        told |= {"utilisation": None if median is None else spread(median), "ratios": SCORED}
        found: results.PolicyFigures = example(results.PolicyFigures, **told)
        return found

    by_category = tuple(figures(group, *told) for group, told in groups.items())
    return results.PolicyScores(
        policy=name, pooled=figures("all", 12, whole), by_category=by_category
    )


SCORED = {"mean_acceptance_length": around(4.0), "verified_per_token": around(8.0)}


def test_boxes_of_utilisation_by_category() -> None:
    """The most requests first; a policy that drafts nothing has no box, no draft no figure."""
    idle = drafting("ar", None, code=(3, None), prose=(9, None))
    section = of_policies(idle, drafting("d", 0.5, code=(3, 0.3), prose=(9, 0.7)))
    [boxes] = section.figures
    assert [chart.x_label for chart in boxes.charts] == ["u, all requests", "u, prose", "u, code"]
    drawn = [[(row.name, row.box and row.box.median) for row in rows_of(c)] for c in boxes.charts]
    assert drawn == [[("d", 0.5)], [("d", 0.7)], [("d", 0.3)]]
    assert section.tables[1].rows == [("d", "40", "0.30", "0.40", "0.50", "0.60", "0.70", "0.55")]
    nothing = of_policies(idle)
    assert not nothing.figures
    assert len(nothing.tables) == 1
    [alone] = of_policies(drafting("d", 0.5, code=(3, 0.3))).figures
    assert len(alone.charts) == 1, "one category is all requests"


def scored(features: tuple[str, ...] | None, tau: float, **others: Any) -> results.PolicyScores:
    ratios = {"mean_acceptance_length": around(tau), "verified_per_token": around(2 * tau)}
    name = "+".join(features or ("eagle2",))
    pooled = example(results.PolicyFigures, policy=name, ratios=ratios, **others)
    return results.PolicyScores(
        policy=name, scorer_features=features, pooled=pooled, by_category=()
    )


BOTH, ONE = ("joint_prob", "depth"), ("joint_prob",)


def test_ablation_by_features() -> None:
    """Marked policies are ranges: of 100 tokens in 20 to 50 calls, 2 to 5 tokens a call."""
    bounds = {
        "calls": results.Bound(low=20, high=50),
        "tokens_per_call": results.Bound(low=2, high=5),
        "verified_tokens": results.Bound(low=300, high=900),
    }
    lacking = scored(BOTH, 3.5, bounds=bounds, is_marked=True, num_tokens=100)
    [figure] = of_policies(scored(None, 4.0), scored(ONE, 3.0), lacking).figures
    lengths, verified = (rows_of(chart) for chart in figure.charts)
    assert [(row.name, row.parts) for row in lengths] == [
        ("eagle2: 4.00 [3.90, 4.10]", (4.0,)),
        ("joint_prob: 3.00 [2.90, 3.10]", (3.0,)),
        ("joint_prob + depth*: 2.00 to 5.00", ()),
    ]
    assert [row.parts for row in verified] == [(8.0,), (6.0,), ()]
    assert verified[2].ends == (3.0, 9.0)


@pytest.mark.parametrize("first", [None, ONE])
def test_ablation_needs_two_sets_of_features(first: tuple[str, ...] | None) -> None:
    section = of_policies(scored(first, 4.0), scored(ONE, 3.0))
    assert not section.figures
    assert "specctl fit c2t TRACES --features" in " ".join(section.notes)


# ----------------------------------------------------------------- of traces


def ranked(name: str | None, counts: tuple[int, ...]) -> results.RankedRounds:
    return results.RankedRounds(
        name=name,
        num_prompts=3,
        num_rounds=sum(counts),
        counts=counts,
        tau=tuple(around(n + 1.0 if num else NAN) for n, num in enumerate(counts, 1)),
        mean_phi=tuple(0.5 * n if num else NAN for n, num in enumerate(counts, 1)),
        quantiles={"p50": 1, "p90": 4, "p99": 4},
    )


def test_ranks() -> None:
    categories = ranked("a", (4, 0, 0, 2)), ranked("b", (1, 0, 3, 0))
    told: dict[str, Any] = {"whole": ranked(None, (5, 0, 3, 2)), "num_draft_tokens": 4}
    told |= {"top_shares": {"25%": around(0.5)}, "num_empty": 0, "num_cut": 0}
    found = results.TerminalRanks(categories=categories, **told)
    section = tcr_section(of_traces(ranks=found))
    shares, lengths, each = section.figures
    drawn = [list(chart.series[0].y) for chart in (*shares.charts, *lengths.charts)]
    assert np.allclose(drawn[:2], [[0.5, 0, 0.3, 0.2], [0.5, 0.5, 0.8, 1]])
    assert np.allclose(drawn[2:], [[2, NAN, 4, 5], [0.5, NAN, 1.5, 2]], equal_nan=True)
    assert [chart.x_label for chart in each.charts[::2]] == ["TCR (rank), a", "TCR (rank), b"]
    assert list(each.charts[2].series[0].y) == [0.25, 0, 0.75, 0]
    assert [row[0] for row in section.tables[1].rows] == ["all", "a", "b"]
    alone = found.model_copy(update={"categories": categories[:1]})
    section = tcr_section(of_traces(ranks=alone))
    assert len(section.figures) == 2, "one category is all rounds"
    assert "several categories" in section.notes[1]


def test_heat_maps() -> None:
    """Intervals without tokens are left out, ranks without tokens are empty cells."""
    found = results.EntropyRanks(
        bounds=(0.0, 1.0, 2.0),
        num_nodes=((10, 10), (0, 0), (4, 0)),
        mean_prob=((0.9, 0.05), (NAN, NAN), (0.3, NAN)),
        accepted_frac=((1.0, 0.1), (NAN, NAN), (0.5, NAN)),
    )
    section = entropy_section(of_traces(entropy_ranks=found))
    charts = section.figures[0].charts
    names = [chart.y_names for chart in charts if isinstance(chart, Cells)]
    assert names == 3 * [["0 to 1", "from 2"]]
    bias = charts[2]
    assert isinstance(bias, Cells)
    assert np.allclose(bias.values, [[10, 5], [20, NAN]], equal_nan=True)
    assert re.findall(r"<text [^>]*>(\+\d+)</text>", bias.svg()) == ["+10", "+5", "+20"]
    assert "nan" not in bias.svg()
    assert "probability 90% and is accepted 100% of the time, +10.0 points" in section.reading
    assert "24 draft tokens" in section.basis


def test_margins() -> None:
    section = margin_section(of_traces(margins=target_margins()))
    assert section.tables[0].rows == [
        ("above", "3", "33.3%", "33.3%", "33.3%"),
        ("others", "7", "85.7%", "14.3%", "0.0%"),
    ]
    assert "negative at 10.0% of the positions; at 20.0% one of the two" in section.notes[0]
    logits, probs, ratios, kept = section.figures[0].charts
    others, relaxed = logits.series
    assert (relaxed.x, relaxed.y) == ([5.0], [4.8]), "above the threshold, and the second"
    assert (others.x, others.y) == ([5.0, 5.0, 8.0], [4.9, 4.7, 2.0])
    assert [len(one.x) for one in probs.series] == [2, 1], "one probability is not known"
    assert probs.series[1].y == pytest.approx([0.3 * np.exp(-0.2)])
    assert ratios.series[1].x == pytest.approx([0.96])
    assert {one.label: len(one.x) for one in kept.series} == {
        "rejected: lower": 1,
        "kept: best or second": 2,
    }
    histograms = section.figures[1].charts
    assert [chart.series[1].x for chart in histograms] == [[0.0], [0.9], [0.9]]
    assert list(histograms[1].series[0].x) == [0.25, 0.75]


def test_margins_without_probabilities_or_close_ones() -> None:
    def scatters(**told: Any) -> Section:
        return margin_section(of_traces(margins=target_margins(**told)))

    unknown = scatters(sample=((5.0, 4.9, NAN, 1), (8.0, 2.0, NAN, 1)))
    assert len(unknown.figures[0].charts) == 3
    sure = scatters(sample=((5.0, 1.0, 0.9, 1),), low_ranks=(0, 0, 0))
    assert sure.tables[0].rows[0] == ("above", "0", "-", "-", "-")
    assert len(sure.figures[0].charts) == 3, "none is close"
    for pair in ((-1.0, -2.0), (0.0, -1.0), (1.0, 0.0)):
        [logits, probs] = scatters(sample=((*pair, 0.9, 1),)).figures[0].charts
        assert (list(logits.series[0].x), list(probs.series[0].x)) == ([pair[0]], [0.9])


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> results.TraceFigures:
    traces = random_traces(tmp_path_factory.mktemp("log") / "traces", num_prompts=6, depth=4)
    return trace_figures(traces).model_copy(update={"margins": target_margins()})


def test_thresholds(figures: results.TraceFigures) -> None:
    """The traces hold no distances, so there is no figure 3; a request may never reject."""
    found = figures.thresholds
    assert found is not None
    section = threshold_section(figures)
    boxes, paths = section.figures
    assert (boxes.source, paths.source) == (("AdaSD", "Figure 2"), None)
    assert "the paper draws no such figure" in paths.caption
    assert any("no js_distance" in note for note in section.notes)
    middle, *single = paths.charts[0].series
    assert middle.y == found.quartiles[1]
    assert [one.y for one in single] == list(found.paths)
    rejected = found.rejected.model_copy(update={"entropy": None})
    never = {"rejected": rejected, "quartiles": 3 * ((NAN,),), "paths": ()}
    told = {"thresholds": found.model_copy(update=never)}
    section = threshold_section(figures.model_copy(update=told))
    assert (
        section.reading
        == "No request learned a threshold: none rejected a token before its last round."
    )
    assert len(section.figures) == 1
    half = 24 * (0,) + (1, 3) + 24 * (0,)
    distances = {"accepted": found.accepted.model_copy(update={"distances": half})}
    distances |= {"rejected": found.rejected.model_copy(update={"distances": 50 * (0,)})}
    told = {"thresholds": found.model_copy(update=distances)}
    density = threshold_section(figures.model_copy(update=told)).figures[1]
    assert density.source == ("AdaSD", "Figure 3")
    accepted, rejected = density.charts[0].series
    assert list(accepted.y)[23:27] == pytest.approx([0, 12.5, 37.5, 0]), "steps of .02"
    assert not any(rejected.y)
    assert rejected.label == "first rejected (n=0)"


# ----------------------------------------------------------------- of the page


@pytest.fixture(scope="module")
def page(figures: results.TraceFigures) -> Page:
    return build_page(figures, Given(replay_results(), run=run_results()))


def test_figures_of_papers_name_them_and_their_n(page: Page) -> None:
    found = {
        figure.source: section
        for section in page.sections
        for figure in section.figures
        if figure.source is not None
    }
    assert {f"{paper} {name.rstrip(',').split(',')[0]}" for paper, name in found} >= {
        *("HeteroSpec Figure 1b", "HeteroSpec Figures 1c and 1e", "HeteroSpec Figures 1d and 4"),
        *("C2T Figure 2", "ECHO Figure 2", "ECHO Figure 4", "MARS Figure 1", "MARS Figure 5"),
        "AdaSD Figure 2",
    }
    assert all("n = " in section.basis for section in found.values())
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page.html(), re.S)
    told = [re.search(r" As (\w+) [^.]* of (\w+), arXiv:[\d.]+\.$", text) for text in captions]
    assert sum(one is not None for one in told) == len(found)


def test_without_data_a_line_says_what_brings_it(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"parent": (-1, 0, 0), "index": (0, 1, 2), "depth": (0, 1, 1)}
    live = live_traces(tmp_path / "live", **columns, match=(None, True, False), offered_depth=1)
    page = build_page(trace_figures(live), Given())
    said = {section.key: section for section in page.sections}
    for key, words in (
        ("entropy", "specctl collect --dense"),
        ("margins", "specctl collect logs them"),
        ("thresholds", "Collect with --dense."),
        ("policies", "--results"),
        ("runs", "--run"),
    ):
        assert words in said[key].missing
        assert not said[key].figures


def test_marks_of_a_line_go_where_points_are_many() -> None:
    short, long = (Series("", list(range(n)), n * [1.0]) for n in (MANY, MANY + 1))
    uses = [Chart("alt", "x", "y", [one]).svg().count('fill="var(--s0)"') for one in (short, long)]
    assert uses[0] > uses[1] == 0


def test_long_names_keep_both_ends() -> None:
    rows = Rows.of("alt", "u", [Row("c2t:" + 20 * "folder/" + "fit", (0.5,))])
    [name] = re.findall(r">(c2t:[^<]*)<", rows.svg())
    assert len(name) < 62
    assert name.startswith("c2t:folder/")
    assert name.endswith("/folder/fit")
