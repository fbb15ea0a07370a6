"""Decisions by onnxruntime in the loop: the same rounds, and nothing in silence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from specctl.errors import UsageError
from specctl.policy import Policy, RootOnly, StaticTree
from specctl.runtime import twins
from specctl.runtime.api import Decoder
from specctl.runtime.capture import GraphSettings
from specctl.runtime.config import Decisions
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.requests import Request, RoundRecord
from specctl.runtime.twins import TwinSession
from tests.artifacts.examples import HETERO, POLICIES
from tests.policy.scorers import SCORED
from tests.runtime.captured import TapeCapture
from tests.runtime.equality import BASE, requests_of
from tests.runtime.onnx_devices import NEEDS_ONNXRUNTIME, SHAPES, open_device

pytestmark = NEEDS_ONNXRUNTIME
NETWORK = SHAPES["network"]


@pytest.fixture(scope="module")
def requests(pair: Pair) -> list[Request]:
    return requests_of(pair)[::6]


@dataclass
class Rounds:
    """What was verified, and what came of it, round by round."""

    seen: list[Any] = field(default_factory=list)

    def on_round(self, record: RoundRecord) -> None:
        ids = [request.request_id for request in record.requests]
        self.seen.append((ids, record.submitted.tolist(), record.tree.token_ids.tolist()))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every question to onnxruntime."""
    asked: list[int] = []
    ask = TwinSession.__call__

    def counted(session: TwinSession, given: Tensor) -> Tensor:
        asked.append(len(given))
        return ask(session, given)

    monkeypatch.setattr(TwinSession, "__call__", counted)
    return asked


@pytest.mark.parametrize("name", SHAPES)
def test_rounds_and_texts_are_those_of_torch(
    name: str, pair: Pair, requests: list[Request], asked: list[int]
) -> None:
    found = {}
    for decisions in ("torch", "onnx"):
        rounds, policy = Rounds(), Policy(shape=SHAPES[name])
        decoder = Decoder(pair, policy, batch_size=3, observer=rounds, decisions=decisions)
        texts = {c.request.request_id: c.token_ids for c in decoder.loop(requests).run(requests)}
        found[decisions] = (texts, rounds.seen)
        assert bool(asked) == (decisions == "onnx")
    assert found["onnx"] == found["torch"]
    assert len({len(row) for _, submitted, _ in found["torch"][1] for row in submitted}) > 1
    assert len(asked) >= len(found["onnx"][1])


def test_a_reloaded_policy_is_asked_in_the_same_way(
    pair: Pair, requests: list[Request], asked: list[int]
) -> None:
    loop = Decoder(pair, Policy(shape=NETWORK), decisions="onnx").loop(requests)
    loop.submit(requests[0])
    loop.step()
    with pytest.raises(UsageError, match="shape eagle2 has no learned scorer"):
        loop.reload(Policy(shape=BASE))
    assert loop.policy == Policy(shape=NETWORK)
    loop.reload(Policy(shape=NETWORK.model_copy(update={"beta": 0.3})))
    before = len(asked)
    while loop.busy:
        loop.step()
    assert len(asked) > before


@pytest.mark.cuda
def test_cuda_texts_are_those_of_torch() -> None:
    pair = load_pair("embedded", "embedded", device=str(open_device("cuda")), dtype="float32")
    policy, prompts = Policy(shape=NETWORK), ["def add(a, b):", "How much is 12 + 30?"]
    by_torch, by_onnx = (
        Decoder(pair, policy, batch_size=2, decisions=decisions).generate(
            prompts, max_new_tokens=24
        )
        for decisions in ("torch", "onnx")
    )
    for ours, theirs in zip(by_onnx, by_torch, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.metrics.calls == theirs.metrics.calls
        assert ours.metrics.verified_tokens == theirs.metrics.verified_tokens


@pytest.mark.parametrize("decisions", ["auto", "torch", "onnx"])
def test_kernels_decide_only_where_nothing_else_was_asked_for(
    decisions: Decisions, pair: Pair, requests: list[Request]
) -> None:
    graphs = GraphSettings(capture=TapeCapture())
    loop = Decoder(pair, Policy(shape=NETWORK), decisions=decisions, graphs=graphs).loop(requests)
    assert (loop.round.kernels is None) == (decisions != "auto")


def test_plain_decoding_has_nothing_to_ask(pair: Pair) -> None:
    decoder = Decoder(pair, Policy(shape=RootOnly()), decisions="onnx")
    assert len(decoder.generate("def", max_new_tokens=2)) == 1


@pytest.mark.parametrize("absent", ["onnxruntime", "onnx"])
def test_what_cannot_be_had_is_refused_before_anything_runs(
    absent: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bins and gates are compared with a number: torch decides them."""
    for shape in (HETERO, StaticTree(), POLICIES["echo"].shape):
        with pytest.raises(UsageError, match="no learned scorer"):
            Decoder(pair, Policy(shape=shape), decisions="onnx")
    monkeypatch.setattr(twins, "find_spec", lambda name: None if name == absent else name)
    with pytest.raises(UsageError, match=f"{absent} is not installed"):
        Decoder(pair, Policy(shape=SCORED["c2t chain"]), decisions="onnx")


def test_an_unknown_backend_is_refused(pair: Pair) -> None:
    with pytest.raises(UsageError, match="expected auto, fused, torch or onnx, found 'triton'"):
        Decoder(pair, Policy(shape=BASE), decisions="triton")  # type: ignore[arg-type]
