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
- vLLM's log (the same module): a line `SpecDecoding metrics: ...` for each interval in which it
  served, with sums of tokens, and acceptance by position rounded to three digits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from specctl.errors import InputError
from specctl.logs import import_lines as lines
from specctl.logs.import_lines import (
    MAX_COUNTER,
    Category,
    Counts,
    Name,
    OnBytes,
    OtherRecord,
    Row,
    Spot,
    json_objects,
    text_lines,
)
from specctl.records import require

if TYPE_CHECKING:
    import polars as pl

NOT_REPLAYED = {
    "replayable": False,
    "why_not_replayed": "these are the rounds that one policy ran; positions where it started no "
    "round are not there, so no other policy can be replayed from them",
}

# ----------------------------------------------------------------- acceptance by position


def chain_figures(
    num_rounds: int,
    at_least: Sequence[int],
    num_drafted: int,
    num_accepted: int,
    *,
    is_ragged: bool,
) -> dict[str, Any]:
    """Figures of rounds whose draft was a chain, and of every chain that is no longer.

    For chains E[accepted | K] = Σ_{j <= K} P(at least j).

    Args:
        num_rounds: above 0. at_least: rounds with at least 1, 2, ... accepted draft tokens.
        is_ragged: not every round drafted all positions, so the later ones are underestimated.

    Returns:
        Besides sums and ratios: `marginal_prob`, P(at least j accepted), of all rounds.
        `conditional_prob`: of the rounds that accepted j - 1; None where no round came that far.
        `fixed_length_sweep`: `basis` and `chains`, one entry a length: τ with the bonus token,
        verified tokens a call (root counted) and accepted over drafted tokens.
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
        "num_rounds": num_rounds,
        "num_draft_tokens": num_drafted,
        "num_accepted_tokens": num_accepted,
        "mean_acceptance_length": 1 + num_accepted / num_rounds,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else None,
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


class _Choice(OtherRecord):
    """The turns of one choice."""

    new_tokens: Annotated[Counts, Field(min_length=1)]
    wall_time: list[Annotated[float, Field(gt=0, lt=MAX_COUNTER)]]
    decoding_steps: Counts
    # A 0 would mean a list that leaves the bonus token out, where every figure is another one.
    accept_lengths: list[Annotated[int, Field(ge=1, lt=2**31)]]

    @model_validator(mode="after")
    def _check(self) -> Self:
        sizes = {len(self.new_tokens), len(self.wall_time), len(self.decoding_steps)}
        names = "'new_tokens', 'wall_time' and 'decoding_steps'"
        require(len(sizes) == 1, f"one entry a turn in {names}")
        return self


class _Answer(OtherRecord):
    """One question, all choices and turns."""

    question_id: Name
    category: Category = ""
    choices: Annotated[list[_Choice], Field(min_length=1)]


class _Question(OtherRecord):
    """A line of `question.jsonl`."""

    question_id: Name
    category: Name


def summarise_answers(
    path: Path, *, questions: Path | None = None, on_bytes: OnBytes | None = None
) -> dict[str, Any]:
    """Figures of an answer file, pooled and by category.

    Args:
        questions: `question.jsonl`; its categories are used, and each answer must be in it.

    Raises:
        InputError: a malformed line, by its number; a question answered twice or unknown.
    """
    import polars as pl

    known: dict[str, str] = {}
    asked, answered = dict[str, Spot](), dict[str, Spot]()
    for spot, row in json_objects(questions) if questions else ():
        question = spot.record(_Question, row)
        spot.check_new(question.question_id, asked, "question")
        known[question.question_id] = question.category
    answers: list[dict[str, Any]] = []
    for spot, row in json_objects(path, on_bytes):
        answer = spot.record(_Answer, row)
        name, choices = answer.question_id, answer.choices
        if questions and name not in known:
            raise spot.refuse("a question of --questions", repr(name)[:80], "give its file")
        spot.check_new(name, answered, "question")
        answers.append(
            {
                "category": known.get(name, answer.category),
                "lengths": [n for choice in choices for n in choice.accept_lengths],
                "num_choices": len(choices),
                "num_decoding_steps": sum(sum(choice.decoding_steps) for choice in choices),
                "num_tokens": sum(sum(choice.new_tokens) for choice in choices),
                "wall_s": sum(sum(choice.wall_time) for choice in choices),
            }
        )
    rows = pl.DataFrame(answers, schema_overrides={"lengths": pl.List(pl.Int64)})
    groups = (
        rows.filter(pl.col("category") != "")
        .sort("category")
        .partition_by("category", as_dict=True)
    )
    by_category = {str(name): _answer_figures(group) for (name,), group in groups.items()}
    return {**NOT_REPLAYED, "all": _answer_figures(rows), "by_category": by_category}


def _answer_figures(answers: pl.DataFrame) -> dict[str, Any]:
    """Figures of answers, a row each, lists of tokens per round with the bonus token counted."""
    import polars as pl

    lengths = answers["lengths"].explode().drop_nulls()
    if not len(lengths):
        raise InputError(
            "'accept_lengths'",
            expected="at least one round",
            found=f"none in {len(answers)} answers",
            fix="name a file of a speculative run",
        )
    counted = np.unique(lengths.to_numpy() - 1, return_counts=True)
    sums = answers.select(pl.col("^num_.*$", "wall_s").sum()).row(0, named=True)
    return {
        "num_questions": len(answers),
        "num_rounds": len(lengths),
        **sums,
        "num_tokens_in_accept_lengths": lengths.sum(),
        "mean_acceptance_length": lengths.mean(),
        "mean_of_question_means": answers["lengths"].list.mean().mean(),
        "tokens_per_s": sums["num_tokens"] / sums["wall_s"],
        "acceptance_histogram": {str(n): int(count) for n, count in zip(*counted, strict=True)},
    }


# ----------------------------------------------------------------- vLLM, by request


class _Request(OtherRecord):
    """The metrics of one response; its counts must agree, or some are another request's."""

    fix: ClassVar[str] = "leave the response out"
    acceptance_histogram: Counts
    num_spec_steps: lines.Counter
    num_accepted_draft_tokens: lines.Counter
    num_draft_tokens: lines.Counter
    per_step_accepted: Counts | None = None
    per_step_drafted: Counts | None = None
    acceptance_histogram_by_draft_length: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        steps, drafted = self.num_spec_steps, self.num_draft_tokens
        accepted, histogram = self.num_accepted_draft_tokens, self.acceptance_histogram
        counted = sum(j * count for j, count in enumerate(histogram))
        require(sum(histogram) == steps, "'num_spec_steps' as the sum of the histogram")
        require(counted == accepted, "'num_accepted_draft_tokens' as the histogram's")
        require(accepted <= drafted, "no more accepted than drafted tokens")
        for key, total in (("per_step_accepted", accepted), ("per_step_drafted", drafted)):
            listed = getattr(self, key)
            fits = listed is None or (len(listed) == steps and sum(listed) == total)
            require(fits, f"{key!r} with one entry a step, adding up")
        return self

    @property
    def draft_lengths(self) -> set[int]:
        """Draft lengths that occurred. -1 stands for several that were not written down."""
        by_length = self.acceptance_histogram_by_draft_length
        if isinstance(by_length, dict) and all(key.isdecimal() for key in by_length):
            return {int(key[:9]) for key in by_length}
        if not self.num_spec_steps:
            return set()
        length, rest = divmod(self.num_draft_tokens, self.num_spec_steps)
        return {-1 if rest else length}


