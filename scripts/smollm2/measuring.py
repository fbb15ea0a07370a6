"""Settings of llama.cpp, measured in turns: servers of all settings in this process, each prompt
through all of them in an order that is shuffled anew."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.engines.engine import EngineDrafter, Serving
from specctl.engines.llamacpp_flags import FILE, LLAMACPP, LlamaServer, read_file
from specctl.engines.llamacpp_server import OwnServer
from specctl.policy import RootOnly
from specctl.progress import advance, progress
from specctl.runtime.words import resolve_policy

PLAIN, DEFAULT, TUNED, AGAIN, SYNTHETIC = "plain", "default", "tuned", "again", "synthetic"
POLICIES = {
    PLAIN: "ar",
    DEFAULT: "chain:num_draft_tokens=3",
    "chain 1": "chain:num_draft_tokens=1",
    "chain 2": "chain:num_draft_tokens=2",
    "chain 5": "chain:num_draft_tokens=5",
    "stop .3": "p_min:threshold=0.3:window=5",
    "stop .5": "p_min:threshold=0.5:window=5",
    "stop .7": "p_min:threshold=0.7:window=5",
}
"""By the name of a row; the second is what `llama-server` drafts without further flags."""
NGRAMS = ("ngram-mod", "ngram-simple")
"""Drafters of llama.cpp that need no head, with their own defaults."""
OF_SLOTS = (PLAIN, DEFAULT, "stop .7", *NGRAMS[1:])
"""Rows at several slots."""
SEED = 0


@dataclass(frozen=True)
class Question:
    """A prompt as token ids, and the answer of plain decoding."""

    prompt_id: str
    category: str
    prompt_ids: tuple[int, ...]
    answer: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ground:
    """The files of a pair, and the size of requests."""

    target: Path
    drafter: Path
    num_threads: int
    max_new_tokens: int

    def drafts(self, words: str, slots: int) -> LlamaServer | None:
        """The flags of a policy, as `export` writes them."""
        policy = resolve_policy(words).policy
        if isinstance(policy.shape, RootOnly):
            return None
        drafter = EngineDrafter(model=str(self.drafter), method="eagle3")
        serving = Serving(drafter=drafter, max_batch_size=slots, target=str(self.target))
        return read_file(LLAMACPP.write(policy, serving).files[FILE])

    def server(self, drafts: LlamaServer | str | None, slots: int = 1) -> OwnServer:
        sizes = {"slots": slots, "context_tokens": 1024, "num_threads": self.num_threads}
        return OwnServer(self.target, drafts, **sizes)


def lines_of(path: Path) -> list[Any]:
    """The whole lines of a file of JSON lines; none without the file."""
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@contextmanager
def adding_to(path: Path) -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    """Appends rows that belong together as one line, behind the whole lines of the file: a run that
    was killed may have left a part of one."""
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)

        def add(rows: list[dict[str, Any]]) -> None:
            file.write(json.dumps(rows).encode() + b"\n")
            file.flush()

        yield add


def answers(ground: Ground, questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    """Plain answers, as `collect --responses` reads them."""
    server = ground.server(None)
    with progress("answers", len(questions)):
        for one in questions:
            found = server.complete(one.prompt_ids, ground.max_new_tokens)
            yield {"prompt_id": one.prompt_id, "token_ids": found.tokens}
            advance("answers")
    server.close()


def in_turns(
    ground: Ground,
    settings: dict[str, LlamaServer | str | None],
    questions: Sequence[Question],
    done: Path,
) -> None:
    """Adds to `done` a line for each prompt, a row of it for each setting; prompts that it has are
    left out."""
    finished = {rows[0]["prompt"] for rows in lines_of(done)}
    left = [one for one in questions if one.prompt_id not in finished]
    servers, start_s = dict[str, OwnServer](), dict[str, float]()
    with progress("turns", len(left)), adding_to(done) as add:
        for question in left:
            names = [*settings]
            random.Random(f"{SEED} {question.prompt_id}").shuffle(names)
            rows = []
            for name in names:
                if name not in servers:
                    began = time.perf_counter()
                    servers[name] = ground.server(settings[name])
                    start_s[name] = time.perf_counter() - began
                    servers[name].complete(question.prompt_ids[:8], 2)  # its first is slower
                rows.append(_row(ground, servers[name], name, question, start_s[name]))
            add(rows)
            advance("turns")
    for server in servers.values():
        server.close()


def _row(
    ground: Ground, server: OwnServer, name: str, question: Question, start_s: float
) -> dict[str, Any]:
    made_up = name == SYNTHETIC
    limit = len(question.answer) if made_up else ground.max_new_tokens
    found = server.complete(question.prompt_ids, limit, ignore_eos=made_up)
    timings = found.timings
    return {
        "prompt": question.prompt_id,
        "category": question.category,
        "setting": name,
        "tokens": timings.predicted_n - 1,
        "calls": timings.predicted_n - 1 - timings.draft_n_accepted,
        "drafted": timings.draft_n,
        "accepted": timings.draft_n_accepted,
        "decode_us": 1e3 * timings.predicted_ms,
        "prompt_us": 1e3 * timings.prompt_ms,
        "start_s": start_s,
        "equal": None if made_up else found.tokens == question.answer,
    }


def at_slots(
    ground: Ground,
    settings: dict[str, LlamaServer | str | None],
    questions: Sequence[Question],
    slots: int,
    done: Path,
) -> None:
    """Adds to `done` a row for each setting: all prompts, `slots` at a time."""
    finished = {row["setting"] for [row] in lines_of(done)}
    names = [name for name in settings if name not in finished]
    random.Random(SEED).shuffle(names)
    with progress("settings", len(names)), adding_to(done) as add:
        for name in names:
            began = time.perf_counter()
            server = ground.server(settings[name], slots)
            started = time.perf_counter()
            with ThreadPoolExecutor(slots) as pool:
                jobs = [
                    pool.submit(server.complete, one.prompt_ids, ground.max_new_tokens)
                    for one in questions
                ]
                found = [job.result() for job in jobs]
            ended = time.perf_counter()
            server.close()
            row = {
                "setting": name,
                "tokens": sum(one.timings.predicted_n for one in found),
                "num_equal": sum(
                    one.tokens == of.answer for one, of in zip(found, questions, strict=True)
                ),
                "wall_s": ended - started,
                "start_s": started - began,
            }
            add([row])
            advance("settings")
