"""Figures of other tools' files that hold the rounds of one policy: summarised, never replayed.

- Spec-Bench's answer files: `evaluation/eval.py` of github.com/hemingkx/Spec-Bench writes
  `choices[]` with a list per turn of `decoding_steps`, `new_tokens`, `wall_time` (seconds) and
  one flat list `accept_lengths` over all turns, the target's own token counted (plain decoding
  has 1.0). Its `speed.py` reports a mean of rates; here rates are Σ tokens / Σ time.
- vLLM's per-request acceptance, `metrics.speculative_decoding` of its responses, written with
  `--per-request-spec-decode-metrics summary|detailed`
  (docs/features/speculative_decoding/acceptance_metrics.md of vLLM; experimental there). Whole
  responses are read, or the bare objects; responses without it (n > 1, no speculation) are counted.
- vLLM's Prometheus counters (`vllm/v1/spec_decode/metrics.py`): `vllm:spec_decode_num_drafts`,
  `_num_draft_tokens`, `_num_accepted_tokens` and, with a label `position` counted from 0,
  `_num_accepted_tokens_per_pos`; the text of `/metrics` appends `_total` (and `_created` gauges,
  which are times and not read). A position's counter rises where at least that many tokens were
  accepted: over drafts it is the *marginal* rate. Counters run since the server's start, over all
  requests; rounds without a draft are not among them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from specctl.errors import InputError
from specctl.logs.import_lines import (
    MAX_COUNTER,
    OnBytes,
    Row,
    Spot,
    json_objects,
    kind_of,
    text_lines,
)
from specctl.logs.positions import Longs

NOT_REPLAYED = {
    "replayable": False,
    "why_not_replayed": "these are the rounds that one policy ran; positions where it started no "
    "round are not there, so no other policy can be replayed from them",
}

# ----------------------------------------------------------------- acceptance by position


def position_rates(num_rounds: int, at_least: Sequence[int], *, is_ragged: bool) -> dict[str, Any]:
    """Acceptance of the j-th draft token, j = 1..K, and of every chain that is no longer.

    For chains E[accepted | K] = Σ_{j <= K} P(at least j).

    Args:
        num_rounds: above 0. at_least: rounds with at least 1, 2, ... accepted draft tokens.
        is_ragged: not every round drafted all positions, so the later ones are underestimated.

    Returns:
        `marginal_prob`: P(at least j accepted), of all rounds. `conditional_prob`: of the rounds
        that accepted j - 1; None where no round came that far. `fixed_length_sweep`: `basis` and
        `chains`, one entry a length: τ with the bonus token, verified tokens a call (root
        counted) and accepted over drafted tokens.
    """
    marginal = [count / num_rounds for count in at_least]
    reached = [num_rounds, *at_least[:-1]]
    conditional = [
        n / before if before else None for n, before in zip(at_least, reached, strict=True)
    ]
    unchanged = (
        "exact in expectation over the rounds that were measured; another length starts its rounds "
        "elsewhere, which counters cannot show"
    )
    ragged = "a lower bound: some rounds drafted fewer tokens than the positions that are counted"
    return {
        "marginal_prob": marginal,
        "conditional_prob": conditional,
        "fixed_length_sweep": {
            "basis": ragged if is_ragged else unchanged,
            "is_ragged": is_ragged,
            "chains": [
                {
                    "num_draft_tokens": length,
                    "mean_acceptance_length": 1 + accepted,
                    "verified_tokens_per_call": length + 1,
                    "draft_acceptance_rate": accepted / length,
                }
                for length, accepted in enumerate(accumulate(marginal), start=1)
            ],
        },
    }


# ----------------------------------------------------------------- Spec-Bench


@dataclass(frozen=True)
class _Answer:
    """One question, all choices and turns.

    Attributes:
        accept_lengths: `[rounds]` tokens per round, the bonus token counted.
        num_steps: the file's own count of decoding steps.
    """

    category: str
    accept_lengths: Longs
    num_tokens: int
    wall_s: float
    num_steps: int
    num_choices: int


def is_answer(row: Row) -> bool:
    """Whether a record has the keys of Spec-Bench."""
    return "question_id" in row and isinstance(row.get("choices"), list)


def summarise_answers(
    path: Path, *, questions: Path | None = None, on_bytes: OnBytes | None = None
) -> dict[str, Any]:
    """Figures of an answer file, pooled and by category.

    Args:
        questions: `question.jsonl`; its categories are used, and each answer must be in it.

    Raises:
        InputError: a malformed line, by its number; a question answered twice or unknown.
    """
    known = None if questions is None else _categories(questions)
    answers: list[_Answer] = []
    first: dict[str, Spot] = {}
    for spot, row in json_objects(path, on_bytes):
        question = spot.text(row, "question_id")
        answers.append(_answer(row, question, spot, known))
        earlier = first.setdefault(question, spot)
        if earlier is not spot:
            found = f"{question[:80]!r}, which {earlier.unit} {earlier.number} answers"
            raise spot.refuse("a question that is not answered yet", found, "keep one of them")
    names = sorted({answer.category for answer in answers if answer.category})
    by_category = {name: [a for a in answers if a.category == name] for name in names}
    return {
        **NOT_REPLAYED,
        "all": _answer_figures(answers),
        "by_category": {name: _answer_figures(group) for name, group in by_category.items()},
    }


def _categories(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for spot, row in json_objects(path):
        question = spot.text(row, "question_id")
        if question in found:
            raise spot.refuse("each question once", f"{question[:80]!r} twice")
        found[question] = spot.text(row, "category")
    return found


def _answer(row: Row, question: str, spot: Spot, known: dict[str, str] | None) -> _Answer:
    if known is not None and question not in known:
        raise spot.refuse("a question of --questions", repr(question)[:80], "give its file")
    category = spot.text(row, "category") if row.get("category") else ""
    choices = spot.items(row.get("choices"), "'choices'")
    if not choices or not all(isinstance(choice, dict) for choice in choices):
        raise spot.refuse("'choices' as a list of objects", f"{len(choices)} others")
    parts = [_choice(choice, spot) for choice in choices]
    return _Answer(
        category if known is None else known[question],
        np.concatenate([lengths for lengths, _, _, _ in parts]),
        sum(tokens for _, tokens, _, _ in parts),
        sum(wall for _, _, wall, _ in parts),
        sum(steps for _, _, _, steps in parts),
        len(parts),
    )


def _choice(choice: Row, spot: Spot) -> tuple[Longs, int, float, int]:
    """Accepted lengths, tokens, seconds and decoding steps of one choice."""
    new_tokens = spot.counts(choice.get("new_tokens"), "'new_tokens'")
    wall_s = spot.seconds(choice.get("wall_time"), "'wall_time'")
    steps = spot.counts(choice.get("decoding_steps"), "'decoding_steps'")
    if not len(new_tokens) == len(wall_s) == len(steps) > 0:
        sizes = f"{len(new_tokens)}, {len(wall_s)} and {len(steps)}"
        names = "'new_tokens', 'wall_time' and 'decoding_steps'"
        raise spot.refuse(f"one entry a turn in {names}", f"{sizes} entries")
    # A 0 would mean a list that leaves the bonus token out, where every figure is another one.
    lengths = spot.counts(choice.get("accept_lengths"), "'accept_lengths'", low=1)
    return lengths, int(new_tokens.sum()), sum(wall_s), int(steps.sum())


def _answer_figures(answers: list[_Answer]) -> dict[str, Any]:
    lengths = np.concatenate([answer.accept_lengths for answer in answers])
    if not len(lengths):
        raise InputError(
            "'accept_lengths'",
            expected="at least one round",
            found=f"none in {len(answers)} answers",
            fix="name a file of a speculative run",
        )
    per_question = [a.accept_lengths.mean() for a in answers if len(a.accept_lengths)]
    num_tokens, wall_s = sum(a.num_tokens for a in answers), sum(a.wall_s for a in answers)
    accepted, counts = np.unique(lengths - 1, return_counts=True)
    return {
        "num_questions": len(answers),
        "num_choices": sum(a.num_choices for a in answers),
        "num_rounds": len(lengths),
        "num_decoding_steps": sum(a.num_steps for a in answers),
        "num_tokens": num_tokens,
        "num_tokens_in_accept_lengths": int(lengths.sum()),
        "mean_acceptance_length": float(lengths.mean()),
        "mean_of_question_means": float(np.mean(per_question)),
        "wall_s": wall_s,
        "tokens_per_s": num_tokens / wall_s,
        "acceptance_histogram": {
            str(v): n for v, n in zip(accepted.tolist(), counts.tolist(), strict=True)
        },
    }


# ----------------------------------------------------------------- vLLM, by request


@dataclass
class _RequestTotals:
    num_requests: int = 0
    num_without: int = 0
    num_drafted: int = 0
    means: list[float] = field(default_factory=list)
    histogram: Longs = field(default_factory=lambda: np.zeros(1, np.int64))
    lengths: set[int] = field(default_factory=set)

    def add(self, metrics: Row, spot: Spot) -> None:
        """Adds a response; its counts must tell one story, or some are another request's."""
        histogram = spot.counts(metrics.get("acceptance_histogram"), "'acceptance_histogram'")
        steps = spot.count(metrics, "num_spec_steps")
        accepted = spot.count(metrics, "num_accepted_draft_tokens")
        drafted = spot.count(metrics, "num_draft_tokens")
        rules = {
            "'num_spec_steps' as the sum of the histogram": int(histogram.sum()) == steps,
            "'num_accepted_draft_tokens' as the histogram's": accepted
            == int(histogram @ np.arange(len(histogram))),
            "no more accepted than drafted tokens": accepted <= drafted,
        }
        for key, total in (("per_step_accepted", accepted), ("per_step_drafted", drafted)):
            if metrics.get(key) is not None:
                listed = spot.counts(metrics[key], repr(key))
                rules[f"{key!r} with one entry a step, adding up"] = (
                    len(listed) == steps and int(listed.sum()) == total
                )
        spot.check(rules, "leave the response out")
        size = max(len(self.histogram), len(histogram))
        before, here = (np.pad(h, (0, size - len(h))) for h in (self.histogram, histogram))
        self.histogram = before + here
        self.num_drafted += drafted
        self.lengths |= _draft_lengths(metrics, steps, drafted)
        if steps:
            self.means.append(1 + accepted / steps)


