"""Families and their grids: stated, bounded, within the log, refused in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts import Origin, load_artifact, save_artifact
from specctl.errors import UsageError
from specctl.policy import (
    EntropyBins,
    MarginalBudget,
    Policy,
    ScoredTree,
    SparseGates,
    SurvivalBudget,
    build_shape,
)
from specctl.replay.tune.candidates import (
    Conditions,
    Grown,
    grow,
    listed_families,
    parse_families,
    static_families,
)
from tests.artifacts.examples import EVIDENCE, FFN, PAIR, POLICIES
from tests.replay.tune_cases import COSTS, SUPPORT

CONDITIONS = Conditions(
    PAIR, SUPPORT, batch_size=4, step_costs=lambda rule: COSTS, tokens_per_s=200.0
)
WIDE = replace(CONDITIONS, support=replace(SUPPORT, top_k=10, depth=20))
Save = Callable[[Policy], Path]


def grown(name: object, *grids: str, conditions: Conditions = CONDITIONS) -> Grown:
    [family] = parse_families([str(name)], grids, PAIR)
    return grow(family, conditions)


def shapes_of(candidates: Any) -> list[Any]:
    return [candidate.policy.shape for candidate in candidates]


def test_every_stated_grid_is_of_policies() -> None:
    """Nothing that `--show-grid` prints is refused by the records it stands for."""
    for family in (*listed_families((), ()), *static_families(10)):
        found = grow(family, WIDE)
        assert found.searched.num_out_of_range == 0, family.name
        assert len({c.label for c in found.candidates}) == len(found.candidates) > 0
        assert family.grid_rows()


@pytest.mark.parametrize(
    ("name", "grids", "counts"),
    [
        # 18 points; 3 nodes are no tree of 4 or 6 levels: 6 contradict. Of the 12 left, depth 6
        # (3 of them) and top_k 4 (3 of depth 2 and 4) are beyond 4 levels of top_k 3: 6 remain.
        ("eagle2", ("depth=2,4,6", "top_k=2,3,4", "num_tokens=3,8"), (6, 6)),
        ("eagle2:depth=4", ("num_tokens=3,8", "top_k=2"), (0, 1)),
        ("svip:window=3", (), (0, 8)),
        ("confidence", ("window=4,5,20", "threshold=0.5"), (2, 1)),
    ],
)
def test_a_grid_is_every_combination_less_what_is_no_tree_or_outside(
    name: str, grids: tuple[str, ...], counts: tuple[int, int]
) -> None:
    candidates, found = grown(name, *grids)
    assert (found.num_out_of_range, found.num_settings) == counts
    assert len({candidate.policy for candidate in candidates}) == counts[-1]
    for candidate in candidates:
        rule = build_shape(candidate.policy.shape)
        assert candidate.label.startswith(f"{name}:")
        assert rule.max_depth <= SUPPORT.depth
        assert rule.top_k <= SUPPORT.top_k


def test_budgets_scale_with_the_load_and_carry_costs() -> None:
    name = "chain:3"
    shared, rates, given = (
        {candidate.label: candidate.policy.budget for candidate in grown(*asked).candidates}
        for asked in (
            (f"{name}+survival",),
            (f"{name}+marginal",),
            (f"{name}+marginal", "tokens_per_s=150,300"),
        )
    )
    assert all(isinstance(budget, SurvivalBudget) for budget in shared.values())
    sizes = [4 * factor for factor in (2, 3, 4, 6, 8, 12, 16, 24)]
    assert [budget.max_tokens for budget in shared.values()] == [None, *sizes]
    assert list(shared)[:2] == [f"{name}+survival", f"{name}+survival:max_tokens=8"]
    assert shared[f"{name}+survival"].costs == COSTS
    assert all(isinstance(b, MarginalBudget) and b.costs == COSTS for b in rates.values())
    wanted = [200.0 * factor for factor in (0.5, 0.7, 0.85, 0.95, 1.05, 1.15, 1.3)]
    assert [budget.tokens_per_s for budget in rates.values()] == pytest.approx(wanted)
    assert [budget.tokens_per_s for budget in given.values()] == [150, 300]


def test_the_baseline_holds_plain_decoding_and_the_width_of_the_log() -> None:
    families = {family.name: family for family in static_families(3)}
    assert list(families) == ["ar", "chain", "eagle2"]
    assert all(family.is_static for family in families.values())
    assert "3" in families["eagle2"].grid["top_k"]
    assert not parse_families(["chain+survival"], ())[0].is_static


MANY = "threshold=" + ",".join(f"{n / 8192}" for n in range(5000))


@pytest.mark.parametrize(
    ("families", "grids", "named"),
    [
        (["echo"], [], "svip"),
        (["svip", "svip"], [], "once"),
        (["stop"], [], "stop:signal="),
        (["stop:signal=luck"], [], "luck"),
        (["eagle2+rationing"], [], "survival"),
        (["svip"], ["treshold=0.3"], "threshold, window"),
        (["svip:window=3"], ["window=4"], r"have a grid \(threshold"),
        (["svip"], ["threshold"], "field=v1,v2"),
        (["svip"], ["threshold=0.3,,0.4"], "field=v1,v2"),
        ([], ["depth=3"], "none"),
        (["chain:9"], [], "exceed the log's 4 levels and top_k 3"),
        (["opt_tree"], ["depth=8,10"], "--grid"),
        (["confidence:window=3"], ["threshold=0.5,1.5"], "a confidence threshold is at most 1"),
        (["svip:window=3"], [MANY], "more than 4096 settings"),
    ],
)
def test_refusals_name_what_is_known(families: list[str], grids: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        _ = [grow(family, CONDITIONS) for family in parse_families(families, grids)]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Writes an artifact of a policy."""

    def write(policy: Policy) -> Path:
        save_artifact(tmp_path / "fitted", policy, Origin(PAIR, EVIDENCE), card="# fitted\n")
        return tmp_path / "fitted"

    return write


