"""The loop: exact stops, metrics, streaming, what callers raise, refusals."""

from __future__ import annotations

from contextlib import suppress

import pytest

from specctl.errors import PromptTooLongError, UsageError
from specctl.policy import ElasticBudget, Policy, StaticTree
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.requests import Request, pooled
from tests.runtime import toy


@pytest.mark.parametrize("name", toy.POLICIES)
@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_length_is_exact(name: str, limit: int) -> None:
    done = toy.decode(toy.POLICIES[name], toy.toy_requests(3, max_new_tokens=limit), batch_size=2)
    assert {len(c.token_ids) for c in done.values()} == {limit}
    assert {c.finish_reason for c in done.values()} == {"length"}


@pytest.mark.parametrize("name", toy.POLICIES)
def test_text_ends_with_the_first_eos(name: str) -> None:
    requests = toy.toy_requests(6)
    plain = toy.decode(toy.POLICIES["ar"], requests)
    # Tokens that stand somewhere inside these texts play the part of EOS.
    eos = {plain[r.request_id].token_ids[5 + i] for i, r in enumerate(requests[:3])}
    done = toy.decode(toy.POLICIES[name], requests, eos_ids=eos, batch_size=3)
    for request in requests:
        text = plain[request.request_id].token_ids
        end = next((i + 1 for i, token in enumerate(text) if token in eos), len(text))
        found = done[request.request_id]
        assert found.token_ids == text[:end]
        assert found.finish_reason == ("eos" if text[end - 1] in eos else "length")


def test_first_token_may_already_be_the_end() -> None:
    request = toy.toy_requests(1)[0]
    first = toy.decode(toy.POLICIES["ar"], [request])["r0"].token_ids[0]
    done = toy.decode(toy.POLICIES["eagle2"], [request], eos_ids=(first,))["r0"]
    assert done.token_ids == (first,)
    assert done.metrics.calls == 0


def test_context_ends_the_text() -> None:
    request = Request("r", tuple(range(3, 13)), 50)
    done = toy.decode(toy.POLICIES["eagle2"], [request], max_text_tokens=20)["r"]
    assert (len(done.token_ids), done.finish_reason) == (10, "context")


def test_a_prompt_without_room_is_refused_before_anything_runs() -> None:
    loop = toy.loop_of(toy.POLICIES["ar"], max_text_tokens=8)
    with pytest.raises(PromptTooLongError, match="at most 7 fit"):
        loop.submit(Request("long", tuple(range(8)), 4))
    assert not loop.busy


@pytest.mark.parametrize("name", toy.POLICIES)
def test_metrics_add_up(name: str) -> None:
    kept = toy.Kept()
    done = toy.decode(toy.POLICIES[name], toy.toy_requests(4), batch_size=2, observer=kept)
    total = pooled(c.metrics for c in done.values())
    assert total.num_requests == 4
    assert total.num_tokens == sum(len(c.token_ids) for c in done.values())
    records = kept.records
    assert total.calls == sum(len(r.requests) for r in records)
    assert total.verified_tokens == sum(int((r.submitted >= 0).sum()) for r in records)
    assert total.num_accepted == sum(int(r.num_accepted.sum()) for r in records)
    assert total.drafted_levels == sum(int(r.offered_depth.sum()) for r in records)
    # Every request's first token comes from its prompt, all others from rounds.
    assert total.num_tokens == 4 + sum(int(r.num_emitted.sum()) for r in records)
    assert total.mean_acceptance_length == 1 + total.num_accepted / total.calls


def test_records_tell_the_round() -> None:
    kept = toy.Kept()
    [done] = toy.decode(toy.POLICIES["eagle2"], toy.toy_requests(1), observer=kept).values()
    position = 1
    for index, record in enumerate(kept.records):
        assert int(record.round_idx) == index
        assert int(record.position) == position
        text = [*done.request.prompt_ids, *done.token_ids[:position]]
        assert int(record.context_tokens) == len(text)
        assert int(record.pool.token_ids[0, 0]) == text[-1]
        path = record.path[0][record.path[0] >= 0]
        emitted = [*record.tree.token_ids[0, path[1:]].tolist()]
        emitted.append(int(record.target_ids[0, path[-1]]))
        count = int(record.num_emitted)
        assert tuple(emitted[:count]) == done.token_ids[position : position + count]
        position += count
    assert position == len(done.token_ids)


def test_tokens_arrive_as_they_are_emitted() -> None:
    loop, pieces = toy.loop_of(toy.POLICIES["eagle2"]), []
    loop.submit(toy.toy_requests(1)[0])
    finished = []
    while loop.busy:
        finished += loop.step(lambda _, new: pieces.append(list(new)))
    assert [token for piece in pieces for token in piece] == list(finished[0].token_ids)
    assert len(pieces) == finished[0].metrics.calls + 1


class Interrupting:
    """A caller's own code that fails every so many times that it is called."""

    def __init__(self, every: int) -> None:
        self.every, self.num_calls = every, 0

    def __call__(self, *_: object) -> None:
        self.num_calls += 1
        if self.num_calls % self.every == 0:
            raise RuntimeError("of the caller")

    on_round = __call__


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("who", ["callback", "observer"])
def test_what_a_caller_raises_costs_no_text(who: str, every: int) -> None:
    """Nobody is decoded beyond the end of a text, and no finished request is lost."""
    requests, failing = toy.toy_requests(6), Interrupting(every)
    plain = toy.decode(toy.POLICIES["ar"], requests)
    eos = {plain[r.request_id].token_ids[5 + i] for i, r in enumerate(requests[:3])}
    options = {"eos_ids": eos, "batch_size": 3}
    expected = toy.decode(toy.POLICIES["eagle2"], requests, **options)
    observer = failing if who == "observer" else None
    loop, found = toy.loop_of(toy.POLICIES["eagle2"], observer=observer, **options), {}
    for request in requests:
        loop.submit(request)
    for _ in range(300):  # more than rounds and failures; it would not end by itself
        with suppress(RuntimeError):
            done = loop.step(failing if who == "callback" else None)
            found |= toy.texts_of(done)
    assert failing.num_calls >= every
    assert found == toy.texts_of(expected.values())


def test_what_cannot_run_is_refused() -> None:
    target, drafter = toy.toy_pair()
    common = {"batch_size": 1, "max_text_tokens": 32, "eos_ids": ()}
    with pytest.raises(UsageError, match="no drafter"):
        DecodeLoop(target, None, toy.POLICIES["chain"], **common)
    wide = Policy(shape=StaticTree(depth=2, top_k=64, num_tokens=64))
    drafter.vocab_size = 32
    with pytest.raises(UsageError, match="exceeds the draft vocabulary, 32"):
        DecodeLoop(target, drafter, wide, **common)
    budget = Policy(shape=toy.TREE, budget=ElasticBudget(max_tokens=2))
    with pytest.raises(UsageError, match="below the batch size, 3"):
        DecodeLoop(target, drafter, budget, **{**common, "batch_size": 3})


@pytest.mark.parametrize("fields", [{"prompt_ids": ()}, {"max_new_tokens": 0}])
def test_an_empty_request_is_refused(fields: dict) -> None:
    with pytest.raises(UsageError, match="at least"):
        Request(**{"request_id": "r", "prompt_ids": (1,), "max_new_tokens": 4, **fields})