def is_response(row: Row) -> bool:
    """Whether a record is a vLLM response with these metrics, or the bare object."""
    metrics = row.get("metrics")
    return "num_spec_steps" in row or (
        isinstance(metrics, dict) and "speculative_decoding" in metrics
    )


def summarise_requests(path: Path, *, on_bytes: OnBytes | None = None) -> dict[str, Any]:
    """Figures over all responses of a file.

    Raises:
        InputError: a malformed response, by its line; one whose counts contradict each other;
            none that drafted.
    """
    totals = _RequestTotals()
    for spot, row in json_objects(path, on_bytes):
        totals.num_requests += 1
        metrics: Any = row
        if "num_spec_steps" not in row:
            metrics = row.get("metrics") or {}
            if isinstance(metrics, dict):
                metrics = metrics.get("speculative_decoding")
            if metrics is not None and not isinstance(metrics, dict):
                expected = "'metrics.speculative_decoding' as an object"
                raise spot.refuse(expected, kind_of(metrics))
        if metrics is None:
            totals.num_without += 1
        else:
            totals.add(metrics, spot)
    histogram = totals.histogram.tolist()
    steps, accepted = sum(histogram), sum(j * count for j, count in enumerate(histogram))
    if not steps:
        raise InputError(
            str(path),
            expected="responses with speculative steps",
            found=f"{totals.num_requests} without",
            fix="serve with --per-request-spec-decode-metrics summary",
        )
    at_least = list(accumulate(reversed(histogram[1:])))[::-1]
    return {
        **NOT_REPLAYED,
        "num_requests": totals.num_requests,
        "num_requests_without_metrics": totals.num_without,
        "num_rounds": steps,
        "num_draft_tokens": totals.num_drafted,
        "num_accepted_tokens": accepted,
        "mean_acceptance_length": 1 + accepted / steps,
        "mean_of_request_means": float(np.mean(totals.means)),
        "draft_acceptance_rate": accepted / totals.num_drafted if totals.num_drafted else None,
        "acceptance_histogram": histogram,
        **position_rates(steps, at_least, is_ragged=totals.lengths != {len(histogram) - 1}),
    }


