"""Families and their grids: stated, bounded, within the log, refused in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specctl.artifacts import Origin, save_artifact
from specctl.artifacts.describe import describe_artifact
from specctl.errors import ArtifactError, UsageError
from specctl.policy import (
    Chain,
    EntropyBins,
    MarginalBudget,
    Policy,
    ScoredTree,
    SparseGates,
    SurvivalBudget,
)
from specctl.replay.tune.candidates import (
    Conditions,
    grow,
    listed_families,
    parse_families,
    static_families,
)
from tests.artifacts.examples import FFN, PAIR, POLICIES, sha
from tests.replay.tune_cases import COSTS, SUPPORT

CONDITIONS = Conditions(
    PAIR, SUPPORT, batch_size=4, step_costs=lambda rule: COSTS, tokens_per_s=200.0
)


def grown(name: str, *grids: str):  # type: ignore[no-untyped-def]  # noqa: ANN201
    [family] = parse_families([name], grids, PAIR)
    return grow(family, CONDITIONS)


def test_every_stated_grid_is_of_policies() -> None:
    """Nothing that `--show-grid` prints is refused by the records it stands for."""
    wide = replace(CONDITIONS, support=replace(SUPPORT, top_k=10, depth=20))
    for family in (*listed_families((), ()), *static_families(10)):
        found = grow(family, wide)
        assert found.searched.num_beyond == 0, family.name
        assert len({c.label for c in found.candidates}) == len(found.candidates) > 0
        assert family.grid_rows()


def test_the_grid_is_every_combination_less_what_is_no_tree_or_outside() -> None:
    found = grown("eagle2", "depth=2,4,6", "top_k=2,3,4", "num_tokens=3,8")
    # 18 points; 3 nodes are no tree of 4 or 6 levels: 6 contradict. Of the 12 left, depth 6
    # (3 of them) and top_k 4 (3 of depth 2 and 4) are beyond 4 levels of top_k 3: 6 remain.
    assert (found.searched.num_contradictory, found.searched.num_beyond, len(found.candidates)) == (
        6,
        6,
        6,
    )
    shapes = {(c.policy.shape.depth, c.policy.shape.top_k) for c in found.candidates}
    assert shapes == {(2, 2), (2, 3), (4, 2), (4, 3)}


def test_a_setting_in_the_name_is_fixed() -> None:
    found = grown("svip:window=3")
    assert {c.policy.shape.window for c in found.candidates} == {3}
    assert len(found.candidates) == 8
    assert all(c.label.startswith("svip:window=3:threshold=") for c in found.candidates)
    assert grown("eagle2:depth=4", "num_tokens=3,8", "top_k=2").searched.num_contradictory == 1


def test_a_window_beyond_the_log_is_left_out_and_counted() -> None:
    found = grown("confidence", "window=4,5,20", "threshold=0.5")
    assert [c.policy.shape.window for c in found.candidates] == [4]
    assert found.searched.num_beyond == 2


def test_a_family_wholly_outside_is_refused() -> None:
    with pytest.raises(UsageError, match=r"4 levels and top_k 3, found all 1 of its grid beyond"):
        grown("chain:num_draft_tokens=9")
    with pytest.raises(UsageError, match="--grid"):
        grown("opt_tree", "depth=8,10")


def test_budgets_scale_with_the_load_and_carry_costs() -> None:
    found = grown("chain:num_draft_tokens=3+survival")
    budgets = [c.policy.budget for c in found.candidates]
    assert all(isinstance(budget, SurvivalBudget) for budget in budgets)
    assert [b.max_tokens for b in budgets] == [None, *(4 * f for f in (2, 3, 4, 6, 8, 12, 16, 24))]
    assert budgets[0].costs == COSTS
    assert found.candidates[0].label == "chain:num_draft_tokens=3+survival"
    assert found.candidates[1].label == "chain:num_draft_tokens=3+survival:max_tokens=8"
    rates = [c.policy.budget for c in grown("chain:num_draft_tokens=3+marginal").candidates]
    assert all(isinstance(budget, MarginalBudget) and budget.costs == COSTS for budget in rates)
    wanted = [200.0 * factor for factor in (0.5, 0.7, 0.85, 0.95, 1.05, 1.15, 1.3)]
    assert [budget.tokens_per_s for budget in rates] == pytest.approx(wanted)


def test_values_given_replace_the_scaled_ones() -> None:
    found = grown("chain:num_draft_tokens=3+marginal", "tokens_per_s=150,300")
    assert [c.policy.budget.tokens_per_s for c in found.candidates] == [150, 300]


def test_the_static_race_holds_plain_decoding_and_the_width_of_the_log() -> None:
    families = {family.name: family for family in static_families(3)}
    assert list(families) == ["ar", "chain", "eagle2"]
    assert all(family.is_static for family in families.values())
    assert "3" in families["eagle2"].grid["top_k"]
    assert not parse_families(["chain+survival"], ())[0].is_static


@pytest.mark.parametrize(
    ("families", "grids", "named"),
    [
        (["echo"], [], "svip"),
        (["svip", "svip"], [], "once"),
        (["stop"], [], "stop:signal="),
        (["stop:signal=luck"], [], "luck"),
        (["eagle2+rationing"], [], "survival"),
        (["svip"], ["treshold=0.3"], "threshold, window"),
        (["svip:window=3"], ["window=4"], "a setting that is searched: threshold"),
        (["svip"], ["threshold"], "field=v1,v2"),
        (["svip"], ["threshold=0.3,,0.4"], "field=v1,v2"),
        ([], ["depth=3"], "none"),
    ],
)
def test_refusals_name_what_is_known(families: list[str], grids: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        parse_families(families, grids)


def test_values_that_the_family_refuses_are_refused() -> None:
    with pytest.raises(UsageError, match="a confidence threshold is at most 1"):
        grown("confidence:window=3", "threshold=0.5,1.5")
    with pytest.raises(UsageError, match="at most 4096 settings"):
        grown("svip:window=3", "threshold=" + ",".join(f"{n / 8192}" for n in range(5000)))


@pytest.fixture
def hetero(tmp_path: Path) -> Path:
    save_artifact(tmp_path / "hetero", POLICIES["hetero"], Origin(PAIR), card="# hetero\n")
    return tmp_path / "hetero"


def test_an_artifact_keeps_what_was_fitted(hetero: Path) -> None:
    [family] = parse_families([str(hetero)], (), PAIR)
    wide = replace(CONDITIONS, support=replace(SUPPORT, top_k=10, depth=20))
    found = grow(family, wide)
    own = POLICIES["hetero"].shape
    assert isinstance(own, EntropyBins)
    shapes = [candidate.policy.shape for candidate in found.candidates]
    assert {(shape.edges, shape.base.depth) for shape in shapes} == {(own.edges, own.base.depth)}
    assert shapes[0].plan_tokens == own.plan_tokens
    assert shapes[0].plan_depths == own.plan_depths
    assert len({(s.base.num_tokens, s.alpha, s.gammas) for s in shapes}) == len(shapes) > 50
    assert found.candidates[0].parent in describe_artifact_title(hetero)


def describe_artifact_title(folder: Path) -> str:
    from specctl.artifacts import load_artifact

    return describe_artifact(load_artifact(folder)).title


def test_an_artifact_of_another_kind_is_one_setting(tmp_path: Path) -> None:
    policy = POLICIES["hetero"].model_copy(update={"shape": Chain(num_draft_tokens=2)})
    save_artifact(tmp_path / "chain", policy, Origin(PAIR), card="# chain\n")
    found = grown(str(tmp_path / "chain"))
    assert [candidate.policy for candidate in found.candidates] == [policy]
    assert not parse_families([str(tmp_path / "chain")], (), PAIR)[0].is_static


def test_artifacts_of_another_pair_and_lossy_ones_are_refused(hetero: Path, tmp_path: Path) -> None:
    other = PAIR.model_copy(update={"target_digest": sha("9")})
    with pytest.raises(ArtifactError, match="E_TARGET"):
        parse_families([str(hetero)], (), other)
    from tests.artifacts.examples import EVIDENCE

    lossy = next(policy for policy in POLICIES.values() if not policy.lossless)
    save_artifact(tmp_path / "lossy", lossy, Origin(PAIR, EVIDENCE), card="# lossy\n")
    with pytest.raises(UsageError, match="lossless"):
        parse_families([str(tmp_path / "lossy")], (), PAIR)


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    policy = Policy(shape=ScoredTree(scorer=FFN, beta=0.4, depth=3, first_top_k=3))
    save_artifact(tmp_path / "scored", policy, Origin(PAIR), card="# c2t\n")
    return tmp_path / "scored"


def test_a_scorer_stays_as_fitted_and_its_threshold_is_searched(scored: Path) -> None:
    found = grown(str(scored), "beta=0.4,0.1", "depth=3,4", "num_tokens=none,8")
    shapes = [candidate.policy.shape for candidate in found.candidates]
    assert {shape.scorer for shape in shapes} == {FFN}
    sizes = {(shape.beta, shape.depth, shape.num_tokens) for shape in shapes}
    assert len(sizes) == len(shapes) == 8
    assert (0.1, 4, None) in sizes
    own = parse_families([str(scored)], (), PAIR)[0].grid
    assert {name: values[0] for name, values in own.items()} == {
        "beta": "0.4",
        "depth": "3",
        "num_tokens": "none",
    }


def test_a_budget_behind_an_artifact_is_searched_with_it(scored: Path) -> None:
    spec = f"{scored}+survival"
    found = grown(spec, "beta=0.4", "depth=3", "num_tokens=none", "max_tokens=8,16")
    budgets = [candidate.policy.budget for candidate in found.candidates]
    assert [budget.max_tokens for budget in budgets] == [8, 16]
    labels = [candidate.label.rpartition("/")[2] for candidate in found.candidates]
    assert labels[0] == "scored:beta=0.4:depth=3:num_tokens=none+survival:max_tokens=8"
    assert all(candidate.parent is not None for candidate in found.candidates)
    by_costs = grown(f"{scored}+survival", "beta=0.4", "depth=3", "num_tokens=none").candidates
    assert isinstance(by_costs[0].policy.budget, SurvivalBudget)
    assert by_costs[0].policy.budget.costs == COSTS, "the load's costs are filled in"


def test_a_budget_leaves_most_of_a_fitted_shape_as_it_is(scored: Path) -> None:
    alone, shared = (grown(spec) for spec in (str(scored), f"{scored}+survival"))
    shapes = {candidate.policy.shape for candidate in shared.candidates}
    assert len(shapes) <= 8 < len({candidate.policy.shape for candidate in alone.candidates})
    assert len({shape.num_tokens for shape in shapes}) == 1


def test_settings_that_the_record_refuses_are_counted(tmp_path: Path) -> None:
    gates = SparseGates(gate_levels=(1, 4), thresholds=(0.3, 0.05), depth=4, max_width=3)
    save_artifact(tmp_path / "echo", Policy(shape=gates), Origin(PAIR), card="# echo\n")
    found = grown(str(tmp_path / "echo"), "depth=3,4", "width=1,2", "num_tokens=8")
    assert found.searched.num_contradictory == 2, "a gate at level 4 of a draft of 3"
    assert {candidate.policy.shape.depth for candidate in found.candidates} == {4}
