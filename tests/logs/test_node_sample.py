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
from specctl.logs.node_sample import LoggedNodes, SmallestKeys, frontier_rule, sample_nodes
from specctl.train.configs import DEFAULT_FEATURES
from tests.train.cases import DEPTH, TOP_K, node_source


def wanted(**changes: Any) -> dict[str, Any]:
    """What such logs hold."""
    fields: dict[str, Any] = {
        "features": DEFAULT_FEATURES["conditional"], "predicts": "conditional", "depth": DEPTH,
        "first_top_k": TOP_K, "second_top_k": TOP_K, "negatives": 10.0, "max_rows": 10_000_000,
        "seed": 0,
    }  # fmt: skip
    return {**fields, **changes}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LoggedNodes:
    return node_source(tmp_path_factory.mktemp("log") / "log")


def plain_rows(source: LoggedNodes, label: str, names: tuple[str, ...]) -> tuple[Any, Any]:
    """Features and labels of all nodes, one by one."""
    features, accepted = [], []
    for batch in source.batches(frontier_rule(DEPTH, TOP_K, TOP_K, names)):
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


def test_little_memory_changes_nothing(
    source: LoggedNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = wanted(predicts="joint", negatives=0.1)
    whole = sample_nodes(source, **config)
    monkeypatch.setattr(node_sample, "LEAST_ROOM", 10)
    monkeypatch.setattr("specctl.logs.logged_draft.BATCH_POSITIONS", 64)
    cuts = []
    cut = SmallestKeys.cut
    monkeypatch.setattr(SmallestKeys, "cut", lambda self, n: cuts.append(n) or cut(self, n))
    small = sample_nodes(source, **config)
    assert len(cuts) > 1  # one while reading, besides the last
    np.testing.assert_array_equal(small.features, whole.features)
    assert small.kept_frac == whole.kept_frac


@pytest.mark.parametrize("kept", [0.9, 0.5])
def test_max_rows_bounds_the_sample_and_its_shares_say_so(
    kept: float, source: LoggedNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All accepted nodes stay up to half of the rows; weights stand for the nodes left out."""
    config = wanted(negatives=0.0, predicts="joint")
    whole = sample_nodes(source, **config)
    most = round(2 * kept * whole.num_positives)
    rows = sample_nodes(source, **config | {"max_rows": most})
    num_accepted = min(most // 2, whole.num_positives)
    assert (len(rows.accepted), rows.accepted.sum()) == (most, num_accepted)
    assert rows.accepted_frac == num_accepted / whole.num_positives
    assert rows.kept_frac == (most - num_accepted) / whole.num_negatives
    assert rows.log_kept == math.log(rows.kept_frac / rows.accepted_frac)
    for of, number in ((rows.accepted, whole.num_positives), (~rows.accepted, rows.num_negatives)):
        assert rows.weight[of].sum() == pytest.approx(number)
    monkeypatch.setattr("specctl.logs.logged_draft.BATCH_POSITIONS", 64)  # cut while reading
    held, add = [], SmallestKeys.add

    def watched(self: SmallestKeys, *given: Any) -> None:
        add(self, *given)
        held.append(self.num_rows)

    monkeypatch.setattr(SmallestKeys, "add", watched)
    again = sample_nodes(source, **config | {"max_rows": most})
    np.testing.assert_array_equal(again.features, rows.features)
    positives, negatives = held[::2], held[1::2]
    assert max(map(sum, zip(positives, negatives, strict=True))) <= 2.25 * most
    assert max(positives) <= 1.5 * max(most // 2, num_accepted)
    assert negatives[-1] <= 1.5 * (most - num_accepted)


def test_negatives_that_leave_room_leave_it_to_positives(source: LoggedNodes) -> None:
    config = wanted(negatives=0.1, predicts="joint")
    whole = sample_nodes(source, **config)
    rows = sample_nodes(source, **config | {"max_rows": len(whole.accepted) - 10})
    assert whole.accepted.sum() - rows.accepted.sum() == 10
    assert (~rows.accepted).sum() == (~whole.accepted).sum()


def test_rows_tell_their_prompts(source: LoggedNodes) -> None:
    rows = sample_nodes(source, **wanted())
    assert len(rows.prompt_ids) == 12
    some = rows.take(rows.prompt == 4)
    assert len(some.accepted) == (rows.prompt == 4).sum()
    assert some.log_kept == rows.log_kept
    few = sample_nodes(source, ["p000003", "p000007"], **wanted())
    assert set(few.prompt_ids) == {"p000003", "p000007"}
    assert len(few.accepted) < len(rows.accepted) / 4


@pytest.mark.parametrize("names", [("joint_prob", "colour"), ("depth", "depth")])
def test_unknown_and_repeated_features_are_refused(
    names: tuple[str, ...], source: LoggedNodes
) -> None:
    with pytest.raises(UsageError, match="--features: expected different names among copy_length"):
        sample_nodes(source, **wanted(features=names))


class Broken:
    """A source whose batches were changed."""

    def __init__(self, source: LoggedNodes, change: Any) -> None:
        self.source, self.change, self.support = source, change, source.support

    def batches(self, rule: Any, prompt_ids: Any = None) -> Iterator[Any]:
        return map(self.change, self.source.batches(rule, prompt_ids))


def test_columns_that_are_not_finite_are_refused(source: LoggedNodes) -> None:
    def without_entropy(batch: Any) -> Any:
        nothing = torch.full_like(batch.pool.entropy, float("nan"))
        return replace(batch, pool=batch.pool._replace(entropy=nothing))

    with pytest.raises(TraceSchemaError, match="found others in parent_entropy"):
        sample_nodes(Broken(source, without_entropy), **wanted())


def test_nodes_of_one_kind_are_refused(source: LoggedNodes) -> None:
    def blind(batch: Any) -> Any:
        accepted = torch.zeros_like(batch.accepted)
        accepted[:, 0] = True
        return replace(batch, accepted=accepted)

    with pytest.raises(TraceEmptyError, match=r"found 0 accepted, [1-9]"):
        sample_nodes(Broken(source, blind), **wanted())
    with pytest.raises(TraceEmptyError, match="found 0 accepted, 0 rejected"):
        sample_nodes(source, [], **wanted())
