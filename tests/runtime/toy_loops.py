"""Decode loops of the toy pair, who watches them, and what fails in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specctl.policy import Chain, EntropyBins, Policy, RootOnly, StaticTree
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.requests import Completion, Request, RoundRecord
from tests.runtime.toy import toy_pair

TREE = StaticTree(depth=3, top_k=3, num_tokens=10)
POLICIES = {
    "ar": Policy(shape=RootOnly()),
    "chain": Policy(shape=Chain(num_draft_tokens=4)),
    "eagle2": Policy(shape=TREE),
    "hetero": Policy(shape=EntropyBins(base=TREE, edges=(9.0, 10.0, 11.0))),
}


class Watcher:
    """Keeps every record."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []

    def on_round(self, record: RoundRecord) -> None:
        self.records.append(record)


def loop_of(policy: Policy, **options: object) -> DecodeLoop:
    target, drafter = toy_pair()
    settings = {"batch_size": 1, "max_text_tokens": 64, "eos_ids": ()}
    return DecodeLoop(target, drafter, policy, **{**settings, **options})


def decode(policy: Policy, requests: list[Request], **options: object) -> dict[str, Completion]:
    return {done.request.request_id: done for done in loop_of(policy, **options).run(requests)}


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


@dataclass
class Kept:
    """Remembers every round."""

    records: list[RoundRecord] = field(default_factory=list)

    def on_round(self, record: RoundRecord) -> None:
        self.records.append(record)
