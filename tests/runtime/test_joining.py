"""Continuous batching: requests join and leave between rounds, at any moment.

Texts are held against each request decoded alone. Greedy and sampled requests share batches, their
trees differ in size, so passes are packed; what rules remember follows a request from slot to slot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from torch import Tensor

from specctl.policy import Policy, StaticTree, SurvivalBudget
from specctl.policy.rules import BaseShape, Plan, RoundStart
from specctl.policy.verification import Outcome
from specctl.runtime import runnable
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.requests import Completion, Request, Sampling
from specctl.runtime.state import SlotMemory
from tests.runtime.toy import toy_requests
from tests.runtime.toy_loops import POLICIES, TREE, decode, loop_of

SHARED = Policy(shape=TREE, budget=SurvivalBudget(max_tokens=14))
JOINED = {**POLICIES, "eagle2+survival": SHARED}


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


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[int, ...]]:
    requests = mixed_requests()
    done = decode(POLICIES["ar"], requests)
    return {request_id: completion.token_ids for request_id, completion in done.items()}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", JOINED)
def test_late_requests_get_their_own_text(
    name: str, seed: int, alone: dict[str, tuple[int, ...]]
) -> None:
    loop = loop_of(JOINED[name], batch_size=2 + 2 * seed)
    done = join_at_random(loop, mixed_requests(), Random(seed))
    assert {c.request.request_id: c.token_ids for c in done} == alone


@dataclass
class Counting(BaseShape):
    """A shape that notes what it saw of a request, and keeps what it was told each round."""

    memory_size: int = 2

    def __post_init__(self) -> None:
        self.told: list[Tensor] = []

    def begin(self, start: RoundStart) -> Plan:
        self.told.append(start.memory.clone())
        return super().begin(start)

    def observe(self, memory: Tensor, outcome: Outcome) -> Tensor:
        """Rounds so far, and draft tokens accepted so far."""
        return memory + torch.stack([torch.ones_like(memory[:, 0]), outcome.num_accepted], 1)


class Memories:
    """What each request's memory should be at its rounds, from the records alone."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {}
        self.expected: list[list[list[float]]] = []

    def on_round(self, record: object) -> None:
        ids = [request.request_id for request in record.requests]
        self.expected.append([[*self.seen.get(i, [0.0, 0.0])] for i in ids])
        for request_id, accepted in zip(ids, record.path_length.tolist(), strict=True):
            rounds, total = self.seen.get(request_id, [0.0, 0.0])
            self.seen[request_id] = [rounds + 1, total + accepted]


def memories_are_right(monkeypatch: pytest.MonkeyPatch) -> bool:
    rule = Counting(3, 3, 3, 10)
    monkeypatch.setattr(runnable, "build_shape", lambda *_: rule)
    watcher = Memories()
    loop = loop_of(Policy(shape=StaticTree()), batch_size=3, observer=watcher)
    join_at_random(loop, mixed_requests(), Random(5))
    return [memory.tolist() for memory in rule.told] == watcher.expected


def test_what_a_rule_remembers_follows_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memories_are_right(monkeypatch)


@pytest.mark.parametrize("forgotten", ["move", "join"])
def test_memory_left_behind_is_seen(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory that stays in its slot when the request moves, or when the next one joins."""
    monkeypatch.setattr(SlotMemory, forgotten, lambda *_: None)
    assert not memories_are_right(monkeypatch)
