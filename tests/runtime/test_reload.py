"""Another policy between two rounds: texts go on; a refusal, however late, leaves all as it was. A
decoder keeps the loop whose graphs it paid for, as long as the models are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from specctl.errors import (
    DeviceMemoryError,
    InvariantError,
    LossyPolicyError,
    SpecctlError,
    UsageError,
)
from specctl.policy import (
    Chain,
    DynamicDepth,
    EntropyStop,
    JointThreshold,
    Mars,
    Policy,
    RootOnly,
    ScoredTree,
    StaticTree,
    policy_digest,
)
from specctl.runtime import decode, runnable
from specctl.runtime import round as rounds
from specctl.runtime.api import Decoder
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.drafter import Eagle3Drafter
from specctl.runtime.requests import Request
from specctl.runtime.runnable import is_closed
from tests.policy.scorers import steps
from tests.runtime.captured import make_loop, ordinary, pair, requests, run, tape
from tests.runtime.toy import Failing, Kept, loop_of, texts_of, toy_requests

LARGE = Policy(shape=StaticTree(depth=4, top_k=3, num_tokens=12))
SMALL = Policy(shape=StaticTree(depth=2, top_k=2, num_tokens=4))
LEARNED = Policy(
    shape=ScoredTree(
        scorer=steps("joint_prob", cuts=(0.2,), probs=(0.1, 0.9)),
        beta=0.3,
        depth=2,
        first_top_k=2,
        second_top_k=2,
    )
)
ONLINE = Policy(shape=EntropyStop(window=3))
TURNS = (SMALL, LEARNED, ONLINE, Policy(shape=Chain(num_draft_tokens=3)), LARGE)


def test_texts_do_not_see_the_policies_change() -> None:
    plain = texts_of(loop_of(PLAIN, batch_size=3).run(toy_requests(6)))
    kept = Kept()
    loop, done = loop_of(LARGE, batch_size=3, observer=kept), {}
    for request in toy_requests(6):
        loop.submit(request)
    for turn in range(10**6):
        if not loop.busy:
            break
        done |= texts_of(loop.step())
        loop.reload(TURNS[turn % len(TURNS)])
    assert done == plain
    digests = [record.policy_digest for record in kept.records]
    wanted = [policy_digest(LARGE), *(policy_digest(p) for p in TURNS)]
    assert digests[: len(wanted)] == wanted, "each round is one policy's, from the next one on"


PLAIN = Policy(shape=RootOnly())
MANY = Policy(shape=StaticTree(depth=4, top_k=3, num_tokens=13))
DEEP = Policy(shape=StaticTree(depth=8, top_k=3, num_tokens=12))
LOSSY = Policy(shape=Chain(), acceptance=Mars())


@pytest.mark.parametrize(
    ("old", "new", "error", "words"),
    [
        (LARGE, MANY, UsageError, "do not fit the memory for 12"),
        (LARGE, DEEP, UsageError, "drafting slots"),
        (LARGE, LOSSY, LossyPolicyError, "began with a lossless policy"),
        (PLAIN, SMALL, UsageError, "began without a drafter"),
    ],
)
def test_refusals_leave_the_old_policy(
    old: Policy, new: Policy, error: type[SpecctlError], words: str
) -> None:
    loop = loop_of(old)
    rules = loop.rules
    with pytest.raises(error, match=words):
        loop.reload(new)
    assert loop.rules is rules
    assert loop.policy == old


@pytest.mark.policy_faults
def test_rules_that_fail_their_rehearsal_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, build = loop_of(LARGE), runnable.build_shape
    monkeypatch.setattr(
        runnable, "build_shape", lambda *given: Failing(build(*given), "select", lambda: True)
    )
    with pytest.raises(UsageError, match=r"failed in a rehearsal.*RuntimeError.*the old policy"):
        loop.reload(SMALL)
    assert loop.policy == LARGE


def test_what_is_no_tree_is_seen() -> None:
    parent = torch.tensor([[-1, 0, 0, 1, -2]])
    whole = torch.tensor([[0, 1, 3, -1]])
    assert is_closed(whole, parent, 3)
    for broken in ([[0, 3, -1, -1]], [[1, 3, -1, -1]], [[0, 3, 1, -1]], [[0, 1, 2, 3]]):
        assert not is_closed(torch.tensor(broken), parent, 3), broken


# --------------------------------------------------------------------------- late refusals


OLD = Policy(shape=StaticTree(depth=6, top_k=6, num_tokens=40))
NEW = Policy(shape=JointThreshold(depth=5, top_k=5, num_tokens=30, min_prob=0.01))
ON_HOST = Policy(shape=DynamicDepth(depth=4, top_k=4, num_tokens=20, check_levels=(2,)))
MOST = 16
"""Tokens of each request: several rounds."""


def begun(given: list[Request], *, fused: bool = True) -> tuple[DecodeLoop, Kept]:
    """A loop on the device that has decoded two rounds under the old policy."""
    kept, decisions = Kept(), "fused" if fused else "auto"
    loop = make_loop(OLD, given, tape(), batch_size=len(given), observer=kept, decisions=decisions)
    for request in given:
        loop.submit(request)
    loop.step()
    loop.step()
    return loop, kept


def no_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


Refused = Callable[[DecodeLoop, pytest.MonkeyPatch], None]


def by_its_kernels(loop: DecodeLoop, _: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="decisions fused"):
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
        texts |= texts_of(loop.step())
    assert texts == ordinary(OLD, given).texts
    assert {record.policy_digest for record in kept.records} == {policy_digest(OLD)}
    assert loop.graph_counters.replays > 0, "its graphs went on"
    loop.reload(NEW)
    assert loop.policy == NEW


def test_a_reload_takes_what_the_old_graphs_held_off_the_books() -> None:
    loop, kept = begun(requests(2, new_tokens=MOST), fused=False)
    loop.step()
    assert loop.graph_counters.graph_bytes > 0
    loop.reload(ON_HOST)
    assert loop.graph_counters.graph_bytes == 0
    del kept.records[:]
    loop.step()
    assert {record.policy_digest for record in kept.records} == {policy_digest(ON_HOST)}


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
