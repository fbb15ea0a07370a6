"""Decode loops of the toy pair, who watches them, and what fails in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from specctl.policy import Chain, EntropyBins, Policy, RootOnly, StaticTree
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.requests import Completion, Request, RoundRecord, Sampling
from tests.runtime.toy import toy_pair, toy_requests

Texts = dict[str, tuple[int, ...]]
TREE = StaticTree(depth=3, top_k=3, num_tokens=10)
POLICIES = {
    "ar": Policy(shape=RootOnly()),
    "chain": Policy(shape=Chain(num_draft_tokens=4)),
    "eagle2": Policy(shape=TREE),
    "hetero": Policy(shape=EntropyBins(base=TREE, edges=(9.0, 10.0, 11.0))),
}


@dataclass
class Kept:
    """An observer that keeps every round."""

    records: list[RoundRecord] = field(default_factory=list)

    def on_round(self, record: RoundRecord) -> None:
        self.records.append(record)


def loop_of(policy: Policy, *, noise: float = 0.02, **options: object) -> DecodeLoop:
    """Args: noise: the more, the less the drafter agrees with the target."""
    target, drafter = toy_pair(noise=noise)
    settings = {"batch_size": 1, "max_text_tokens": 64, "eos_ids": ()}
    return DecodeLoop(target, drafter, policy, **{**settings, **options})


def decode(policy: Policy, requests: list[Request], **options: object) -> dict[str, Completion]:
    return {done.request.request_id: done for done in loop_of(policy, **options).run(requests)}


def texts_of(done: Iterable[Completion]) -> Texts:
    return {one.request.request_id: one.token_ids for one in done}


def mixed_requests() -> list[Request]:
    """Uneven prompts and lengths; every other request samples."""
    return [
        replace(
            request,
            max_new_tokens=2 + 5 * i % 17,
            sampling=Sampling(0.8, top_p=0.95, seed=i) if i % 2 else Sampling(),
        )
        for i, request in enumerate(toy_requests(9))
    ]


def join_at_random(loop: DecodeLoop, requests: list[Request], random: Random) -> list[Completion]:
    """Requests are submitted in any order, some in front of the queue, between any two rounds."""
    waiting, done = random.sample(requests, len(requests)), []
    while waiting or loop.busy:
        for _ in range(random.choice((0, 0, 0, 1, 2))):
            if waiting:
                loop.submit(waiting.pop(), first=random.random() < 0.3)
        done += loop.step()
    return done


@dataclass
class Failing:
    """A rule that raises in some of its calls."""

    inner: Any
    method: str
    fails: Callable[[], bool]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return self._call if name == self.method else found

    def _call(self, *given: Any) -> Any:
        if self.fails():
            raise RuntimeError("a bug of the policy's")
        return getattr(self.inner, self.method)(*given)
