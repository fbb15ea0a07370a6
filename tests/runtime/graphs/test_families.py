"""Families of decoders in captured rounds: the text of the ordinary loop."""

from __future__ import annotations

from typing import Any

import pytest

from specctl.policy import Policy, StaticTree
from specctl.runtime.cached_model import CachedModel, ForwardResult
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.drafter import SmallModelDrafter
from specctl.runtime.graphs import GraphSettings, capture
from tests.runtime.families import FAMILIES
from tests.runtime.graphs.tape import TapeCapture
from tests.runtime.toy import toy_model, toy_requests

POLICY = Policy(shape=StaticTree(depth=3, top_k=3, num_tokens=8))


def texts(
    family: str, graphs: GraphSettings | None
) -> tuple[dict[str, tuple[int, ...]], DecodeLoop]:
    config, given = FAMILIES[family], toy_requests(3, max_new_tokens=12)
    loop = DecodeLoop(
        CachedModel(toy_model(0, config)),
        SmallModelDrafter(CachedModel(toy_model(0, config, noise=0.01))),
        POLICY,
        batch_size=2,
        max_text_tokens=64,
        eos_ids=(),
        graphs=graphs,
    )
    return {done.request.request_id: done.token_ids for done in loop.run(given)}, loop


@pytest.mark.parametrize("family", FAMILIES)
def test_text_of_every_family(family: str) -> None:
    plain, _ = texts(family, None)
    found, loop = texts(family, GraphSettings(capture=TapeCapture()))
    assert found == plain
    assert loop.graph_counters.failed_captures == 0
    assert loop.graph_counters.replays > 0


def test_model_that_cannot_be_captured_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """E.g. experts that are counted on the host."""
    forward = CachedModel.forward_placed

    def asking(self: CachedModel, *args: Any) -> ForwardResult:
        result = forward(self, *args)
        assert int(result.logits.argmax()) >= 0
        return result

    plain, _ = texts("llama", None)
    monkeypatch.setattr(capture, "BROKEN", [])
    monkeypatch.setattr(CachedModel, "forward_placed", asking)
    found, loop = texts("llama", GraphSettings(capture=TapeCapture(lenient=True)))
    assert found == plain
    assert loop.graph_counters.failed_captures == 1
    assert loop.graph_counters.captures == 1  # the part before it
