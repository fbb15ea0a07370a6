"""AdaSD in the loop: what is remembered belongs to the request, wherever its slot moves."""

from __future__ import annotations

from collections import deque

import pytest

from specctl.policy import Chain, EntropyStop, JensenShannon, Policy, RootOnly
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.requests import Completion, Request, Sampling
from specctl.runtime.state import SlotMemory
from tests.runtime.toy import toy_pair, toy_requests

STOP = EntropyStop(window=6, min_samples=1)
WARM = {"prior_accepted": 0.3, "prior_rejected": 0.6, "prior_weight": 4.0}
LOSSLESS = {
    "stop": Policy(shape=STOP),
    "stop in a tree": Policy(
        shape=EntropyStop(window=4, top_k=3, num_tokens=10, min_samples=1, keep_last=False)
    ),
}
LOSSY = {
    "accept": Policy(
        shape=Chain(num_draft_tokens=4), acceptance=JensenShannon(min_samples=1, **WARM)
    ),
    "both": Policy(shape=STOP, acceptance=JensenShannon(min_samples=1)),
    "both, forgetting": Policy(
        shape=STOP, acceptance=JensenShannon(min_samples=1, half_life=3.0, variant="C", **WARM)
    ),
}
Trail = dict[str, tuple[tuple[int, ...], int, int]]
"""Text, calls and verified tokens of every request."""


def requests() -> list[Request]:
    """Of uneven length, so that slots move; every other one is sampled."""
    asked = toy_requests(10, max_new_tokens=30)
    return [
        Request(
            r.request_id,
            r.prompt_ids,
            12 + 6 * (i % 4),
            sampling=Sampling(0.7 * (i % 2), seed=i),
        )
        for i, r in enumerate(asked)
    ]


def decode(policy: Policy, batch_size: int) -> Trail:
    """All requests; in a batch they are submitted one by one while others are being decoded."""
    target, drafter = toy_pair(noise=0.05)
    loop = DecodeLoop(
        target, drafter, policy, batch_size=batch_size, max_text_tokens=64, eos_ids=()
    )
    late, done = deque(requests()), []
    while late or loop.busy:
        for _ in range(min(len(late), 2)):
            loop.submit(late.popleft())
        done += loop.step()
    return {c.request.request_id: trail(c) for c in done}


def trail(done: Completion) -> tuple[tuple[int, ...], int, int]:
    return tuple(done.token_ids), done.metrics.calls, done.metrics.verified_tokens


@pytest.fixture(scope="module")
def alone() -> dict[str, Trail]:
    return {name: decode(policy, 1) for name, policy in (LOSSLESS | LOSSY).items()}


@pytest.mark.parametrize("name", LOSSLESS | LOSSY)
def test_a_request_decodes_alike_whoever_shares_its_batch(
    name: str, alone: dict[str, Trail]
) -> None:
    assert decode((LOSSLESS | LOSSY)[name], 4) == alone[name]


@pytest.mark.parametrize("method", ["move", "join", "write"])
def test_a_memory_that_loses_its_request_shows(
    method: str, alone: dict[str, Trail], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants of the slots: not moved, not cleared for a newcomer, never written."""
    monkeypatch.setattr(SlotMemory, method, lambda self, *_: None)
    names = ["stop", "both"]
    assert all(decode((LOSSLESS | LOSSY)[name], 4) != alone[name] for name in names)


def test_the_stop_alone_leaves_every_text_as_it_is(alone: dict[str, Trail]) -> None:
    plain = {name: text for name, (text, *_) in decode(Policy(shape=RootOnly()), 1).items()}
    for name in LOSSLESS:
        assert {r: text for r, (text, *_) in alone[name].items()} == plain


def test_the_acceptance_changes_texts_and_a_clip_of_zero_does_not(
    alone: dict[str, Trail],
) -> None:
    plain = {name: text for name, (text, *_) in alone["stop"].items()}
    for name in LOSSY:
        assert {r: text for r, (text, *_) in alone[name].items()} != plain, name
    clipped = Policy(shape=STOP, acceptance=JensenShannon(min_samples=1, max_threshold=0.0))
    assert decode(clipped, 4) == alone["stop"]
