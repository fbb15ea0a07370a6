"""The fit of a table of acceptance: what it finds of a known truth, and where data lack."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from specctl.artifacts.onnx_twin import twin_bytes
from specctl.errors import UsageError
from specctl.features import SUFFIX_TOKENS
from specctl.logs.node_sample import NodeRows
from specctl.policy import AcceptanceTable, JointThreshold
from specctl.policy.scorers import build_log_odds
from specctl.train.configs import SurvivalConfig, SurvivalNodeConfig
from specctl.train.survival import fit_survival, fit_table
from tests.train.cases import DEPTH, NODE_PROMPTS, TOP_K, node_source


def rows_of(
    logp: np.ndarray, copied: np.ndarray, accepted: np.ndarray, kept_frac: float = 1.0
) -> NodeRows:
    codes = np.zeros(len(logp), np.int32)
    features = np.stack([logp, copied], 1).astype(np.float32)
    num = int(accepted.sum())
    sizes = (num, round((len(logp) - num) / kept_frac), 0, kept_frac)
    return NodeRows(features, accepted, codes, ("p",), *sizes)


def truth(logp: np.ndarray, copied: np.ndarray) -> np.ndarray:
    """Acceptance: the drafter's odds, times e for each token of a copy."""
    prob = np.exp(logp)
    return 1 / (1 + (1 - prob) / prob * np.exp(-1.0 * copied))


def drawn(seed: int, size: int = 200_000) -> NodeRows:
    draws = np.random.default_rng(seed)
    logp = np.log(draws.uniform(0.01, 0.99, size))
    copied = draws.integers(-SUFFIX_TOKENS, SUFFIX_TOKENS, size, endpoint=True)
    return rows_of(logp, copied, draws.random(size) < truth(logp, copied))


def said(table: AcceptanceTable, logp: np.ndarray, copied: np.ndarray) -> np.ndarray:
    features = torch.from_numpy(np.stack([logp, copied], 1).astype(np.float32))
    return build_log_odds(table)(features).sigmoid().numpy()


def test_the_table_finds_the_truth_that_rows_were_drawn_from() -> None:
    """On 200,000 rows a cell has some 700: an error of .03 is far beyond two standard errors of
    the mean over a row of the table, and a table that ignored the copies would be off by .3."""
    table, _ = fit_table(drawn(0), num_bins=32, weight=20.0)
    logp = np.log(np.linspace(0.1, 0.9, 81))
    for copied in range(-SUFFIX_TOKENS, SUFFIX_TOKENS + 1):
        wanted = truth(logp, np.full(81, copied))
        found = said(table, logp, np.full(81, copied))
        assert abs(found - wanted).mean() < 0.03, copied


def test_sampled_negatives_stand_for_those_left_out() -> None:
    whole = drawn(1)
    kept = whole.accepted | (np.random.default_rng(2).random(len(whole.accepted)) < 0.25)
    part = rows_of(*whole.features[kept].T, whole.accepted[kept], kept_frac=0.25)
    tables = [fit_table(rows, num_bins=32, weight=20.0)[0] for rows in (whole, part)]
    logp, copied = np.log(np.linspace(0.1, 0.9, 81)), np.zeros(81)
    a, b = (said(table, logp, copied) for table in tables)
    assert abs(a - b).mean() < 0.03
    wrong, _ = fit_table(rows_of(*part.features.T, part.accepted), num_bins=32, weight=20.0)
    assert (said(wrong, logp, copied) - a).mean() > 0.1  # what forgetting that would do


def test_acceptance_never_falls_with_the_drafters_probability() -> None:
    draws = np.random.default_rng(3)
    logp = np.log(draws.uniform(0.01, 0.99, 3000))
    noise = rows_of(logp, np.zeros(3000), draws.random(3000) < 0.5)
    table, _ = fit_table(noise, num_bins=32, weight=5.0)
    for row in table.log_odds:
        assert all(low <= high for low, high in pairwise(row))


def test_a_cell_without_rows_says_what_its_group_says() -> None:
    """Nothing copies four tokens here: the row of three decides."""
    draws = np.random.default_rng(4)
    logp = np.log(draws.uniform(0.01, 0.99, 50_000))
    copied = draws.choice([0, 3], 50_000)
    rows = rows_of(logp, copied, draws.random(50_000) < truth(logp, copied))
    table, counts = fit_table(rows, num_bins=8, weight=20.0)
    assert counts.all[-1].sum() == 0
    three, four = table.log_odds[-2], table.log_odds[-1]
    assert np.allclose(three, four, atol=0.1)
    assert np.mean(four) > np.mean(table.log_odds[SUFFIX_TOKENS]) + 1


def test_probabilities_that_are_all_alike_are_refused() -> None:
    same = rows_of(np.full(50, -1.0), np.zeros(50), np.arange(50) < 25)
    with pytest.raises(UsageError, match="one draft probability"):
        fit_table(same, num_bins=8, weight=20.0)


def test_a_fit_to_traces_is_a_policy_with_a_twin(tmp_path: Path) -> None:
    sizes = {"depth": DEPTH, "first_top_k": TOP_K, "second_top_k": TOP_K}
    config = SurvivalConfig(nodes=SurvivalNodeConfig(**sizes), held_out_frac=0.4)
    fit = fit_survival(node_source(tmp_path), NODE_PROMPTS[:12], config)
    twin = twin_bytes(fit.policy)
    assert twin is not None
    assert fit.check_twin is not None
    fit.check_twin(twin)
    shape = fit.policy.shape
    assert (shape.beta, shape.min_level_prob) == (0.05, 0.5)
    assert isinstance(shape.scorer, AcceptanceTable)
    assert fit.report.data.accepted["no copy"] > 0
    assert JointThreshold().min_level_prob == 0  # off unless it is asked for
