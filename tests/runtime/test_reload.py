"""Another policy between two rounds: texts go on, refusals leave everything as it was."""

from __future__ import annotations

import pytest
import torch

from specctl.errors import LossyPolicyError, SpecctlError, UsageError
from specctl.policy import (
    Chain,
    EntropyStop,
    Mars,
    Policy,
    RootOnly,
    ScoredTree,
    StaticTree,
    policy_digest,
)
from specctl.runtime import runnable
from specctl.runtime.reload import is_closed
from tests.policy.scorers import steps
from tests.runtime.toy import toy_requests
from tests.runtime.toy_loops import Failing, Kept, loop_of, texts_of

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
    plain = texts_of(loop_of(Policy(shape=RootOnly()), batch_size=3).run(toy_requests(6)))
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


@pytest.mark.parametrize(
    ("policy", "error", "words"),
    [
        (Policy(shape=StaticTree(depth=4, top_k=3, num_tokens=13)), UsageError, "at most 12 subm"),
        (Policy(shape=StaticTree(depth=8, top_k=3, num_tokens=12)), UsageError, "drafting slots"),
        (Policy(shape=Chain(), acceptance=Mars()), LossyPolicyError, "began with one"),
    ],
)
def test_refusals_leave_the_old_policy(
    policy: Policy, error: type[SpecctlError], words: str
) -> None:
    loop = loop_of(LARGE)
    rules = loop.rules
    with pytest.raises(error, match=words):
        loop.reload(policy)
    assert loop.rules is rules
    assert loop.policy == LARGE


def test_a_loop_without_a_drafter_gets_none() -> None:
    loop = loop_of(Policy(shape=RootOnly()))
    with pytest.raises(UsageError, match="began without a drafter"):
        loop.reload(SMALL)


@pytest.mark.policy_faults
def test_rules_that_fail_their_rehearsal_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, build = loop_of(LARGE), runnable.build_shape
    monkeypatch.setattr(
        runnable, "build_shape", lambda *given: Failing(build(*given), "select", lambda: True)
    )
    with pytest.raises(UsageError, match=r"rehearsal of the policy.*RuntimeError.*the old policy"):
        loop.reload(SMALL)
    assert loop.policy == LARGE


def test_what_is_no_tree_is_seen() -> None:
    parent = torch.tensor([[-1, 0, 0, 1, -2]])
    whole = torch.tensor([[0, 1, 3, -1]])
    assert is_closed(whole, parent, 3)
    for broken in ([[0, 3, -1, -1]], [[1, 3, -1, -1]], [[0, 3, 1, -1]], [[0, 1, 2, 3]]):
        assert not is_closed(torch.tensor(broken), parent, 3), broken
