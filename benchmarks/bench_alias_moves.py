"""An alias moved a thousand times, every other time to what must not run, while requests decode.

The mover is a process of its own, as in a team; the loop follows by a thread. What must come out:
every request finishes with plain decoding's text, every round is one good policy's, and memory
stays flat. `stall_us`: what `poll` between two rounds costs, where nothing and where something was
ready.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from common import parser, report, requests_of

from specctl.artifacts import Origin, PairFingerprint, save_artifact
from specctl.policy import Chain, JointThreshold, Policy, RootOnly, StaticTree, policy_digest
from specctl.registry import (
    Cache,
    Reader,
    Reference,
    Writer,
    init_registry,
    open_registry,
    promote,
    push,
    read_package,
)
from specctl.registry.trust import Trust
from specctl.runtime.api import Decoder
from specctl.runtime.follow import AliasSource, Follower
from specctl.runtime.load import load_pair
from specctl.runtime.requests import Request, RoundRecord

NAME = "embedded+embedded@cpu:moves"
LARGEST = Policy(shape=StaticTree(depth=6, top_k=8, num_tokens=48))
GOOD = (
    LARGEST,
    Policy(shape=StaticTree(depth=3, top_k=4, num_tokens=12)),
    Policy(shape=Chain(num_draft_tokens=4)),
    Policy(shape=JointThreshold(depth=5, top_k=6, min_prob=0.05, num_tokens=24)),
)
TOO_LARGE = Policy(shape=StaticTree(depth=9, top_k=10, num_tokens=60))


def versions(pair: PairFingerprint) -> list[tuple[Policy, Origin]]:
    """Good and bad in turn: of another target, and beyond the loop's memory."""
    other = pair.model_copy(update={"target_digest": "sha256:" + "e" * 64})
    bad = [(GOOD[1], Origin(pair=other)), (TOO_LARGE, Origin(pair=pair))] * 2
    return [
        one
        for good, evil in zip(GOOD, bad, strict=True)
        for one in ((good, Origin(pair=pair)), evil)
    ]


def publish(place: Path, pair: PairFingerprint, work: Path) -> list[str]:
    """A registry with those versions; their digests in order."""
    writer, digests = Writer(init_registry(place), Trust.load(), "bench"), []
    for number, (policy, origin) in enumerate(versions(pair)):
        folder = work / f"version-{number}"
        save_artifact(folder, policy, origin, card=f"# {number}\n")
        package = read_package(folder)
        push(writer, package, NAME)
        digests.append(package.digest)
    promote(writer, NAME, "prod", digests[0])
    return digests


def move(place: Path, digests: list[str], num_moves: int, pace_s: float, done: Event) -> None:
    """The other team."""
    writer = Writer(open_registry(place), Trust.load(), "mover")
    for number in range(num_moves):
        time.sleep(pace_s)
        promote(writer, NAME, "prod", digests[(number + 1) % len(digests)])
    done.set()


class Rounds:
    """The policies of all rounds."""

    def __init__(self) -> None:
        self.digests: list[str] = []

    def on_round(self, record: RoundRecord) -> None:
        self.digests.append(record.policy_digest)


def endless(requests: list[Request]) -> Iterator[Request]:
    """The same requests again and again, under new ids."""
    from dataclasses import replace

    number = 0
    while True:
        for request in requests:
            yield replace(request, request_id=f"{request.request_id}/{number}")
        number += 1


def serve(
    follower: Follower, requests: list[Request], batch_size: int, done: Event
) -> dict[str, Any]:
    """Decodes until the moves are over; every text, what was taken over, what a poll cost."""
    texts: dict[str, tuple[int, ...]] = {}
    taken, quiet_us, busy_us, waiting = 0, [], [], 0
    stream, loop = endless(requests), follower.loop
    with follower:
        while loop.busy or not done.is_set():
            while waiting < batch_size and not done.is_set():
                loop.submit(next(stream))
                waiting += 1
            start = time.perf_counter()
            is_new = follower.poll()
            (busy_us if is_new else quiet_us).append((time.perf_counter() - start) * 1e6)
            taken += is_new
            for completion in loop.step():
                texts[completion.request.request_id] = completion.token_ids
                waiting -= 1
    return {"texts": texts, "taken": taken, "quiet_us": quiet_us, "busy_us": busy_us}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--moves", type=int, default=1000)
    options.add_argument("--pace-s", type=float, default=0.05, help="seconds between two moves")
    options.add_argument("--batch-size", type=int, default=4)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    pair = load_pair("embedded", "embedded", device=given.device, dtype=given.dtype)
    requests = requests_of(pair, given)
    plain = Decoder(pair, Policy(shape=RootOnly()), batch_size=given.batch_size)
    wanted = {c.request.request_id: c.token_ids for c in plain.loop(requests).run(requests)}
    plain.release()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(given, pair, requests, wanted, Path(folder))
    note = (
        f"{given.moves} moves by another process, one in {given.pace_s} s, every other one bad; "
        f"{given.batch_size} requests "
        f"decoded together, {given.max_new_tokens} tokens each; embedded pair, a fixture; registry "
        "in a local folder; alias looked at without a pause"
    )
    report("alias-moves", [row], given, note)


def measure(
    given: Any, pair: Any, requests: list[Request], wanted: dict[str, Any], work: Path
) -> dict[str, Any]:
    """One run, as a row."""
    place = work / "registry"
    digests = publish(place, pair.fingerprint, work)
    rounds = Rounds()
    decoder = Decoder(pair, LARGEST, batch_size=given.batch_size, observer=rounds)
    loop = decoder.loop(requests)
    reader = Reader(Trust.load(), Cache(work / "cache"))
    prod = Reference(NAME, "prod")
    source = AliasSource(open_registry(place), prod, reader, decoder.expectation)
    follower = Follower(source, loop, interval_s=0.0)
    context = multiprocessing.get_context("spawn")
    done = context.Event()
    mover = context.Process(target=move, args=(place, digests, given.moves, given.pace_s, done))
    before, start = peak_mib(), time.perf_counter()
    mover.start()
    served = serve(follower, requests, given.batch_size, done)
    mover.join()
    assert mover.exitcode == 0
    texts = served["texts"]
    known = {policy_digest(policy) for policy in GOOD}
    return {
        "moves": given.moves,
        "seconds": round(time.perf_counter() - start, 1),
        "requests": len(texts),
        "texts that differ": sum(t != wanted[k.rpartition("/")[0]] for k, t in texts.items()),
        "rounds": len(rounds.digests),
        "rounds of no good policy": sum(d not in known for d in rounds.digests),
        "changes taken over": served["taken"],
        "poll, nothing new, us": round(statistics.median(served["quiet_us"]), 1),
        "poll, new policy, us": round(statistics.median(served["busy_us"]), 1),
        "poll, worst, us": round(max(served["busy_us"] + served["quiet_us"]), 1),
        "peak memory grew, MiB": round(peak_mib() - before, 1),
    }


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
