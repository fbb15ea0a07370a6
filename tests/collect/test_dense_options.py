"""What `specctl collect` refuses to combine, and what its defaults are."""

from __future__ import annotations

from typing import Any

import pytest

from specctl.collect.config import CollectConfig
from specctl.errors import UsageError
from specctl.policy import FullTree


def test_defaults() -> None:
    assert CollectConfig().dense_shape() == FullTree()
    given = CollectConfig(depth=3, top_k=4, width=9, nested=False).dense_shape()
    assert given == FullTree(depth=3, top_k=4, width=9, nested=False)
    for one in (CollectConfig(top_k=40), CollectConfig(sample_top_k=40)):
        one.check()
        assert one.sampling_top_k == 40
    assert CollectConfig(dense=True, top_k=9).sampling_top_k == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dense": True, "policy": "eagle2"}, r"--policy: .* found eagle2"),
    ({"dense": True, "when_full": "drop"}, "--when-full: expected without --dense"),
    ({"dense": True, "depth": 0}, "depth"),
    ({"responses": "r.jsonl"}, "--responses: .* --dense"),
    ({"depth": 3}, "--depth: .* --dense"),
    ({"width": 3}, "--width: .* --dense"),
    ({"when_full": "wait"}, "--when-full: expected block or drop, found 'wait'"),
    ({"top_k": 40, "sample_top_k": 20}, r"--top-k: .* give one of them"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        CollectConfig(**options).check()
