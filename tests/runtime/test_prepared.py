"""Prepared shapes: one per bin and size, reused, and invisible in the text."""

from __future__ import annotations

import torch

from specctl.policy import EntropyBins, Policy, RootOnly, StaticTree
from specctl.runtime.attention import prefix_mask
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.prepared import PreparedShapes, ShapeKey, common_bin
from tests.runtime.toy import toy_pair, toy_requests

BASE = StaticTree(depth=3, top_k=3, num_tokens=10)
# Edges in the middle of the toy pair's Φ, so that several bins occur.
BINS = Policy(shape=EntropyBins(base=BASE, edges=(4.0, 5.0, 6.0)))


def test_a_shape_is_prepared_once() -> None:
    shapes = PreparedShapes(32, torch.device("cpu"))
    first = shapes.get(ShapeKey(0, 1, 8))
    assert shapes.get(ShapeKey(0, 1, 8)) is first
    assert shapes.get(ShapeKey(1, 1, 8)) is not first
    assert (shapes.num_prepared, shapes.num_reused) == (2, 1)


def test_a_dirty_buffer_gives_the_same_mask() -> None:
    inner = torch.rand(2, 3, 4) > 0.5
    buffer = torch.ones(2, 1, 3, 40, dtype=torch.bool)
    clean = prefix_mask([5, 9], inner, 13)
    assert torch.equal(prefix_mask([5, 9], inner, 13, buffer), clean)
    assert torch.equal(prefix_mask([2, 1], inner, 6, buffer), prefix_mask([2, 1], inner, 6))


def test_common_bin() -> None:
    assert common_bin(None) == -1
    assert common_bin(torch.tensor([3, 3])) == 3
    assert common_bin(torch.tensor([3, 1])) == -1


def test_bins_meet_prepared_shapes_and_do_not_change_the_text() -> None:
    target, drafter = toy_pair()
    settings = {"batch_size": 1, "max_text_tokens": 64, "eos_ids": ()}
    requests = toy_requests(5)
    plain_loop = DecodeLoop(target, None, Policy(shape=RootOnly()), **settings)
    plain = {d.request.request_id: d.token_ids for d in plain_loop.run(requests)}
    loop = DecodeLoop(target, drafter, BINS, **settings)
    found = {d.request.request_id: d.token_ids for d in loop.run(requests)}
    assert found == plain
    prepared = loop.round.prepared
    assert len({key.bin for key in prepared.shapes}) > 1, "one bin only proves nothing"
    assert prepared.num_reused > prepared.num_prepared
