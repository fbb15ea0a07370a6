"""Paired runs: policies on the same prompts, and their losses against the strict one.

    prompts ─run_prompts─► answers of each policy (a `RunFolder`) ─compare_answers─► figures
                                                                  ─losses_of─► quality contract

The strict policy is the same shape with point-mass verification: its answers are the target's own
text.

A `RunFolder` holds `runs.json`, the facts that its answers share, and one file of JSON lines per
policy, named by the policy's digest. A line is appended and synced when its prompt is answered, so
an interrupt or a crash costs only the prompts in flight.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from pydantic import ValidationError
from torch import Tensor

from specctl.answers import is_correct
from specctl.artifacts import PairFingerprint
from specctl.collect.prompts import load_prompt_files, spread
from specctl.durable import prepare_folder, write_whole
from specctl.errors import (
    EvidenceError,
    OutputError,
    TraceCorruptError,
    TraceMismatchError,
    UsageError,
    reason_of,
)
from specctl.policy import Policy, policy_digest
from specctl.progress import advance
from specctl.records import Record, canonical_json, describe_violation
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import ConversationPrompt, DecodeSettings
from specctl.runtime.identity import hardware_name
from specctl.runtime.load import Pair
from specctl.runtime.requests import RoundRecord, pooled
from specctl.stats import (
    UNKNOWN,
    Floats,
    Interval,
    paired_difference,
    ratio_of_ratios,
    ratio_of_sums,
    recovery_ratio,
    share,
)
from specctl.train.configs import PairedConfig

HEADER = "runs.json"


class Answer(Record):
    """One prompt answered under one policy; counts: see `runtime.requests.Metrics`."""

    prompt_id: str
    category: str
    is_right: bool | None  # None if the prompt has no checkable answer
    token_ids: tuple[int, ...]  # emitted, EOS included
    calls: int
    verified_tokens: int
    drafted_levels: int
    opening: float | None
    """The largest `Opening` of its rounds, None without one: a policy whose bound is at or above it
    gives the same answer."""
    measure: str = ""  # of the opening; openings of other measures do not compare
    is_copied: bool  # copied from another policy's answer, not decoded
    wall_us: float  # decoding time, its share of a batch


class CheckedPrompt(ConversationPrompt, Protocol):
    """A prompt, with its right answer if there is one."""

    @property
    def answer(self) -> str | None: ...


def digest_of(facts: Any) -> str:
    """`sha256:<hex>` of what the canonical JSON holds."""
    return "sha256:" + hashlib.sha256(canonical_json(facts).encode()).hexdigest()


@dataclass(frozen=True)
class RunFolder:
    """An open folder of answers."""

    path: Path

    @classmethod
    def open(cls, path: Path, header: Mapping[str, Any], *, resume: bool) -> RunFolder:
        """Creates a folder, or resumes one of the same runs.

        Args:
            header: facts that all answers share: pair, prompts, sampling, limits.

        Raises:
            OutputError: the place cannot be written, or holds something else.
            UsageError: it holds answers, and `resume` is off.
            TraceMismatchError: its answers are of other runs.
        """
        prepare_folder(path, "folder of runs")
        known, wanted, other = path / HEADER, canonical_json(header), "choose another --runs"
        if not known.exists():
            if any(path.iterdir()):
                raise OutputError(f"{path} holds files other than runs", hint=other)
            write_whole(known, wanted.encode(), "header of runs")
            return cls(path)
        if not resume:
            raise UsageError(f"{path} holds earlier runs", hint=f"go on with --resume, or {other}")
        try:
            theirs = json.loads(known.read_bytes())
        except ValueError as error:
            raise TraceCorruptError(f"{known} is no JSON: {error}", hint=other) from error
        ours = json.loads(wanted)
        differing = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        if differing:
            raise TraceMismatchError(
                f"the runs in {path} are of another {', '.join(differing)}", hint=other
            )
        return cls(path)

    def answers(self, policy: Policy) -> dict[str, Answer]:
        """The finished answers of a policy."""
        path = self._file(policy)
        if not path.exists():
            return {}
        found: dict[str, Answer] = {}
        # The last line has no end if the process died while writing it.
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
            try:
                answer = Answer.model_validate_json(line)
            except ValidationError as error:
                raise TraceCorruptError(
                    f"line {number} of {path} is no answer: {describe_violation(error)}",
                    hint="remove that line and go on with --resume",
                ) from error
            found[answer.prompt_id] = answer
        return found

    def append(self, policy: Policy, answer: Answer) -> None:
        """Appends an answer after the last whole line."""
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
                f"{path} cannot be appended to: {reason_of(error)}",
                hint="free space or correct permissions, then go on with --resume",
            ) from error

    def _file(self, policy: Policy) -> Path:
        return self.path / f"{policy_digest(policy).removeprefix('sha256:')[:16]}.jsonl"


# --------------------------------------------------------------------------- runs

Answers = Mapping[str, Answer]
"""By prompt."""


@dataclass(frozen=True)
class Plan:
    """Prompts, and settings for answering them under every policy.

    Prompts without an answer count for divergence and speed, not for accuracy.
    """

    prompts: Sequence[CheckedPrompt]
    settings: DecodeSettings = field(default_factory=DecodeSettings)
    batch_size: int = 1

    def header(self, pair: PairFingerprint) -> dict[str, Any]:
        """The facts that all answers of this plan share."""
        prompts = [
            [p.prompt_id, list(p.turns), p.answer, p.chat, *map(list, p.before)]
            for p in self.prompts
        ]
        return {
            "runs_version": 1,
            "pair": pair.model_dump(mode="json"),
            "prompts_digest": digest_of(prompts),
            "max_new_tokens": self.settings.max_new_tokens,
            "sampling": vars(self.settings.sampling),
        }

    def setup(self, pair: Pair) -> dict[str, Any]:
        """Models, machine and decoding, stated beside figures."""
        model, sampling = pair.target.model, self.settings.sampling
        return {
            "pair": f"{pair.target.name} with {pair.drafter_name}",
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": hardware_name(*model.devices),
            "max_new_tokens": self.settings.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "batch_size": self.batch_size,
        }


@dataclass(frozen=True)
class Opening:
    """The distance of each request of a round from being relaxed."""

    measure: str  # identifies the unit of the numbers
    of_round: Callable[[RoundRecord], Tensor]  # [B], -inf if no threshold would change the round
    bound: Callable[[Any], float]  # of an acceptance, which relaxes openings above it

    def unchanged(self, answers: Answers, policy: Policy) -> Answers:
        """The answers of a stricter policy that this policy would give too."""
        least = self.bound(policy.acceptance)
        return {
            key: answer
            for key, answer in answers.items()
            if answer.measure == self.measure
            and (answer.opening is None or answer.opening <= least)
        }


@dataclass
class OpeningLog:
    """The largest opening of each prompt."""

    opening: Opening
    largest: dict[str, float] = field(default_factory=dict)

    def on_round(self, record: RoundRecord) -> None:
        # Nothing after the end of a text changes it.
        is_cut = record.path_length >= record.num_emitted
        values = self.opening.of_round(record).masked_fill(is_cut, float("-inf"))
        for request, value in zip(record.requests, values.tolist(), strict=True):
            if value > self.largest.get(request.prompt_id, float("-inf")):
                self.largest[request.prompt_id] = value


def run_prompts(
    pair: Pair,
    policy: Policy,
    plan: Plan,
    folder: RunFolder,
    *,
    opening: Opening | None = None,
    known: Answers | None = None,
) -> dict[str, Answer]:
    """Decodes the unfinished prompts under a policy; returns all its answers.

    Args:
        opening: recorded with every answer, for `Opening.unchanged`.
        known: answers of another policy that this one would give too.
    """
    done = folder.answers(policy)
    advance("answers", len(done))

    def keep(answer: Answer) -> None:
        folder.append(policy, answer)
        done[answer.prompt_id] = answer
        advance("answers")

    by_id = {prompt.prompt_id: prompt for prompt in plan.prompts}
    for key, answer in (known or {}).items():
        if key not in done and key in by_id:
            keep(answer.model_copy(update={"is_copied": True}))
    missing = [prompt for key, prompt in by_id.items() if key not in done]
    if not missing:
        return done
    watch = None if opening is None else OpeningLog(opening)
    decoder = Decoder(pair, policy, batch_size=plan.batch_size, observer=watch)
    for talk in decoder.converse(missing, plan.settings):
        prompt = by_id[talk.prompt.prompt_id]
        metrics = pooled(one.metrics for one in talk.completions)
        wanted = prompt.answer
        keep(
            Answer(
                prompt_id=prompt.prompt_id,
                category=prompt.category,
                is_right=None if wanted is None else is_correct(talk.texts[-1], wanted),
                token_ids=tuple(t for one in talk.completions for t in one.token_ids),
                calls=metrics.calls,
                verified_tokens=metrics.verified_tokens,
                drafted_levels=metrics.drafted_levels,
                opening=None if watch is None else watch.largest.get(prompt.prompt_id),
                measure=opening.measure if opening else "",
                is_copied=False,
                wall_us=metrics.wall_us,
            )
        )
    return done


# --------------------------------------------------------------------------- figures


class Comparison(Record):
    """One relaxed policy against the strict one, over the prompts that both answered."""

    num_prompts: int
    tokens_per_call: Interval  # tokens emitted by rounds, Σ / Σ
    speedup: Interval  # of tokens per call over the strict policy's; not of times
    num_checked: int  # prompts with a checkable answer; accuracy and losses are over these
    accuracy: float | None
    strict_accuracy: float | None
    difference: Interval
    recovery: Interval  # accuracy over the strict policy's, the paper's recovery ratio
    lost: int  # answers that only the strict policy has right
    gained: int
    diverged: Interval  # share of texts that differ from the strict ones


def compare_answers(strict: Answers, relaxed: Answers) -> Comparison:
    """Figures of two complete sets of answers to the same prompts."""
    keys = sorted(strict)
    pairs = [(strict[key], relaxed[key]) for key in keys]
    ours, theirs = _speed(keys, relaxed), _speed(keys, strict)
    right, strict_right = _right(keys, relaxed), _right(keys, strict)
    checked = [(s.is_right, r.is_right) for s, r in pairs if s.is_right is not None]
    num_diverged = sum(s.token_ids != r.token_ids for s, r in pairs)
    return Comparison(
        num_prompts=len(keys),
        tokens_per_call=ratio_of_sums(*ours),
        speedup=ratio_of_ratios(ours, theirs),
        num_checked=len(right),
        accuracy=float(right.mean()) if len(right) else None,
        strict_accuracy=float(strict_right.mean()) if len(right) else None,
        difference=paired_difference(right - strict_right) if len(right) else UNKNOWN,
        recovery=recovery_ratio(right, strict_right) if len(right) else UNKNOWN,
        lost=sum(bool(s) and not r for s, r in checked),
        gained=sum(bool(r) and not s for s, r in checked),
        diverged=share(num_diverged, len(pairs)),
    )


def losses_of(strict: Answers, relaxed: Answers) -> Floats:
    """`[n]` loss per prompt with a checkable answer, in prompt order: 1 if the strict answer was
    right and the relaxed one is wrong, else 0."""
    keys = sorted(key for key, answer in strict.items() if answer.is_right is not None)
    if not keys:
        raise nothing_to_check()
    return np.array([bool(strict[k].is_right) and not relaxed[k].is_right for k in keys], float)


def judged_prompts(files: Sequence[str], config: PairedConfig) -> list[Any]:
    """The prompts of files; with a limit, a sample of the prompts with checkable answers.

    Raises:
        EvidenceError: no prompt has a checkable answer. InputError: see `load_prompt_files`.
    """
    loaded = load_prompt_files(files, format=config.format, strict=config.strict)
    judged = [prompt for prompt in loaded if prompt.answer is not None]
    if loaded and not judged:
        raise nothing_to_check()
    return loaded if config.limit is None else spread(judged, config.limit, config.limit_seed)


def nothing_to_check() -> EvidenceError:
    return EvidenceError(
        "a quality contract needs prompts with checkable answers; these have none",
        hint="give prompts with an `answer`, such as the embedded ones or GSM8K",
    )


def _right(keys: Sequence[str], answers: Answers) -> Floats:
    """1 for each checkable prompt with a right answer, else 0."""
    found = [answers[key].is_right for key in keys if answers[key].is_right is not None]
    return np.array(found, float)


def _speed(keys: Sequence[str], answers: Answers) -> tuple[Floats, Floats]:
    """Tokens emitted by rounds (all but the first, which prefill emits), and calls."""
    emitted = np.array([len(answers[key].token_ids) - 1 for key in keys], float)
    return emitted, np.array([answers[key].calls for key in keys], float)