def _draft_lengths(metrics: Row, steps: int, drafted: int) -> set[int]:
    """Draft lengths that occurred. -1 stands for several that were not written down."""
    by_length = metrics.get("acceptance_histogram_by_draft_length")
    if isinstance(by_length, dict) and all(key.isdecimal() for key in by_length):
        return {int(key[:9]) for key in by_length}
    if not steps:
        return set()
    return {drafted // steps} if drafted % steps == 0 else {-1}


# ----------------------------------------------------------------- vLLM, Prometheus

STEM = "vllm:spec_decode_"
_SAMPLE = re.compile(
    r"vllm:spec_decode_(?P<name>num_drafts|num_draft_tokens|num_accepted_tokens"
    r"|num_accepted_tokens_per_pos)(?:_total)?"
    r"(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*"
)
_LABEL = re.compile(r'\s*(?P<key>[A-Za-z_]\w*)="(?P<value>(?:[^"\\]|\\.)*)"\s*(?:,|$)')
_POSITION = re.compile(r"\d{1,4}")


@dataclass
class _Counters:
    """Of one model, engines added."""

    totals: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    per_position: dict[int, int] = field(default_factory=lambda: defaultdict(int))


def is_metrics(line: str) -> bool:
    """Whether a line is of the exposition format of Prometheus."""
    return line.startswith(("# HELP ", "# TYPE ", "vllm:"))


def summarise_counters(path: Path, *, on_bytes: OnBytes | None = None) -> dict[str, Any]:
    """Figures of one scrape of `/metrics`, by model.

    Raises:
        InputError: a malformed counter, by its line; none, or ones that contradict each other.
    """
    models: dict[str, _Counters] = {}
    seen: dict[tuple[str, str], Spot] = {}
    for spot, line in text_lines(path, on_bytes):
        if line.startswith(STEM) and (sample := _SAMPLE.fullmatch(line)):
            earlier = seen.setdefault((sample["name"], sample["labels"] or ""), spot)
            if earlier is not spot:  # two scrapes in one file would be added up
                found = f"{sample['name']} of line {earlier.number} again"
                raise spot.refuse("one scrape, each counter once", found, "keep one scrape")
            _add_sample(models, sample, spot)
        elif line.startswith(STEM) and "_created" not in line:
            raise spot.refuse("a counter of vLLM's speculative decoding", line.strip()[:60])
    if not any(counters.totals["num_drafts"] for counters in models.values()):
        raise InputError(
            str(path),
            expected=f"a counter {STEM}num_drafts_total above 0",
            found="none" if not models else "no drafts yet",
            fix="scrape /metrics of a vLLM server that has speculated",
        )
    figures = {name: _counter_figures(path, name, models[name]) for name in sorted(models)}
    return {**NOT_REPLAYED, "models": figures}


def _add_sample(models: dict[str, _Counters], sample: re.Match[str], spot: Spot) -> None:
    labels, text, end = dict[str, str](), sample["labels"] or "", 0
    while end < len(text):
        label = _LABEL.match(text, end)
        if label is None:
            raise spot.refuse('labels as key="value"', text[end : end + 40])
        labels[label["key"]] = label["value"]
        end = label.end()
    try:
        value = float(sample["value"])
    except ValueError:
        value = -1.0
    if not (0 <= value <= MAX_COUNTER and value.is_integer()):
        raise spot.refuse("a count", sample["value"][:40])
    counters = models.setdefault(labels.get("model_name", ""), _Counters())
    if sample["name"] != "num_accepted_tokens_per_pos":
        counters.totals[sample["name"]] += int(value)
        return
    position = labels.get("position", "")
    if not _POSITION.fullmatch(position):
        raise spot.refuse('a label position="0", "1", ...', repr(position)[:40])
    counters.per_position[int(position)] += int(value)


def _counter_figures(path: Path, model: str, counters: _Counters) -> dict[str, Any]:
    """A scrape is one moment; counters that contradict each other are refused."""
    totals = counters.totals
    drafts, drafted, accepted = (
        totals[name] for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    at_least = [count for _, count in sorted(counters.per_position.items())]
    chained = [drafts, *at_least]
    rules = {
        "positions 0, 1, ... without a gap": sorted(counters.per_position)
        == [*range(len(at_least))],
        "no position accepted more often than the one before": chained
        == sorted(chained, reverse=True),
        "the positions to add up to the accepted tokens": not at_least or sum(at_least) == accepted,
        "no more accepted than drafted tokens": accepted <= drafted,
    }
    for rule, holds in rules.items():
        if not holds:
            raise InputError(
                f"{path}, model {model!r}",
                expected=rule,
                found=f"{dict(totals)}, by position {at_least[:8]}",
                fix="scrape again",
            )
    if not drafts:
        return {"num_rounds": 0}
    rates = position_rates(drafts, at_least, is_ragged=drafted != drafts * len(at_least))
    return {
        "num_rounds": drafts,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "mean_acceptance_length": 1 + accepted / drafts,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        **rates,
        "fixed_length_sweep": rates["fixed_length_sweep"] if at_least else None,
    }
