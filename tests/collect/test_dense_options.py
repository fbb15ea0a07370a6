"""What `specctl collect` refuses to combine, and what its defaults are."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.collect.options import dense_shape, live_policy, live_top_k, when_full
from specctl.errors import UsageError
from specctl.policy import FullTree


def test_defaults() -> None:
    assert dense_shape(None, depth=None, top_k=None, width=None) == FullTree()
    assert dense_shape(None, depth=3, top_k=4, width=9) == FullTree(depth=3, top_k=4, width=9)
    assert live_policy(None, depth=None, responses=None) == "eagle2"
    assert live_policy("chain", depth=None) == "chain"


def test_dense_collection_takes_no_policy() -> None:
    with pytest.raises(UsageError, match=r"--policy: .* found eagle2"):
        dense_shape("eagle2", depth=None, top_k=None, width=None)


@pytest.mark.parametrize("option", ["responses", "depth", "width"])
def test_live_collection_takes_no_option_of_dense(option: str) -> None:
    value = Path("r.jsonl") if option == "responses" else 3
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')}: .* --dense"):
        live_policy(None, **{option: value})


def test_numbers_out_of_range_are_named() -> None:
    with pytest.raises(UsageError, match="depth"):
        dense_shape(None, depth=0, top_k=None, width=None)


def test_top_k_is_of_the_tree_or_of_sampling() -> None:
    shape = dense_shape(None, depth=None, top_k=10, width=None, nested=False)
    assert shape == FullTree(depth=11, top_k=10, nested=False)
    assert live_top_k(None, None) is None
    assert live_top_k(40, None) == live_top_k(None, 40) == live_top_k(40, 40) == 40
    with pytest.raises(UsageError, match=r"--top-k: .* give one of them"):
        live_top_k(40, 20)


def test_a_full_queue_blocks_unless_told_to_drop() -> None:
    assert when_full(None, dense=False) == when_full("block", dense=False) == "block"
    assert when_full("drop", dense=False) == "drop"
    assert when_full(None, dense=True) == "block"
    with pytest.raises(UsageError, match="--when-full: expected block or drop, found 'wait'"):
        when_full("wait", dense=False)
    with pytest.raises(UsageError, match="--when-full: expected without --dense"):
        when_full("drop", dense=True)