class _Response(OtherRecord):
    """A response; without speculation, or with n > 1, it has no such metrics."""

    class Metrics(OtherRecord):
        speculative_decoding: dict[str, Any] | None = None

    metrics: Metrics | None = None


def summarise_requests(path: Path, *, on_bytes: OnBytes | None = None) -> dict[str, Any]:
    """Figures over all responses of a file.

    Raises:
        InputError: a malformed response, by its line; one whose counts contradict each other;
            none that drafted.
    """
    found: list[_Request] = []
    num_requests = 0
    for spot, row in json_objects(path, on_bytes):
        num_requests += 1
        metrics: Row | None = row
        if "num_spec_steps" not in row:
            outer = spot.record(_Response, row).metrics
            metrics = outer.speculative_decoding if outer else None
        if metrics is not None:
            found.append(spot.record(_Request, metrics))
    lists = (one.acceptance_histogram for one in found)
    histogram = [sum(counts) for counts in zip_longest(*lists, fillvalue=0)]
    steps = sum(histogram)
    if not steps:
        raise InputError(
            str(path),
            expected="responses with speculative steps",
            found=f"{num_requests} without",
            fix="serve with --per-request-spec-decode-metrics summary",
        )
    means = [
        1 + one.num_accepted_draft_tokens / one.num_spec_steps
        for one in found
        if one.num_spec_steps
    ]
    lengths = set[int]().union(*(one.draft_lengths for one in found))
    return {
        **NOT_REPLAYED,
        "num_requests": num_requests,
        "num_requests_without_metrics": num_requests - len(found),
        "mean_of_request_means": float(np.mean(means)),
        "acceptance_histogram": histogram,
        **chain_figures(
            steps,
            list(accumulate(reversed(histogram[1:])))[::-1],
            sum(one.num_draft_tokens for one in found),
            sum(one.num_accepted_draft_tokens for one in found),
            is_ragged=lengths != {len(histogram) - 1},
        ),
    }


