"""Sampling nodes: all positives, a uniform share of the negatives, by the configured label."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specctl.errors import TraceEmptyError, TraceSchemaError, UsageError
from specctl.features import node_features
from specctl.logs import node_sample
from specctl.logs.node_sample import LoggedNodes, sample_nodes
from specctl.policy.rules import BaseShape
from specctl.train.configs import DEFAULT_FEATURES
from tests.train.cases import DEPTH, TOP_K, node_source


def wanted(**changes: Any) -> dict[str, Any]:
    """What such logs hold."""
    fields: dict[str, Any] = {
        "features": DEFAULT_FEATURES["conditional"], "predicts": "conditional", "depth": DEPTH,
        "first_top_k": TOP_K, "second_top_k": TOP_K, "negatives": 10.0, "seed": 0,
    }  # fmt: skip
    return {**fields, **changes}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LoggedNodes:
    return node_source(tmp_path_factory.mktemp("log") / "log")


def plain_rows(source: LoggedNodes, label: str, names: tuple[str, ...]) -> tuple[Any, Any]:
    """Features and labels of all nodes, one by one."""
    features, accepted = [], []
    for batch in source.batches(BaseShape(DEPTH, TOP_K, TOP_K, max_tokens=1)):
        values, parent = node_features(batch.pool, names), batch.pool.parent
        for row, node in batch.known.nonzero().tolist():
            if node == 0 or (label == "conditional" and not batch.accepted[row, parent[row, node]]):
                continue
            features.append(values[row, node].tolist())
            accepted.append(bool(batch.accepted[row, node]))
    return np.array(features, np.float32), np.array(accepted)


@pytest.mark.parametrize("label", ["joint", "conditional"])
def test_all_rows_are_the_labelled_nodes(label: str, source: LoggedNodes) -> None:
    names = DEFAULT_FEATURES[label]
    rows = sample_nodes(source, **wanted(predicts=label, features=names, negatives=0.0))
    features, accepted = plain_rows(source, label, names)
    np.testing.assert_array_equal(rows.features, features)
    np.testing.assert_array_equal(rows.accepted, accepted)
    assert (rows.num_positives, rows.num_negatives) == (accepted.sum(), (~accepted).sum())
    assert rows.kept_frac == 1.0
    assert rows.log_kept == 0.0
    assert accepted.mean() > 0.05


def test_sample_keeps_positives_and_the_negatives_of_the_smallest_keys(source: LoggedNodes) -> None:
    config = wanted(predicts="joint", negatives=2.0, seed=5)
    rows = sample_nodes(source, **config)
    features, accepted = plain_rows(source, "joint", config["features"])
    keys = np.random.default_rng(5).random(len(accepted))
    num = 2 * accepted.sum()
    threshold = np.sort(keys[~accepted])[num]
    chosen = accepted | (keys < threshold)
    np.testing.assert_array_equal(rows.features, features[chosen])
    np.testing.assert_array_equal(rows.accepted, accepted[chosen])
    assert rows.kept_frac == num / (~accepted).sum()
    assert rows.log_kept == math.log(rows.kept_frac) < 0


def test_thinning_while_reading_changes_nothing(
    source: LoggedNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = wanted(predicts="joint", negatives=0.1)
    thinned = sample_nodes(source, **config)
    monkeypatch.setattr(node_sample, "SPARE", float("inf"))
    whole = sample_nodes(source, **config)
    np.testing.assert_array_equal(thinned.features, whole.features)
    assert thinned.kept_frac == whole.kept_frac < 0.1


def test_rows_tell_their_prompts(source: LoggedNodes) -> None:
    rows = sample_nodes(source, **wanted())
    assert len(rows.prompt_ids) == 12
    some = rows.take(rows.prompt == 4)
    assert len(some.accepted) == (rows.prompt == 4).sum()
    assert some.log_kept == rows.log_kept
    few = sample_nodes(source, ["p000003", "p000007"], **wanted())
    assert set(few.prompt_ids) == {"p000003", "p000007"}
    assert len(few.accepted) < len(rows.accepted) / 4


def test_unknown_and_repeated_features_are_refused(source: LoggedNodes) -> None:
    for names, says in (
        (("joint_prob", "colour"), "'colour' is none of"),
        (("depth",) * 2, "twice"),
    ):
        with pytest.raises(UsageError, match=f"--features.*{says}"):
            sample_nodes(source, **wanted(features=names))


class Broken:
    """A source whose batches were changed."""

    def __init__(self, source: LoggedNodes, change: Any) -> None:
        self.source, self.change, self.support = source, change, source.support
        self.sizes = source.sizes

    def batches(self, rule: Any, prompt_ids: Any = None) -> Iterator[Any]:
        return map(self.change, self.source.batches(rule, prompt_ids))


def test_columns_that_are_not_finite_are_refused(source: LoggedNodes) -> None:
    def without_entropy(batch: Any) -> Any:
        nothing = torch.full_like(batch.pool.entropy, float("nan"))
        return replace(batch, pool=batch.pool._replace(entropy=nothing))

    with pytest.raises(TraceSchemaError, match="no finite value of parent_entropy"):
        sample_nodes(Broken(source, without_entropy), **wanted())


def test_nodes_of_one_kind_are_refused(source: LoggedNodes) -> None:
    def blind(batch: Any) -> Any:
        accepted = torch.zeros_like(batch.accepted)
        accepted[:, 0] = True
        return replace(batch, accepted=accepted)

    with pytest.raises(TraceEmptyError, match=r"hold 0 accepted, [1-9]"):
        sample_nodes(Broken(source, blind), **wanted())
    with pytest.raises(TraceEmptyError, match="hold 0 accepted, 0 rejected"):
        sample_nodes(source, [], **wanted())
