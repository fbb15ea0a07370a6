"""Answers of whole policies to whole prompts, kept on disk as each of them is finished.

A folder holds `runs.json`, which says what all its answers share, and one file of JSON lines a
policy, named by the policy's digest. A line is appended and synced when its prompt is answered,
so Ctrl-C, or worse, costs the prompts in flight and no more.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from specctl.errors import OutputError, TraceCorruptError, TraceMismatchError, UsageError
from specctl.policy import Policy, policy_digest
from specctl.records import Record, canonical_json, describe_violation
from specctl.runtime.conversations import ConversationPrompt
from specctl.runtime.output import prepare_folder, write_whole

HEADER = "runs.json"


class Answer(Record):
    """One prompt answered under one policy.

    Attributes:
        seed: 0-based repetition; always 0 when greedy.
        is_right: None where the prompt has no checkable answer.
        token_ids: emitted, EOS included.
        calls, verified_tokens, drafted_levels: see `runtime.requests.Metrics`.
        num_relaxed: admitted draft tokens that are not the target's own.
        opening: the closest call that ended a round strictly (see `paired.Opening`); a policy
            with a bound at or above it would have answered the same. None where there was none.
        measure: what the opening was measured by; openings of another measure say nothing.
        is_copied: known to be the same as another policy's answer, hence not decoded.
        wall_us: decoding time, its share of a batch.
    """

    prompt_id: str
    category: str
    seed: int
    is_right: bool | None
    token_ids: tuple[int, ...]
    calls: int
    verified_tokens: int
    drafted_levels: int
    num_relaxed: int
    opening: float | None
    measure: str = ""
    is_copied: bool
    wall_us: float

    @property
    def key(self) -> tuple[str, int]:
        return self.prompt_id, self.seed


class CheckedPrompt(ConversationPrompt, Protocol):
    """A prompt and, where there is one, its right answer."""

    @property
    def answer(self) -> str | None: ...


def prompts_digest(prompts: Sequence[CheckedPrompt]) -> str:
    """`sha256:<hex>` of the prompts and their right answers."""
    rows = [[p.prompt_id, list(p.turns), p.answer, p.chat] for p in prompts]
    return "sha256:" + hashlib.sha256(canonical_json(rows).encode()).hexdigest()


def answers_digest(answers: Mapping[str, Mapping[tuple[str, int], Answer]]) -> str:
    """`sha256:<hex>` of the texts that were judged, by the digest of their policy."""
    texts = {
        policy: [[*key, list(answer.token_ids)] for key, answer in sorted(found.items())]
        for policy, found in answers.items()
    }
    return "sha256:" + hashlib.sha256(canonical_json(texts).encode()).hexdigest()


@dataclass(frozen=True)
class RunFolder:
    """An open folder of answers."""

    path: Path

    @classmethod
    def open(cls, path: Path, header: Mapping[str, Any], *, resume: bool) -> RunFolder:
        """Creates a folder, or goes on with one of the same runs.

        Args:
            header: what all answers share: pair, prompts, sampling, limits.
            resume: whether the folder may hold answers already.

        Raises:
            OutputError: a place that cannot be written, or that holds something else.
            UsageError: answers are there and `resume` is off.
            TraceMismatchError: they are of other runs.
        """
        prepare_folder(path, "folder of runs")
        known = path / HEADER
        if known.exists():
            _check_header(known, header, resume=resume)
        elif any(path.iterdir()):
            raise OutputError(
                f"folder of runs {path}",
                expected="an empty folder, or one of earlier runs",
                found="other files",
                fix="choose another --runs",
            )
        else:
            write_whole(known, canonical_json(header).encode(), "header of runs")
        return cls(path)

    def answers(self, policy: Policy) -> dict[tuple[str, int], Answer]:
        """What is finished of a policy."""
        path = self._file(policy)
        if not path.exists():
            return {}
        found: dict[tuple[str, int], Answer] = {}
        # A line without its end is one that was being written when the process died.
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
            try:
                answer = Answer.model_validate_json(line)
            except ValidationError as error:
                raise TraceCorruptError(
                    f"{path}, line {number}",
                    expected="an answer",
                    found=describe_violation(error),
                    fix="remove that line and go on with --resume",
                ) from error
            found[answer.key] = answer
        return found

    def append(self, policy: Policy, answer: Answer) -> None:
        """Keeps an answer, behind the last whole line."""
        path = self._file(policy)
        try:
            content = path.read_bytes() if path.exists() else b""
            if content and not content.endswith(b"\n"):
                os.truncate(path, content.rfind(b"\n") + 1)
            with path.open("ab") as file:
                file.write(answer.model_dump_json().encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OutputError(
                f"{path}",
                expected="a file that can be appended to",
                found=error.strerror or type(error).__name__,
                fix="free space or correct permissions, then go on with --resume",
            ) from error

    def _file(self, policy: Policy) -> Path:
        return self.path / f"{policy_digest(policy).removeprefix('sha256:')[:16]}.jsonl"


def _check_header(path: Path, header: Mapping[str, Any], *, resume: bool) -> None:
    if not resume:
        raise UsageError(
            f"folder of runs {path.parent}",
            expected="a new folder",
            found="earlier runs",
            fix="go on with --resume, or choose another --runs",
        )
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise TraceCorruptError(
            str(path), expected="JSON", found=str(error), fix="choose another --runs"
        ) from error
    wanted = json.loads(canonical_json(header))
    differing = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if differing:
        raise TraceMismatchError(
            f"folder of runs {path.parent}",
            expected="the same pair, prompts and sampling",
            found=f"another {', '.join(differing)}",
            fix="choose another --runs",
        )