# ----------------------------------------------------------------- vLLM, Prometheus

STEM = "vllm:spec_decode_"
_TOTALS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
_BY_POSITION = "num_accepted_tokens_per_pos"
_LABEL = r'\s*\w+="(?:[^"\\]|\\.)*"\s*'
_PAIR = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SAMPLE = re.compile(
    rf"{STEM}(?P<name>{'|'.join(_TOTALS)}|{_BY_POSITION})(?:_total)?"
    rf"(?:\{{(?P<labels>(?:{_LABEL}(?:,{_LABEL})*,?)?)\}})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*"
)
_POSITION = re.compile(r"\d{1,4}")


def summarise_counters(path: Path, *, on_bytes: OnBytes | None = None) -> dict[str, Any]:
    """Figures of one scrape of `/metrics`, by model.

    Raises:
        InputError: a malformed counter, by its line; none, or ones that contradict each other.
    """
    models: dict[str, Counter[str | int]] = {}
    seen: dict[tuple[str, str], Spot] = {}
    for spot, line in text_lines(path, on_bytes):
        if line.startswith(STEM) and (sample := _SAMPLE.fullmatch(line)):
            earlier = seen.setdefault((sample["name"], sample["labels"] or ""), spot)
            if earlier is not spot:  # two scrapes in one file would be added up
                found = f"{sample['name']} of line {earlier.number} again"
                raise spot.refuse("one scrape, each counter once", found, "keep one scrape")
            model, key, value = _parse_sample(sample, spot)
            models.setdefault(model, Counter())[key] += value
        elif line.startswith(STEM) and "_created" not in line:
            raise spot.refuse("a counter of vLLM's speculative decoding", line.strip()[:60])
    if not any(counters["num_drafts"] for counters in models.values()):
        raise InputError(
            str(path),
            expected=f"a counter {STEM}num_drafts_total above 0",
            found="none" if not models else "no drafts yet",
            fix="scrape /metrics of a vLLM server that has speculated",
        )
    figures = {name: _counter_figures(path, name, models[name]) for name in sorted(models)}
    return {**NOT_REPLAYED, "models": figures}


def _parse_sample(sample: re.Match[str], spot: Spot) -> tuple[str, str | int, int]:
    """Model, counter or position, and value."""
    labels = dict(_PAIR.findall(sample["labels"] or ""))
    try:
        value = float(sample["value"])
    except ValueError:
        value = -1.0
    if not (0 <= value <= MAX_COUNTER and value.is_integer()):
        raise spot.refuse("a count", sample["value"][:40])
    model, position = labels.get("model_name", ""), labels.get("position", "")
    if sample["name"] != _BY_POSITION:
        return model, sample["name"], int(value)
    if not _POSITION.fullmatch(position):
        raise spot.refuse('a label position="0", "1", ...', repr(position)[:40])
    return model, int(position), int(value)


def _counter_figures(path: Path, model: str, counters: Counter[str | int]) -> dict[str, Any]:
    """A scrape is one moment; counters that contradict each other are refused."""
    drafts, drafted, accepted = totals = [counters[name] for name in _TOTALS]
    positions = sorted(key for key in counters if isinstance(key, int))
    at_least = [counters[position] for position in positions]
    chained = [drafts, *at_least]
    rules = {
        "positions 0, 1, ... without a gap": positions == [*range(len(positions))],
        "no position accepted more often than the one before": chained
        == sorted(chained, reverse=True),
        "the positions to add up to the accepted tokens": not at_least or sum(at_least) == accepted,
        "no more accepted than drafted tokens": accepted <= drafted,
    }
    for rule, holds in rules.items():
        if not holds:
            named = dict(zip(_TOTALS, totals, strict=True))
            raise InputError(
                f"{path}, model {model!r}",
                expected=rule,
                found=f"{named}, by position {at_least[:8]}",
                fix="scrape again",
            )
    if not drafts:
        return {"num_rounds": 0}
    is_ragged = drafted != drafts * len(at_least)
    figures = chain_figures(drafts, at_least, drafted, accepted, is_ragged=is_ragged)
    return figures if at_least else {**figures, "fixed_length_sweep": None}


# ----------------------------------------------------------------- vLLM, log

