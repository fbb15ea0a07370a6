"""What is maximised: rates by hand, limits that nothing meets, refusals by option."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specctl.errors import UsageError
from specctl.replay.tune.objective import SUMS, Objective, make_objective
from specctl.replay.tune.search import judge
from tests.replay.tune_cases import Stated, is_stop, search, statics


def sums_of(**values: float) -> np.ndarray:
    return np.array([values.get(name, 0.0) for name in SUMS])


def test_rates_by_hand() -> None:
    sums = sums_of(tokens=300, time_us=1e6, request_us=4e6, wall_us=2e6, good_tokens=100)
    assert make_objective("throughput", None).rate(sums) == 300
    assert make_objective("latency", None).rate(sums) == 75
    assert make_objective("goodput", 5.0).rate(sums) == 50
    objective = make_objective("goodput", 5.0)
    good = objective.is_good(np.array([10.0, 10.0]), np.array([50_000.0, 50_001.0]))
    assert good.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("kind", "limit", "named"),
    [
        ("speed", None, "latency or throughput or goodput"),
        ("goodput", None, "--tpot-limit-ms"),
        ("latency", 5.0, "goodput alone"),
        ("goodput", 0.0, "above 0"),
        ("goodput", float("nan"), "above 0"),
    ],
)
def test_objectives_are_refused_by_option(kind: str, limit: float | None, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        make_objective(kind, limit)


def test_a_limit_that_no_setting_meets_is_refused_with_what_is_possible() -> None:
    class NoneGood(Stated):
        def __call__(self, policies: Any, prompts: Any, num_runs: int = 1) -> Any:
            found = super().__call__(policies, prompts, num_runs)
            for evaluation in found:
                evaluation.sums[:, SUMS.index("good_tokens")] = 0
            return found

    with pytest.raises(UsageError, match=r"found 0.001, while the fastest setting's mean is 0.01"):
        search(objective=Objective("goodput", 1.0)).run(NoneGood(statics))


def test_a_static_setting_without_good_tokens_can_be_beaten() -> None:
    """A ratio to nothing is not defined; the lead is."""

    class StopsAreGood(Stated):
        def __call__(self, policies: Any, prompts: Any, num_runs: int = 1) -> Any:
            found = super().__call__(policies, prompts, num_runs)
            for policy, evaluation in zip(policies, found, strict=True):
                evaluation.sums[:, SUMS.index("good_tokens")] *= is_stop(policy)
            return found

    verdict = judge(search("svip", objective=Objective("goodput", 1.0)).run(StopsAreGood(statics)))
    assert verdict.beats_static
    assert verdict.policies[0].held_out.rate.value == 0
    assert np.isnan(verdict.standing(verdict.chosen).train.against)
