"""A reload that is refused, however late, leaves the loop as it was; one that is not, is whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from specctl.errors import DeviceMemoryError, UsageError
from specctl.policy import (
    DynamicDepth,
    EntropyStop,
    JointThreshold,
    Policy,
    StaticTree,
    policy_digest,
)
from specctl.runtime import decode
from specctl.runtime import round as rounds
from specctl.runtime.api import Decoder
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.requests import Request
from tests.runtime.captured import ordinary, pair, requests, tape
from tests.runtime.toy_loops import Kept

OLD = Policy(shape=StaticTree(depth=6, top_k=6, num_tokens=40))
NEW = Policy(shape=JointThreshold(depth=5, top_k=5, num_tokens=30, min_prob=0.01))
ON_HOST = Policy(shape=DynamicDepth(depth=4, top_k=4, num_tokens=20, check_levels=(2,)))
REMEMBERS = Policy(shape=EntropyStop(window=3))
MOST = 16
"""Tokens of each request: several rounds."""


def begun(given: list[Request], *, fused: bool = True) -> tuple[DecodeLoop, Kept]:
    """A loop on the device that has decoded two rounds under the old policy."""
    of, kept = pair(), Kept()
    loop = DecodeLoop(
        of.target.model,
        of.drafter,
        OLD,
        batch_size=len(given),
        max_text_tokens=max(len(r.prompt_ids) + r.max_new_tokens for r in given),
        eos_ids=of.target.eos_ids,
        observer=kept,
        graphs=tape(),
        decisions="fused" if fused else "auto",
    )
    for request in given:
        loop.submit(request)
    loop.step()
    loop.step()
    return loop, kept


def no_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


Refused = Callable[[DecodeLoop, pytest.MonkeyPatch], None]


def by_its_kernels(loop: DecodeLoop, _: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="fused decisions"):
        loop.reload(ON_HOST)


def without_memory(module: object, name: str, policy: Policy = NEW) -> Refused:
    def refuse(loop: DecodeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, no_memory)
            with pytest.raises(torch.OutOfMemoryError):
                loop.reload(policy)

    return refuse


LATE: dict[str, Refused] = {
    "no fused kernels": by_its_kernels,
    "no memory for what rules remember": without_memory(rounds, "SlotMemory"),
    "no memory for the slots' state": without_memory(rounds, "SlotState"),
    "no memory for the buffers": without_memory(rounds, "DraftBuffers"),
    "no memory for the rounds": without_memory(decode, "Round"),
}


@pytest.mark.parametrize("refused", LATE.values(), ids=LATE)
def test_a_late_refusal_leaves_everything_as_it_was(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = requests(2, new_tokens=MOST)
    loop, kept = begun(given)
    before = (loop.policy, loop.rules, loop.round, loop.graph_counters.graph_bytes)
    refused(loop, monkeypatch)
    after = (loop.policy, loop.rules, loop.round, loop.graph_counters.graph_bytes)
    assert after == before
    texts = {}
    while loop.busy:
        texts |= {done.request.request_id: done.token_ids for done in loop.step()}
    assert texts == ordinary(OLD, given).texts
    assert {record.policy_digest for record in kept.records} == {policy_digest(OLD)}
    assert loop.graph_counters.replays > 0, "its graphs went on"
    loop.reload(NEW)
    assert loop.policy == NEW


@pytest.mark.parametrize("new", [NEW, ON_HOST, REMEMBERS], ids=lambda policy: policy.name)
def test_a_reload_takes_what_the_old_graphs_held_off_the_books(new: Policy) -> None:
    loop, kept = begun(requests(2, new_tokens=MOST), fused=False)
    loop.step()
    assert loop.graph_counters.graph_bytes > 0
    loop.reload(new)
    assert loop.graph_counters.graph_bytes == 0
    del kept.records[:]
    loop.step()
    assert {record.policy_digest for record in kept.records} == {policy_digest(new)}


def test_a_decoder_uses_no_loop_again_that_decides_by_another_policy() -> None:
    """As one that followed an alias: the decoder's own policy is what its texts come from."""
    decoder = Decoder(pair(), OLD, graphs=tape())
    loop = decoder.loop_for(64)
    assert decoder.loop_for(64) is loop, "it keeps its rounds on the device"
    loop.reload(NEW)
    assert decoder.loop_for(64).policy == OLD


def test_a_finished_text_is_given_before_its_loop_serves_another_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step in which it finished ended early, as memory was lacking for the next request."""
    decoder = Decoder(pair(), OLD, batch_size=2, graphs=tape())
    short, long = requests(2, new_tokens=MOST)
    loop = decoder.loop_for(64)
    loop.submit(replace(short, max_new_tokens=1))
    loop.submit(long)
    admit = loop._admit

    def fail(request: Request) -> tuple[int, ...]:
        if request is long:
            no_memory()
        return admit(request)

    monkeypatch.setattr(loop, "_admit", fail)
    with pytest.raises(DeviceMemoryError, match="no request was lost"):
        loop.step()
    assert loop.busy
    assert decoder.loop_for(64) is not loop
