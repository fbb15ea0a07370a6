"""The embedded pair decoded by the ordinary loop and on the device: what the tests compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from specctl.collect.prompts import load_prompts
from specctl.policy import Policy
from specctl.runtime.capture import GraphSettings
from specctl.runtime.conversations import Conversation, DecodeSettings, next_request
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.requests import Completion, Request, Sampling
from tests.runtime.tape import TapeCapture
from tests.runtime.toy_loops import Kept, texts_of

NEW_TOKENS = 12


@dataclass(frozen=True)
class Run:
    """What came of it: texts and, request by request, counts that the policy decided."""

    texts: dict[str, tuple[int, ...]]
    counts: dict[str, tuple[int, int, int]]
    loop: DecodeLoop


@cache
def pair() -> Pair:
    return load_pair("embedded", "embedded", device="cpu", dtype="float32")


@cache
def small_pair() -> Pair:
    return load_pair("embedded", "embedded:small", device="cpu", dtype="float32")


def requests(
    num: int, samplings: tuple[Sampling, ...] = (Sampling(),), new_tokens: int = NEW_TOKENS
) -> list[Request]:
    """Prompts of all categories; the samplings take turns, each request with a seed of its own."""
    prompts, found = load_prompts("embedded"), []
    for index in range(num):
        prompt = prompts[(140 + 97 * index) % len(prompts)]
        sampling = samplings[index % len(samplings)].for_request(1000 + index)
        settings = DecodeSettings(new_tokens, sampling)
        found.append(next_request(pair().target.tokenizer, Conversation(prompt), settings))
    return found


def tape(**options: object) -> GraphSettings:
    """Settings that record as strictly as CUDA; `options` are those of `GraphSettings`."""
    return GraphSettings(**{"capture": TapeCapture(), **options})  # type: ignore[arg-type]


def make_loop(
    policy: Policy,
    given: list[Request],
    graphs: GraphSettings | None,
    *,
    batch_size: int = 3,
    of: Pair | None = None,
    observer: Kept | None = None,
    **options: Any,
) -> DecodeLoop:
    of = of or pair()
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in given)
    return DecodeLoop(
        of.target.model,
        of.drafter,
        policy,
        batch_size=batch_size,
        max_text_tokens=longest,
        eos_ids=of.target.eos_ids,
        observer=observer,
        graphs=graphs,
        **options,
    )


def decode(
    policy: Policy,
    given: list[Request],
    graphs: GraphSettings | None,
    *,
    batch_size: int = 3,
    of: Pair | None = None,
    observer: Kept | None = None,
) -> Run:
    loop = make_loop(policy, given, graphs, batch_size=batch_size, of=of, observer=observer)
    return run(loop, given)


def ordinary(policy: Policy, given: list[Request], *, batch_size: int = 3) -> Run:
    """The same without graphs; decoded once for all tests, so that none may patch it."""
    return _ordinary(policy, tuple(given), batch_size)


@cache
def _ordinary(policy: Policy, given: tuple[Request, ...], batch_size: int) -> Run:
    return decode(policy, list(given), None, batch_size=batch_size)


def run(loop: DecodeLoop, given: list[Request]) -> Run:
    done = list(loop.run(given))
    return Run(
        texts_of(done),
        {
            c.request.request_id: (
                c.metrics.calls,
                c.metrics.verified_tokens,
                c.metrics.drafted_levels,
            )
            for c in done
        },
        loop,
    )


def same_as_ordinary(
    policy: Policy, given: list[Request], graphs: GraphSettings, *, batch_size: int = 3
) -> Run:
    """What is decoded with graphs, after its texts and decisions are held to those without."""
    found = decode(policy, given, graphs, batch_size=batch_size)
    plain = ordinary(policy, given, batch_size=batch_size)
    assert (found.texts, found.counts) == (plain.texts, plain.counts)
    return found


def drive(
    loop: DecodeLoop, given: list[Request], actions: dict[int, Callable[[], object]]
) -> dict[str, Completion]:
    """All requests decoded, with something done before some of the steps."""
    done, step = [], 0
    for request in given:
        loop.submit(request)
    while loop.busy:
        actions.get(step, lambda: None)()
        done += loop.step()
        step += 1
    assert step > max(actions), "the texts ended before all was done"
    return {one.request.request_id: one for one in done}


def check_captured(found: Run) -> None:
    """Graphs did most of it, and nothing failed to be one."""
    counters = found.loop.graph_counters
    assert found.loop.round.kernels is not None
    assert counters.failed_captures == 0
    assert counters.captures > 0
    assert counters.replays > counters.captures