@pytest.fixture
def scored(save: Save) -> Path:
    return save(Policy(shape=ScoredTree(scorer=FFN, beta=0.4, depth=3, first_top_k=3)))


def test_an_artifact_keeps_what_was_fitted(save: Save) -> None:
    own = POLICIES["hetero"].shape
    assert isinstance(own, EntropyBins)
    folder = save(POLICIES["hetero"])
    candidates, _ = grown(folder, conditions=WIDE)
    shapes = shapes_of(candidates)
    assert {(shape.edges, shape.base.depth) for shape in shapes} == {(own.edges, own.base.depth)}
    assert shapes[0].plan_tokens == own.plan_tokens
    assert shapes[0].plan_depths == own.plan_depths
    assert len({(s.base.num_tokens, s.alpha, s.gammas) for s in shapes}) == len(shapes) > 50
    assert {candidate.parent for candidate in candidates} == {load_artifact(folder).digest}


def test_lossy_artifacts_are_refused(save: Save) -> None:
    lossy = next(policy for policy in POLICIES.values() if not policy.lossless)
    with pytest.raises(UsageError, match="lossless"):
        parse_families([str(save(lossy))], (), PAIR)


def test_a_scorer_stays_as_fitted_and_its_threshold_is_searched(scored: Path) -> None:
    found = grown(scored, "beta=0.4,0.1", "depth=3,4", "min_level_prob=0,0.5")
    shapes = shapes_of(found.candidates)
    assert {shape.scorer for shape in shapes} == {FFN}
    sizes = {(shape.beta, shape.depth, shape.min_level_prob) for shape in shapes}
    assert len(sizes) == len(shapes) == 8
    assert (0.1, 4, 0.5) in sizes
    own = parse_families([str(scored)], (), PAIR)[0].grid
    first = {name: values[0] for name, values in own.items()}
    assert first == {"beta": "0.4", "depth": "3", "min_level_prob": "0.0"}


def test_values_that_are_no_numbers_are_refused(scored: Path) -> None:
    for grid in ("beta=abc", "depth=3;4"):
        with pytest.raises(UsageError, match=f"--grid of .*{grid}.* takes numbers"):
            grown(scored, grid)


def test_a_budget_behind_an_artifact_is_searched_with_it(scored: Path) -> None:
    own = ("beta=0.4", "depth=3", "min_level_prob=0")
    candidates, _ = grown(f"{scored}+survival", *own, "max_tokens=8,16")
    assert [candidate.policy.budget.max_tokens for candidate in candidates] == [8, 16]
    label = candidates[0].label.rpartition("/")[2]
    assert label == "fitted:beta=0.4:depth=3:min_level_prob=0+survival:max_tokens=8"
    assert all(candidate.parent is not None for candidate in candidates)
    by_costs = grown(f"{scored}+survival", *own).candidates[0].policy.budget
    assert isinstance(by_costs, SurvivalBudget)
    assert by_costs.costs == COSTS, "the load's costs are filled in"


def test_a_budget_leaves_most_of_a_fitted_shape_as_it_is(scored: Path) -> None:
    alone, shapes = (
        set(shapes_of(grown(spec).candidates)) for spec in (scored, f"{scored}+survival")
    )
    assert len(shapes) <= 8 < len(alone)
    assert len({shape.min_level_prob for shape in shapes}) == 1


def test_settings_that_the_record_refuses_are_left_out(save: Save) -> None:
    gates = SparseGates(gate_levels=(1, 4), thresholds=(0.3, 0.05), depth=4, max_width=3)
    found = grown(save(Policy(shape=gates)), "depth=3,4", "width=1,2", "num_tokens=8")
    assert [candidate.policy.shape.depth for candidate in found.candidates] == [4, 4]
