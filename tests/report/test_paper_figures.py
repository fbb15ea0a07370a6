"""Figures of the papers as they are drawn: their numbers, their titles, none without data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specctl.report.paper_figures import (
    PAPERS,
    ablation_figure,
    entropy_section,
    margin_section,
    profile_section,
    runtime_figure,
    threshold_section,
    utilisation_figure,
    utilisation_table,
)

from specctl import results
from specctl.replay.trace_figures import trace_figures
from specctl.report import Given, Page, build_page
from specctl.report.charts import Cells, Chart, Row, Rows, Series
from tests.replay.reports import TWO_PROMPTS, live_traces, write_log
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


def scored(features: tuple[str, ...] | None, tau: float) -> results.PolicyScores:
    ratios = {"mean_acceptance_length": around(tau), "verified_per_token": around(2 * tau)}
    pooled = example(results.PolicyFigures, ratios=ratios)
    name = "+".join(features or ("eagle2",))
    return results.PolicyScores(
        policy=name, scorer_features=features, pooled=pooled, by_category=()
    )


def of_policies(*policies: results.PolicyScores) -> results.ReplayScores:
    told = {"baseline": "eagle2", "policies": policies}
    return replay_results().model_copy(update=told)


def test_shares_of_time() -> None:
    run = run_results()
    times = {"draft_us": 30.0, "verify_us": 60.0, "policy_us": 0.0, "other_us": 10.0}
    policies = (run.policies[0].model_copy(update=times), run.policies[1])
    figure = runtime_figure(run.model_copy(update={"policies": policies}))
    [timed, without] = rows_of(figure.charts[0])
    assert timed.parts == pytest.approx([0.3, 0.6, 0, 0.1])
    assert without.parts == [0, 0, 0, 0], "no time: no bar, no division by 0"
    assert "Figure 1b of HeteroSpec" in figure.caption


def test_boxes_of_utilisation_by_category() -> None:
    """The most requests first; a policy that drafts nothing has no box."""
    of_all = example(results.PolicyFigures, utilisation=spread(0.5))
    groups = [
        example(results.PolicyFigures, group=name, num_requests=n, utilisation=spread(u))
        for name, n, u in (("code", 3, 0.3), ("prose", 9, 0.7))
    ]
    drafting = results.PolicyScores(policy="d", pooled=of_all, by_category=tuple(groups))
    idle = results.PolicyScores(
        policy="ar",
        pooled=example(results.PolicyFigures),
        by_category=tuple(group.model_copy(update={"utilisation": None}) for group in groups),
    )
    figure = utilisation_figure(of_policies(idle, drafting))
    assert figure is not None
    assert [chart.x_label for chart in figure.charts] == ["u, all requests", "u, prose", "u, code"]
    boxes = [[(row.name, row.box[2]) for row in rows_of(chart)] for chart in figure.charts]
    assert boxes == [[("d", 0.5)], [("d", 0.7)], [("d", 0.3)]]
    table = utilisation_table(of_policies(idle, drafting))
    assert table is not None
    assert table.rows == [("d", "40", "0.30", "0.40", "0.50", "0.60", "0.70", "0.55")]
    assert utilisation_figure(of_policies(idle)) is None
    assert utilisation_table(of_policies(idle)) is None
    alone = results.PolicyScores(policy="d", pooled=of_all, by_category=(groups[0],))
    one = utilisation_figure(of_policies(alone))
    assert one is not None
    assert len(one.charts) == 1, "one category is all requests"


def test_ablation_needs_two_sets_of_features() -> None:
    both, one = ("joint_prob", "depth"), ("joint_prob",)
    assert ablation_figure(of_policies(scored(None, 4.0), scored(one, 3.0))) is None
    assert ablation_figure(of_policies(scored(one, 4.0), scored(one, 3.0))) is None
    figure = ablation_figure(of_policies(scored(None, 4.0), scored(one, 3.0), scored(both, 3.5)))
    assert figure is not None
    lengths, verified = (rows_of(chart) for chart in figure.charts)
    assert [(row.name, row.parts) for row in lengths] == [
        ("eagle2: 4.00 [3.90, 4.10]", (4.0,)),
        ("joint_prob: 3.00 [2.90, 3.10]", (3.0,)),
        ("joint_prob + depth: 3.50 [3.40, 3.60]", (3.5,)),
    ]
    assert [row.parts for row in verified] == [(8.0,), (6.0,), (7.0,)]
    assert "Table 1 of C2T" in figure.caption
    page = build_page(None, Given(replay_results()))
    assert "specctl fit c2t TRACES --features" in " ".join(page.sections[1].notes)


def test_profiles_of_ranks() -> None:
    def profile(name: str | None, counts: tuple[int, ...]) -> results.RankProfile:
        taus = tuple(around(n + 1.0) if n else around(NAN) for n in range(1, len(counts) + 1))
        taus = tuple(t if n else around(NAN) for t, n in zip(taus, counts, strict=True))
        phis = tuple(1.0 if n else NAN for n in counts)
        return results.RankProfile(
            name=name, num_prompts=3, num_rounds=sum(counts), counts=counts, tau=taus, mean_phi=phis
        )

    profiles = (profile(None, (5, 0, 3, 2)), profile("a", (4, 0, 0, 2)), profile("b", (1, 0, 3, 0)))
    figures: Any = type("Figures", (), {"profiles": profiles})
    section = profile_section(figures, "of a tree")
    assert [row[1:] for row in section.tables[0].rows] == [
        ("3", "10", "1", "4", "3.20"),  # half by rank 1; (5 · 2 + 3 · 4 + 2 · 5) / 10
        ("3", "6", "1", "4", "3.00"),
        ("3", "4", "3", "3", "3.50"),
    ]
    assert "end at rank 1 or before, half of them, are 2.00 tokens" in section.reading
    assert "behind it 4.40" in section.reading
    bars = section.figures[2].charts[0].series[0]
    assert list(bars.y) == [0.25, 0, 0.75, 0]
    assert all("Figure 3 of HeteroSpec" in one.caption for one in section.figures[1:])
    figures.profiles = profiles[:2]
    alone = profile_section(figures, "of a tree")
    assert len(alone.figures) == 1, "one category is all rounds"
    assert "several categories" in alone.notes[0]


def test_heat_maps() -> None:
    """Intervals without tokens are left out, ranks without tokens are empty cells."""
    found = results.EntropyRanks(
        bounds=(0.0, 1.0, 2.0),
        num_nodes=((10, 10), (0, 0), (4, 0)),
        mean_prob=((0.9, 0.05), (NAN, NAN), (0.3, NAN)),
        accepted_frac=((0.8, 0.1), (NAN, NAN), (0.5, NAN)),
    )
    section = entropy_section(found, "2 prompts")
    charts = section.figures[0].charts
    assert [chart.y_names for chart in charts if isinstance(chart, Cells)] == 3 * [
        ["0 to 1", "from 2"]
    ]
    bias = charts[2]
    assert isinstance(bias, Cells)
    assert np.allclose(bias.values, [[-10, 5], [20, NAN]], equal_nan=True)
    texts = re.findall(r"<text [^>]*>([+-][\d.]+)</text>", bias.svg())
    assert sorted(texts) == ["+20", "+5", "-10"]
    assert "nan" not in bias.svg()
    assert "probability 90% and is accepted 80% of the time, -10.0 points" in section.reading
    assert "24 draft tokens" in section.basis


def test_margins() -> None:
    section = margin_section(target_margins(), "2 prompts")
    assert section.tables[0].rows == [
        ("ratio above 0.9", "3", "33.3%", "33.3%", "33.3%"),
        ("others", "7", "85.7%", "14.3%", "0.0%"),
    ]
    assert "negative at 10.0% of the positions; at 20.0% one of the two" in section.notes[0]
    logits, probs, ratios, kept = section.figures[0].charts
    others, low = logits.series
    assert (low.x, low.y) == ([5.0, 5.0, 5.0], [4.9, 4.8, 4.7])
    assert (others.x, others.y) == ([8.0], [2.0])
    assert [len(one.x) for one in probs.series] == [1, 3]
    assert probs.series[1].y[:2] == pytest.approx([0.4 * np.exp(-0.1), 0.3 * np.exp(-0.2)])
    assert ratios.series[1].x == pytest.approx([0.98, 0.96, 0.94])
    assert {one.label: len(one.x) for one in kept.series} == {
        "kept: best or second": 2,
        "rejected: lower": 1,
    }
    lines = [one.series[1].x for one in section.figures[1].charts]
    assert lines == [[0.0], [0.9], [0.9]]


def test_margins_without_probabilities_or_low_ones() -> None:
    sample = target_margins().sample
    unknown = sample.model_copy(update={"first_prob": 4 * (NAN,)})
    assert len(margin_section(target_margins(sample=unknown), "").figures[0].charts) == 3
    sure = sample.model_copy(update={"second_logit": 4 * (1.0,)})
    section = margin_section(target_margins(sample=sure, low_ranks=(0, 0, 0)), "")
    assert [row[1:] for row in section.tables[0].rows][0] == ("0", "-", "-", "-")
    assert len(section.figures[0].charts) == 3, "nothing to zoom in on"
    negative = sample.model_copy(update={"first_logit": 4 * (-1.0,), "second_logit": 4 * (-2.0,)})
    assert all(
        "nan" not in chart.svg()
        for chart in margin_section(target_margins(sample=negative), "").figures[0].charts
    )


def test_thresholds(tmp_path: Path) -> None:
    found = trace_figures(write_log(tmp_path / "log")).thresholds
    section = threshold_section(found)
    assert [figure.caption.partition(" As ")[2][:8] for figure in section.figures] == [
        "Figure 2",
        "",
    ], "no distances: no figure 3"
    assert "the paper draws no such figure" in section.figures[1].caption
    assert any("no js_distance" in note for note in section.notes)
    assert found is not None
    never = found.model_copy(
        update={"entropy": (spread(1.0), None), "num_at": (0,), "quartiles": 3 * ((NAN,),)}
    )
    without = threshold_section(never)
    assert without.reading == "No token was rejected, so no threshold was learned."
    assert len(without.figures) == 1


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    traces = write_log(tmp_path_factory.mktemp("log") / "traces", TWO_PROMPTS)
    figures = trace_figures(traces).model_copy(update={"margins": target_margins()})
    return build_page(figures, Given(replay_results(), run=run_results()))


def test_every_figure_of_a_paper_names_it_and_its_n(page: Page) -> None:
    names = re.compile(r"As (?:Figures? [\w, ]+|Table \d) of (\w+), (arXiv:[\d.]+)\.$")
    found = {}
    for section in page.sections:
        for figure in section.figures:
            if " of " in figure.caption and "arXiv" in figure.caption:
                named = names.search(figure.caption)
                if named is None:
                    assert "draws no such figure" in figure.caption
                    continue
                found[named[1]] = named[2]
                assert "n = " in section.basis
    assert found == {paper: number for paper, number in PAPERS.items() if paper != "C2T"} | {
        "C2T": PAPERS["C2T"]
    }


def test_without_data_a_line_says_what_brings_it(tmp_path: Path) -> None:
    parent, match = (-1, 0, 0), (None, True, False)
    live = live_traces(tmp_path / "live", parent, (0, 1, 2), (0, 1, 1), match, offered_depth=1)
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
    short, long = (Series("", list(range(n)), n * [1.0]) for n in (5, 60))
    uses = [Chart("alt", "x", "y", [one]).svg().count('fill="var(--s0)"') for one in (short, long)]
    assert uses[0] > uses[1] == 0


def test_narrow_rows_keep_their_height() -> None:
    rows = Rows.of("alt", "u", [Row(str(n), (0.5,)) for n in range(12)])
    boxes = re.findall(r'viewBox="0 0 (\d+) (\d+)" class="chart (\w+)"', rows.markup())
    assert boxes == [("640", str(rows.height), "wide"), ("360", str(rows.height), "narrow")]
    assert replace(rows, width=340).markup().count("<svg") == 1
