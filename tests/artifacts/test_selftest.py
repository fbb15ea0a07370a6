"""Self-test vectors: what a policy decided when it was written, it must decide when loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specctl.artifacts.selftest import check_selftest, selftest_bytes
from specctl.artifacts.selftest.rows import ScoreCases, cases_of, tolerance
from specctl.artifacts.tensors import read_tensors, write_tensors
from specctl.errors import ArtifactError
from specctl.policy.records import (
    EntropyBins,
    Policy,
    ScoredTree,
    StaticTree,
)
from tests.artifacts.attacks import checked
from tests.artifacts.examples import (
    FFN,
    HETERO,
    POLICIES,
)
from tests.policy.scorers import SCORED_POLICIES, random_network, random_trees

NEXT_FLOAT = float(np.nextafter(np.float32(0.1), np.float32(1)))


def bins(**changes: Any) -> Policy:
    return Policy(shape=HETERO.model_copy(update=changes))


def varied(name: str, part: str, **changes: Any) -> Policy:
    """An example with one part changed."""
    policy = POLICIES[name]
    return policy.model_copy(update={part: getattr(policy, part).model_copy(update=changes)})


OTHERS: dict[str, tuple[Policy, Policy]] = {
    "an edge one float up": (
        POLICIES["hetero"],
        bins(edges=(NEXT_FLOAT, *HETERO.edges[1:])),
    ),
    "another plan": (POLICIES["hetero"], bins(cap_tokens=True)),
    "another bar": (POLICIES["echo"], varied("echo", "shape", thresholds=(0.3, 0.06))),
    "another weight": (
        POLICIES["c2t_ffn"],
        Policy(shape=ScoredTree(scorer=FFN.model_copy(update={"w2": (1.5, -2.4)}), beta=0.4)),
    ),
    "another beta": (POLICIES["c2t_ffn"], varied("c2t_ffn", "shape", beta=0.5)),
    "another size": (POLICIES["eagle2"], varied("eagle2", "shape", num_tokens=47)),
    "another chain": (POLICIES["chain"], varied("chain", "shape", num_draft_tokens=4)),
    "another budget": (POLICIES["stop"], varied("stop", "budget", max_tokens=6)),
    "another theta": (POLICIES["mars"], varied("mars", "acceptance", theta=0.2)),
    "another prior": (POLICIES["adasd"], varied("adasd", "shape", prior_rejected=0.1)),
    "another clip": (POLICIES["adasd"], varied("adasd", "acceptance", max_threshold=0.0)),
}


@pytest.mark.parametrize("policy", [*POLICIES.values(), *SCORED_POLICIES.values()])
def test_vectors_are_a_function_of_the_policy_and_pass(policy: Policy) -> None:
    data = selftest_bytes(policy)
    assert data == selftest_bytes(policy)
    assert len(data) < 1 << 18
    check_selftest(policy, data)


@pytest.mark.parametrize("name", OTHERS)
def test_a_policy_that_decides_otherwise_is_refused(name: str) -> None:
    """Each of these would be another policy under the same evidence."""
    policy, other = OTHERS[name]
    with pytest.raises(ArtifactError) as caught:
        check_selftest(other, selftest_bytes(policy))
    checked(caught.value, "E_SELFTEST")


def test_edges_are_asked_on_both_sides() -> None:
    cases = cases_of(POLICIES["hetero"])
    assert cases is not None
    inputs = cases.inputs()
    bins = cases.outputs(inputs)["bin"]
    assert set(bins.tolist()) == set(range(len(HETERO.edges) + 1))
    for edge in np.float32(HETERO.edges):
        above = np.nextafter(edge, np.float32(np.inf))
        on, over = (bins[np.flatnonzero(inputs == x)[0]] for x in (edge, above))
        assert over == on + 1, edge


@pytest.mark.parametrize("scorer", [FFN, random_network(3, hidden=48), random_trees(1, 100, 31)])
def test_tolerance_covers_another_order_of_adding(scorer: Any) -> None:
    """Float64 is further off than any order of float32, and stays inside; decisions are both."""
    case = ScoreCases(ScoredTree(scorer=scorer, beta=0.3))
    inputs = case.inputs()
    if hasattr(scorer, "w1"):
        hidden = (inputs.astype(float) - scorer.mean) / scorer.scale @ np.array(scorer.w1).T
        exact = np.maximum(hidden + scorer.b1, 0) @ np.array(scorer.w2) + scorer.b2[0]
        assert (np.abs(case.scores(inputs) - exact) <= tolerance(scorer, inputs)).all()
    assert tolerance(scorer, inputs).max() < 0.01
    assert {0, 1} <= set(case.outputs(inputs)["keep"].tolist())


def tampered(name: str, change: Any) -> bytes:
    vectors = read_tensors(selftest_bytes(POLICIES["adasd"]))
    vectors[name] = change(vectors[name])
    return write_tensors(vectors)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rounds.submitted", lambda a: a[:, :-1]),
        ("rounds.submitted", lambda a: a + 1),
        ("rounds.admitted", lambda a: 1 - a),
        ("rounds.draft_ids", lambda a: a + 2**40),
        ("rounds.draft_ids", lambda a: a - 70),
        ("rounds.draft_logp", lambda a: -a),
        ("rounds.recent", lambda a: a[:, :3]),
        ("rounds.shape_memory", lambda a: a - 1e20),
        ("rounds.target_logits", lambda a: a.astype(np.int64)),
        ("rounds.entropy", lambda a: a * np.float32(1e25)),
        ("rounds.more", lambda a: a),
    ],
)
def test_tampered_vectors_are_refused(name: str, change: Any) -> None:
    if name == "rounds.more":
        vectors = read_tensors(selftest_bytes(POLICIES["adasd"]))
        data = write_tensors({**vectors, name: vectors["rounds.entropy"]})
    else:
        data = tampered(name, change)
    with pytest.raises(ArtifactError) as caught:
        check_selftest(POLICIES["adasd"], data)
    checked(caught.value, "E_SELFTEST")


def changed(policy: Policy, **changes: Any) -> bytes:
    """The vectors of a policy with some of their rows changed, by name."""
    vectors = read_tensors(selftest_bytes(policy))
    for name, change in changes.items():
        vectors[f"rows.{name}"] = change(vectors[f"rows.{name}"])
    return write_tensors(vectors)


FEWER = dict.fromkeys(("inputs", "bin", "depth", "num_tokens"), lambda a: a[-2:-1])
HUGE_INPUTS = {"inputs": lambda a: np.full_like(a, -1e29), "keep": lambda a: np.full_like(a, -1)}
VACUOUS: dict[str, tuple[str, dict[str, Any]]] = {
    "no keep is compared": ("c2t_ffn", {"keep": lambda a: np.full_like(a, -1)}),
    "no keep of trees is compared": ("c2t_trees", {"keep": lambda a: np.full_like(a, -1)}),
    "no bin is compared": ("hetero", {"bin": lambda a: np.full_like(a, -1)}),
    "no gate is compared": ("echo", {"stopped_at": lambda a: np.full_like(a, -1)}),
    "one row of many": ("hetero", FEWER),
    "inputs without end": ("c2t_ffn", {**HUGE_INPUTS, "scores": lambda a: np.full_like(a, 1e6)}),
    "one row moved": ("c2t_trees", {"inputs": lambda a: np.concatenate([a[1:], a[:1]])}),
}


@pytest.mark.parametrize("name", VACUOUS)
def test_vectors_that_ask_nothing_or_lie_are_refused(name: str) -> None:
    kind, changes = VACUOUS[name]
    with pytest.raises(ArtifactError) as caught:
        check_selftest(POLICIES[kind], changed(POLICIES[kind], **changes))
    assert "rows, " in str(checked(caught.value, "E_SELFTEST"))


def first_row_beside(border: float) -> Policy:
    """A network whose first row scores so many times its rounding above beta."""
    case = ScoreCases(ScoredTree(scorer=FFN, beta=0.4))
    inputs = case.inputs()[:1]
    logp = float(-np.logaddexp(0.0, -case.scores(inputs).astype(float))[0])
    rounding = float(tolerance(FFN, inputs)[0]) + 1e-6 * (1 + abs(logp))
    beta = float(np.exp(logp - border * rounding))
    return Policy(shape=ScoredTree(scorer=FFN, beta=beta))


def with_keep(policy: Policy, row: int, value: int) -> bytes:
    def change(keep: Any) -> Any:
        keep[row] = value
        return keep

    return changed(policy, keep=change)


def test_a_row_on_the_border_may_be_either() -> None:
    policy = first_row_beside(0.0)
    keep = read_tensors(selftest_bytes(policy))["rows.keep"]
    assert keep[0] == -1
    for value in (-1, 0, 1):
        check_selftest(policy, with_keep(policy, 0, value))


def test_rows_off_the_border_are_compared() -> None:
    """Here every row but the first is: neither the other answer nor none will do."""
    policy = first_row_beside(0.0)
    keep = read_tensors(selftest_bytes(policy))["rows.keep"]
    sure = np.flatnonzero(keep != -1)
    assert len(sure) > 20
    for row in sure:
        for value in (-1, 1 - keep[row]):
            with pytest.raises(ArtifactError) as caught:
                check_selftest(policy, with_keep(policy, row, value))
            assert "rows, keep" in str(checked(caught.value, "E_SELFTEST"))


@pytest.mark.parametrize(("border", "may_doubt"), [(1.5, True), (3.0, False)])
def test_another_machine_may_doubt_what_this_one_decides(border: float, *, may_doubt: bool) -> None:
    """Its score may be nearer to the border by as much as rounding, and not by more."""
    policy = first_row_beside(border)
    assert read_tensors(selftest_bytes(policy))["rows.keep"][0] == 1
    data = with_keep(policy, 0, -1)
    if may_doubt:
        check_selftest(policy, data)
        return
    with pytest.raises(ArtifactError) as caught:
        check_selftest(policy, data)
    checked(caught.value, "E_SELFTEST")


@pytest.mark.parametrize(
    "scorer",
    [
        random_trees(0, 3, 1),
        FFN.model_copy(update={"w2": (0.0, 0.0)}),
        FFN.model_copy(update={"mean": (-1e7, 1e7, 1e7)}),
    ],
    ids=["leaves alone", "deaf network", "nothing but rounding"],
)
def test_a_scorer_that_says_the_same_of_all_is_refused(scorer: Any) -> None:
    policy = Policy(shape=ScoredTree(scorer=scorer, beta=0.01))
    for attempt in (lambda: selftest_bytes(policy), lambda: check_selftest(policy, b"")):
        with pytest.raises(ArtifactError) as caught:
            attempt()
        checked(caught.value, "E_DEGENERATE")


def test_bins_with_one_plan_are_meant(tmp_path: Path) -> None:
    """Without extension and at gamma 1 every bin gets the base tree: idle, and no error."""
    shape = EntropyBins(base=StaticTree(), edges=(1.0,), gammas=(1.0,), alpha=0)
    check_selftest(Policy(shape=shape), selftest_bytes(Policy(shape=shape)))


def test_a_scorer_whose_sums_overflow_is_refused() -> None:
    """Finite weights, and scores that are no numbers."""
    scorer = FFN.model_copy(update={"b1": (1e30, 1e30), "w2": (1e30, -1e30)})
    with pytest.raises(ArtifactError) as caught:
        check_selftest(Policy(shape=ScoredTree(scorer=scorer, beta=0.01)), b"")
    assert "NaN" in checked(caught.value, "E_DEGENERATE").found