LOG_MARK = "SpecDecoding metrics: "
_NUMBER = r"(\d{1,9}(?:\.\d{1,6})?)"
_MEAN = re.compile(rf"Mean acceptance length: {_NUMBER}")
_TOKENS = re.compile(r"Accepted: (\d{1,12}) tokens, Drafted: (\d{1,12}) tokens")
_RATES = re.compile(rf"Per-position acceptance rate: ({_NUMBER}(?:, {_NUMBER})*)")
_MEAN_ERROR, _RATE_ERROR = 0.005 + 1e-9, 0.0005 + 1e-9
"""Of figures with two and with three digits behind the point."""
_MAX_OFF = 20_000
"""Rounds from the likeliest number that are tried: a mean of 1.1 of a million tokens."""


def summarise_engine_log(path: Path, *, on_bytes: OnBytes | None = None) -> dict[str, Any]:
    """Figures over all intervals of a log.

    The log does not print how many rounds there were. Where every round drafts all positions they
    follow from the drafted tokens; elsewhere from the mean length, as far as its digits tell.

    Raises:
        InputError: a malformed interval, by its line; none in which anything was drafted.
    """
    num_intervals = rounds = drafted = accepted = 0
    at_least: list[int] = []
    is_ragged = False
    for spot, line in text_lines(path, on_bytes):
        if LOG_MARK not in line:
            continue
        interval = _Interval.parse(line.partition(LOG_MARK)[2], spot)
        num_intervals += 1
        if not interval.drafted:
            continue
        if at_least and len(at_least) != len(interval.rates):
            found = f"{len(interval.rates)}, before {len(at_least)}"
            raise spot.refuse("one number of positions", found, "give each server's log alone")
        num_rounds, even = interval.rounds(spot)
        counts = [round(rate * num_rounds) for rate in interval.rates]
        at_least = [a + b for a, b in zip(at_least or [0] * len(counts), counts, strict=True)]
        rounds, is_ragged = rounds + num_rounds, is_ragged or not even
        drafted, accepted = drafted + interval.drafted, accepted + interval.accepted
    if not rounds:
        raise InputError(
            str(path),
            expected=f"lines {LOG_MARK!r} with drafted tokens",
            found=f"{num_intervals} such lines, without drafts" if num_intervals else "none",
            fix="log a server that speculates, without --disable-log-stats, for some minutes",
        )
    figures = chain_figures(rounds, at_least, drafted, accepted, is_ragged=is_ragged)
    return {**NOT_REPLAYED, "num_intervals": num_intervals, **figures}


@dataclass(frozen=True)
class _Interval:
    """One line: mean tokens a round, sums of draft tokens, and rates by position."""

    mean: float
    accepted: int
    drafted: int
    rates: list[float]

    @classmethod
    def parse(cls, text: str, spot: Spot) -> Self:
        tokens = _TOKENS.search(text)
        if tokens is not None and int(tokens[2]) == 0:  # its rates are then nan
            return cls(1.0, 0, 0, [])
        mean, rates = _MEAN.search(text), _RATES.search(text)
        if mean is None or tokens is None or rates is None:
            expected = "mean acceptance length, accepted and drafted tokens and rates by position"
            raise spot.refuse(expected, text.strip()[:80], "use the log of vLLM 0.9 or newer")
        found = [float(rate) for rate in rates[1].split(", ")]
        return cls(float(mean[1]), int(tokens[1]), int(tokens[2]), found)

    def rounds(self, spot: Spot) -> tuple[int, bool]:
        """Rounds of the interval, and whether each of them drafted all positions."""
        even, rest = divmod(self.drafted, len(self.rates))
        if rest == 0 and self._fits(even):
            return even, True
        if not self.accepted:  # nothing tells; at least so many
            return even + bool(rest), False
        likeliest = round(self.accepted / max(self.mean - 1, _MEAN_ERROR))
        for off in range(_MAX_OFF):
            for num_rounds in {likeliest - off, likeliest + off}:
                if even < num_rounds <= self.drafted and self._fits(num_rounds):
                    return num_rounds, False
        found = f"{self.accepted} of {self.drafted} tokens, mean {self.mean}, {self.rates[:8]}"
        raise spot.refuse("figures that fit together", found, "remove the line")

    def _fits(self, num_rounds: int) -> bool:
        """Whether all that is printed can be of so many rounds."""
        counts = [round(rate * num_rounds) for rate in self.rates]
        off = abs(sum(counts) - self.accepted)
        return (
            abs(1 + self.accepted / num_rounds - self.mean) <= _MEAN_ERROR
            and off <= _RATE_ERROR * num_rounds * len(counts)
            and counts == sorted(counts, reverse=True)
            and all(
                abs(count / num_rounds - rate) <= _RATE_ERROR
                for count, rate in zip(counts, self.rates, strict=True)
            )
        )
