"""A decoder keeps the loop whose graphs it paid for, as long as the models are its own."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest

from specctl.errors import InvariantError, UsageError
from specctl.policy import Policy, StaticTree
from specctl.runtime.api import Decoder
from specctl.runtime.drafter import Eagle3Drafter
from tests.runtime.captured import make_loop, pair, requests, run, tape

POLICY = Policy(shape=StaticTree(depth=3, top_k=3, num_tokens=10))
LONG, SHORT = "def add(a, b):\n    return", "The"


def test_graphs_serve_the_next_call() -> None:
    decoder = Decoder(pair(), POLICY, graphs=tape())
    [first] = decoder.generate(LONG, max_new_tokens=12)
    captures = decoder.graph_counters.captures
    assert captures > 0
    [again] = decoder.generate(LONG, max_new_tokens=12)
    decoder.generate(SHORT, max_new_tokens=4)
    assert decoder.graph_counters.captures == captures
    assert again.token_ids == first.token_ids


def test_somewhat_longer_texts_need_no_other_loop() -> None:
    """A new loop captures all its graphs again."""
    decoder = Decoder(pair(), POLICY, graphs=tape())
    loop = decoder.loop_for(300)
    assert decoder.loop_for(40) is loop
    assert decoder.loop_for(512) is loop
    assert decoder.loop_for(513) is not loop
    assert decoder.loop_for(10**6).max_text_tokens == pair().target.model.context_tokens


def test_models_that_another_loop_took_are_given_back_to_nobody() -> None:
    first, second = (Decoder(pair(), POLICY, graphs=tape()) for _ in range(2))
    [wanted] = first.generate(LONG, max_new_tokens=8)
    second.generate(SHORT, max_new_tokens=8)
    [found] = first.generate(LONG, max_new_tokens=8)
    assert found.token_ids == wanted.token_ids


@pytest.mark.parametrize("graphs", [True, False])
def test_loop_whose_models_were_taken_refuses_to_go_on(graphs: bool) -> None:  # noqa: FBT001
    given = requests(1)
    loop = make_loop(POLICY, given, tape() if graphs else None)
    loop.submit(given[0])
    loop.step()
    other = make_loop(POLICY, given, None)
    with pytest.raises(InvariantError, match="another decode loop"):
        loop.step()
    assert run(other, given).texts


def test_fused_decisions_are_had_or_refused() -> None:
    found = Decoder(pair(), POLICY, graphs=tape(), decisions="fused").loop_for(32)
    assert found.round.kernels is not None
    with pytest.raises(UsageError, match="no graphs on cpu"):
        Decoder(pair(), POLICY, decisions="fused").loop_for(32)


def test_models_on_several_devices_are_refused() -> None:
    head = deepcopy(pair().drafter.head).to("meta")  # type: ignore[union-attr]
    apart = replace(pair(), drafter=Eagle3Drafter(head, pair().drafter.aux_layers))  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="on meta, the target on cpu"):
        Decoder(apart, POLICY)
