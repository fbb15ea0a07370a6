"""Many processes publish and move one alias while some are killed; the parent keeps the history.

What a worker was told is sent to the parent at once, so a kill loses only what nobody was told.
Afterwards the parent holds the registry against that history (`audit`).
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

from specctl.artifacts.manifest import CARD, MANIFEST, TENSORS, digest_of
from specctl.errors import RegistryError
from specctl.records import canonical_json
from specctl.registry import Package, Registry, Writer, open_registry, verify
from specctl.registry import promote as promote_alias
from specctl.registry import push as push_package
from specctl.registry.log import Move, Publish
from specctl.registry.trust import Trust

NAME, ALIAS = "storm+head@cpu:test", "prod"


def package(word: str) -> Package:
    """Files with digests; a registry asks for no more."""
    files = {TENSORS: word.encode() * 50, CARD: b"# storm\n"}
    listed = {n: {"digest": digest_of(d), "size_bytes": len(d)} for n, d in files.items()}
    manifest = canonical_json({"artifact_version": 1, "files": listed}).encode()
    return Package(digest_of(manifest), {MANIFEST: manifest, **files})


def work(url: str, worker: int, first: int, num_ops: int, acks: Connection) -> None:
    """Publishes, and after every publication moves the alias to it, from the first-th on."""
    writer = Writer(open_registry(url), Trust(), f"worker {worker}")
    acks.send({"op": "start"})
    for number in range(first, num_ops):
        made = package(f"{worker} {number} {random.random()}")
        pushed = push_package(writer, made, NAME)
        acks.send({"op": "publish", "digest": made.digest, "generation": pushed.entry.generation})
        try:
            moved = promote_alias(writer, NAME, ALIAS, made.digest)
        except RegistryError as error:
            acks.send({"op": error.code, "number": number})
        else:
            generation = moved.entry.generation
            acks.send({"op": "move", "digest": made.digest, "generation": generation})
        acks.send({"op": "done", "number": number})


def watch(url: str, acks: Connection) -> None:
    """A reader: everything that a history names must be whole at the moment it is seen."""
    registry, seen, num_reads = open_registry(url), set[str](), 0
    while not acks.poll(0.01):
        for digest in registry.log(NAME).state.versions:
            if digest not in seen:
                registry.content.fetch(digest)
                seen.add(digest)
                num_reads += 1
    acks.send(num_reads)


@dataclass
class History:
    """What the parent was told.

    Attributes:
        num_told: acknowledgements by kind, refusals by code.
    """

    published: dict[int, str] = field(default_factory=dict)
    moved: dict[int, str] = field(default_factory=dict)
    num_told: Counter[str] = field(default_factory=Counter)
    num_kills: int = 0
    num_reads: int = 0
    wall_s: float = 0.0

    def take(self, ack: dict[str, Any]) -> None:
        self.num_told[ack["op"]] += 1
        into = {"publish": self.published, "move": self.moved}.get(ack["op"])
        if into is not None:
            assert ack["generation"] not in into, "two were told that they won"
            into[ack["generation"]] = ack["digest"]


@dataclass
class _Life:
    """A worker's process, until it ends or is killed."""

    worker: int
    process: Any
    acks: Connection
    next_number: int
    has_started: bool = False


def storm(
    url: str,
    *,
    num_workers: int,
    num_ops: int,
    num_kills: int,
    seed: int,
    context: BaseContext | None = None,
) -> History:
    """Runs all workers to their ends; kills as many as asked at random moments on the way."""
    context = context or multiprocessing.get_context("fork")
    chance, history, begun = random.Random(seed), History(), time.perf_counter()
    reader, reader_end = _reader(context, url)
    lives = {w: _live(context, url, w, 0, num_ops) for w in range(num_workers)}
    kill_at = sorted(chance.randrange(num_workers * num_ops) for _ in range(num_kills))
    while lives:
        for life in _heard(lives, history, num_ops):
            del lives[life.worker]
            if life.next_number < num_ops:
                lives[life.worker] = _live(context, url, life.worker, life.next_number, num_ops)
        while kill_at and history.num_told["done"] >= kill_at[0] and lives:
            running = [life for life in lives.values() if life.has_started]
            if not running:
                break
            kill_at.pop(0)
            time.sleep(chance.random() * 0.02)
            chance.choice(running).process.kill()
            history.num_kills += 1
    reader_end.send("stop")
    history.num_reads = reader_end.recv()
    reader.join()
    history.wall_s = time.perf_counter() - begun
    return history


def _reader(context: BaseContext, url: str) -> tuple[Any, Connection]:
    ours, theirs = context.Pipe()
    process = context.Process(target=watch, args=(url, theirs), daemon=True)  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    return process, ours


def _live(context: BaseContext, url: str, worker: int, first: int, num_ops: int) -> _Life:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(url, worker, first, num_ops, theirs), daemon=True)  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    return _Life(worker, process, ours, first)


def _heard(lives: dict[int, _Life], history: History, num_ops: int) -> Iterator[_Life]:
    """Takes in what was sent; gives the lives that ended."""
    by_pipe = {id(life.acks): life for life in lives.values()}
    for pipe in wait([life.acks for life in lives.values()], timeout=0.05):
        life = by_pipe[id(pipe)]
        try:
            ack = life.acks.recv()
        except (EOFError, OSError):
            life.process.join()
            assert life.process.exitcode in (0, -signal.SIGKILL), "a worker failed by itself"
            yield life
            continue
        life.has_started = True
        history.take(ack)
        if ack["op"] == "done":
            life.next_number = ack["number"] + 1


def audit(registry: Registry, history: History) -> dict[str, int]:
    """The registry against what workers were told; all laws by assertion.

    Reading the log proves that generations are dense and chained.
    """
    entries = registry.log(NAME).entries
    for generation, digest in history.published.items():
        assert entries[generation].entry.action == Publish(digest=digest), "an acked version lost"
    for generation, digest in history.moved.items():
        action = entries[generation].entry.action
        assert isinstance(action, Move), "an acked move lost"
        assert action.digest == digest, "an acked move lost"
    moves = [one.entry.action for one in entries if isinstance(one.entry.action, Move)]
    damage = verify(registry, Trust()).findings
    assert not damage, damage[:3]
    return {
        "num_entries": len(entries),
        "num_acked": len(history.published) + len(history.moved),
        "num_moves": len(moves),
        "num_conflicts": history.num_told["E_ALIAS_CONFLICT"],
        "num_kills": history.num_kills,
        "num_reads": history.num_reads,
    }
