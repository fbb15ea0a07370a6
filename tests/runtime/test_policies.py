"""Every kind of policy on toy models: the text is plain decoding's, whoever shares the batch.

Greedy and sampled requests of uneven length join late, in any order, and leave at any time. So
trees differ in size, passes are packed, slots are used again, and what rules remember has to follow
a request from slot to slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor

from specctl.policy import Chain, EntropyStop, JensenShannon, Mars, Policy, StaticTree
from specctl.policy.rules import BaseShape, Plan, RoundStart
from specctl.policy.verification import Outcome
from specctl.runtime import runnable
from specctl.runtime.requests import Completion, RoundRecord
from specctl.runtime.state import SlotMemory
from specctl.runtime.words import resolve_policy
from tests.runtime import toy

TREE = "eagle2:3x3/10"
# The toy drafter is flat, about 9 % for its best token: thresholds stand inside its range.
ADAPTIVE = {
    "svip": "svip:threshold=2.043:window=6",
    "ddd": "ddd:depth=4:top_k=3:num_tokens=10:check_levels=1/2/3:min_beam_logp=-1.75",
    "opt_tree": "opt_tree:depth=4:top_k=4:num_tokens=8:min_gain=0.03",
}
SHARED = {
    "survival": f"{TREE}+survival:max_tokens=14",
    "both": f"{ADAPTIVE['svip']}+survival:max_tokens=9",
}
STOP = EntropyStop(window=6, min_samples=1)
REMEMBERING = {
    "stop": Policy(shape=STOP),
    "stop in a tree": Policy(
        shape=EntropyStop(window=4, top_k=3, num_tokens=10, min_samples=1, keep_last=False)
    ),
}
DIVERGING = {
    "accept": Policy(shape=Chain(num_draft_tokens=4), acceptance=JensenShannon(min_samples=1)),
    "both": Policy(shape=STOP, acceptance=JensenShannon(min_samples=1)),
}
RELAXED = {
    f"{form} on {shape}": Policy(
        shape=toy.POLICIES[shape].shape, acceptance=Mars(form=form, theta=0.5)
    )
    for form, shape in (("prob_ratio", "chain"), ("ratio", "eagle2"))
}
LOSSLESS = {
    **toy.POLICIES,
    **REMEMBERING,
    **{name: resolve_policy(spec).policy for name, spec in (ADAPTIVE | SHARED).items()},
}
POLICIES = LOSSLESS | {f"lossy {name}": one for name, one in (DIVERGING | RELAXED).items()}


@cache
def decoded(name: str, batch_size: int) -> tuple[dict[str, Completion], list[RoundRecord]]:
    """All requests, submitted late and in any order; decoded once for all who want it."""
    noise, kept = 0.02 if name in LOSSLESS.keys() - REMEMBERING else 0.06, toy.Kept()
    loop = toy.loop_of(POLICIES[name], batch_size=batch_size, observer=kept, noise=noise)
    done = toy.join_at_random(loop, toy.mixed_requests(), Random(batch_size))
    return {one.request.request_id: one for one in done}, kept.records


@pytest.fixture(scope="module")
def plain() -> toy.Texts:
    return toy.texts_of(toy.decode(POLICIES["ar"], toy.mixed_requests()).values())


@pytest.mark.parametrize(
    "batch_size", [1, 4, *(pytest.param(size, marks=pytest.mark.nightly) for size in (2, 6))]
)
@pytest.mark.parametrize("name", LOSSLESS)
def test_text_is_that_of_plain_decoding(name: str, batch_size: int, plain: toy.Texts) -> None:
    done, records = decoded(name, batch_size)
    assert toy.texts_of(done.values()) == plain
    assert name == "ar" or sum(int(r.num_accepted.sum()) for r in records) > 0
    if name in ADAPTIVE | REMEMBERING:
        depths = {depth for record in records for depth in record.offered_depth.tolist()}
        assert len(depths) > 1, "a shape that never adapts proves nothing"
    if name in SHARED and batch_size == 4:
        sizes = {n for r in records for n in (r.submitted >= 0).sum(1).tolist()}
        assert len(sizes) > 1, "a budget that never binds proves nothing"


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in SHARED])
def test_a_request_is_treated_alike_in_any_batch(name: str) -> None:
    assert trails(name, 1) == trails(name, 4)


def trails(name: str, batch_size: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Text, calls and verified tokens of every request."""
    done, _ = decoded(name, batch_size)
    return {
        request_id: (one.token_ids, one.metrics.calls, one.metrics.verified_tokens)
        for request_id, one in done.items()
    }


@pytest.mark.parametrize("name", [name for name in POLICIES if name.startswith("lossy")])
def test_lossy_policies_change_some_text(name: str, plain: toy.Texts) -> None:
    done, _ = decoded(name, 4)
    assert toy.texts_of(done.values()) != plain


# --------------------------------------------------------------------------- what rules remember


@dataclass
class Counting(BaseShape):
    """A shape that notes what it saw of a request, and keeps what it was given each round."""

    memory_size: int = 2

    def __post_init__(self) -> None:
        self.given: list[Tensor] = []

    def begin(self, start: RoundStart) -> Plan:
        self.given.append(start.memory.clone())
        return super().begin(start)

    def observe(self, memory: Tensor, outcome: Outcome) -> Tensor:
        """Rounds so far, and draft tokens accepted so far."""
        return memory + torch.stack([torch.ones_like(memory[:, 0]), outcome.num_accepted], 1)


class Memories:
    """What each request's memory should be at its rounds, from the records alone."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {}
        self.expected: list[list[list[float]]] = []

    def on_round(self, record: RoundRecord) -> None:
        ids = [request.request_id for request in record.requests]
        self.expected.append([[*self.seen.get(i, [0.0, 0.0])] for i in ids])
        for request_id, accepted in zip(ids, record.path_length.tolist(), strict=True):
            rounds, total = self.seen.get(request_id, [0.0, 0.0])
            self.seen[request_id] = [rounds + 1, total + accepted]


def memories_are_right(monkeypatch: pytest.MonkeyPatch) -> bool:
    rule, watcher = Counting(3, 3, 3, 10), Memories()
    with monkeypatch.context() as patch:
        patch.setattr(runnable, "build_shape", lambda *_: rule)
        loop = toy.loop_of(Policy(shape=StaticTree()), batch_size=3, observer=watcher)
    toy.join_at_random(loop, toy.mixed_requests(), Random(5))
    return [memory.tolist() for memory in rule.given] == watcher.expected


def test_what_a_rule_remembers_follows_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memories_are_right(monkeypatch)


@pytest.mark.parametrize("method", ["move", "join", "write"])
def test_a_memory_that_loses_its_request_shows(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants of the slots: not moved, not cleared for a newcomer, never written."""
    alone = {name: trails(name, 1) for name in ("stop", "lossy both")}
    monkeypatch.setattr(SlotMemory, method, lambda *_: None)
    assert not memories_are_right(monkeypatch)
    monkeypatch.setitem(globals(), "decoded", decoded.__wrapped__)
    assert all(trails(name, 4) != alone[name] for name in alone)
