"""Memory that runs out: no request is lost, graphs give theirs back first, advice at the end."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

from specctl.errors import DeviceMemoryError
from specctl.policy import Policy, StaticTree
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.verifying import Verifier
from tests.runtime.captured import make_loop, ordinary, requests, run, tape

POLICY = Policy(shape=StaticTree(depth=3, top_k=3, num_tokens=10))
HUNGRY = {
    "the prompt": (CachedModel, "extend"),
    "the verification": (Verifier, "ask"),
    "the commit": (Verifier, "commit"),
}


def fail(patch: pytest.MonkeyPatch, owner: Any, name: str, times: int) -> list[int]:
    """The next calls of a method run out of memory."""
    original, left = getattr(owner, name), [times]

    def call(*args: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB.\nmore")
        return original(*args, **named)

    patch.setattr(owner, name, call)
    return left


@pytest.mark.parametrize("part", HUNGRY)
def test_a_request_that_met_no_memory_is_decoded_when_there_is_some(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = requests(3, new_tokens=16)
    loop = make_loop(POLICY, given, None, batch_size=2)
    for request in given:
        loop.submit(request)
    texts, num_failed = {}, 0
    for step in range(200):
        with monkeypatch.context() as patch:
            if step % 3 == 0:
                left = fail(patch, *HUNGRY[part], times=1)
                with suppress(DeviceMemoryError):
                    texts |= {d.request.request_id: d.token_ids for d in loop.step()}
                num_failed += left == [0]
                continue
        if not loop.busy:
            break
        texts |= {d.request.request_id: d.token_ids for d in loop.step()}
    assert texts == ordinary(POLICY, given, batch_size=1).texts
    assert num_failed > 1


@pytest.mark.parametrize("part", ["the prompt", "the verification"])
def test_graphs_give_their_memory_back_and_the_work_is_done_again(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = requests(4)
    loop = make_loop(POLICY, given, tape(), batch_size=2)
    run(loop, given[:1])
    assert loop.graph_counters.graph_bytes > 0
    fail(monkeypatch, *HUNGRY[part], times=1)
    found = run(loop, given[1:])
    assert found.texts == {
        name: text
        for name, text in ordinary(POLICY, given, batch_size=1).texts.items()
        if name != given[0].request_id
    }
    assert loop.graph_counters.captures > 3, "graphs are made again"


def test_a_loop_without_room_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, CachedModel, "allocate", 1)
    with pytest.raises(DeviceMemoryError, match=r"no memory for 2 texts of .*lower the batch size"):
        make_loop(POLICY, requests(1), None, batch_size=2)
