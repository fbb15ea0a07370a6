"""Figures of requests that other tools served, one JSON record each: summarised, never replayed.

- Spec-Bench's answer files: `evaluation/eval.py` of github.com/hemingkx/Spec-Bench writes
  `choices[]` with a list per turn of `decoding_steps`, `new_tokens`, `wall_time` (seconds) and
  one flat list `accept_lengths` over all turns, the target's own token counted (plain decoding
  has 1.0). Its `speed.py` reports means of the questions' rates, of first choices, which have a
  key of their own; other rates are Σ tokens / Σ time over all choices.
- vLLM's per-request acceptance, `metrics.speculative_decoding` of its responses, written with
  `--per-request-spec-decode-metrics summary|detailed`
  (docs/features/speculative_decoding/acceptance_metrics.md of vLLM; experimental there). Whole
  responses are read, or the bare objects; responses without it (n > 1, no speculation) are counted.
- SGLang's `meta_info` of `/generate`, and `sglext.spec_tokens_details` of its OpenAI-compatible
  responses, asked for with `return_spec_tokens_details` (`managers/tokenizer_manager.py` and
  `entrypoints/openai/protocol.py` of 0.5.23): `spec_verify_ct` rounds, of which
  `spec_correct_drafts_histogram[j]` accepted j draft tokens. Each round counts as one of
  `speculative_num_draft_tokens` - 1 proposed tokens, of a chain or of a tree alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from specctl.errors import InputError
from specctl.logs import import_lines as lines
from specctl.logs.acceptance_figures import NOT_REPLAYED, UNKNOWN_BATCHES, chain_figures
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
)
from specctl.logs.sources import Source
from specctl.records import require

if TYPE_CHECKING:
    import polars as pl

IF_CHAINS = "if the drafts were chains (--speculative-eagle-topk 1)"
"""SGLang counts the same of trees, by depth; its figures do not say which they were."""

# ----------------------------------------------------------------- Spec-Bench


MT_BENCH = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
"""Categories that `speed.py` reports as one task, `mt_bench`."""


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
    source: Source,
    *,
    questions: Path | None = None,
    plain: Path | None = None,
    on_bytes: OnBytes | None = None,
) -> dict[str, Any]:
    """Figures of an answer file, pooled and by category.

    Args:
        questions: `question.jsonl`; its categories are used, and each answer must be in it.
        plain: answers of plain decoding to the same questions, which give the `speed_up`s.

    Raises:
        InputError: a malformed line, by its number; a question answered twice or unknown, or by one
            of the two files alone.
    """
    rows = _answers(source, questions, on_bytes)
    groups = _by_category(rows)
    if plain is not None:
        others = _answers(Source(str(plain)), questions, None)
        alone = {*rows["question"]} ^ {*others["question"]}
        if alone:
            raise InputError(
                str(plain),
                expected=f"the questions of {source.name}",
                found=f"{len(alone)} that one of the files lacks, such as {min(alone)!r}",
                fix="give answers to the same questions",
            )
        theirs = _by_category(others)
        for name, figures in groups.items():
            if base := theirs.get(name):
                figures["speed_up"] = figures["tokens_per_s"] / base["tokens_per_s"]
                means = (one["mean_of_question_rates"] for one in (figures, base))
                figures["speed_up_of_mean_rates"] = next(means) / next(means)
    pooled = groups.pop("all") | {
        "fixed_length_sweep": None,
        "why_no_sweep": "answer files do not say whether drafts were chains or trees, nor how long",
        "not_known": ["how many tokens were drafted"],
    }
    return {**NOT_REPLAYED, "all": pooled, "by_category": groups}


def _by_category(rows: pl.DataFrame) -> dict[str, dict[str, Any]]:
    """Figures of all answers, of each category that has a name, and of MT-Bench's together."""
    import polars as pl

    named = rows.filter(pl.col("category") != "").sort("category")
    parts = named.partition_by("category", as_dict=True)
    groups = {"all": rows} | {str(name): part for (name,), part in parts.items()}
    turns = rows.filter(pl.col("category").is_in(MT_BENCH))
    if len(turns):
        groups.setdefault("mt_bench", turns)
    return {name: _answer_figures(part) for name, part in groups.items()}


def _answers(source: Source, questions: Path | None, on_bytes: OnBytes | None) -> pl.DataFrame:
    """A row an answer."""
    import polars as pl

    known: dict[str, str] = {}
    asked, answered = dict[str, Spot](), dict[str, Spot]()
    for spot, row in json_objects(Source(str(questions))) if questions else ():
        question = spot.record(_Question, row)
        spot.check_new(question.question_id, asked, "question")
        known[question.question_id] = question.category
    answers: list[dict[str, Any]] = []
    for spot, row in json_objects(source, on_bytes):
        answer = spot.record(_Answer, row)
        name, choices = answer.question_id, answer.choices
        if questions and name not in known:
            raise spot.refuse("a question of --questions", repr(name)[:80], "give its file")
        spot.check_new(name, answered, "question")
        answers.append(
            {
                "question": name,
                "category": known.get(name, answer.category),
                "lengths": [n for choice in choices for n in choice.accept_lengths],
                "num_choices": len(choices),
                "num_decoding_steps": sum(sum(choice.decoding_steps) for choice in choices),
                "num_tokens": sum(sum(choice.new_tokens) for choice in choices),
                "wall_s": sum(sum(choice.wall_time) for choice in choices),
                "first_rate": sum(choices[0].new_tokens) / sum(choices[0].wall_time),
            }
        )
    return pl.DataFrame(answers, schema_overrides={"lengths": pl.List(pl.Int64)})


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
    histogram = np.bincount(lengths.to_numpy() - 1)
    at_least = len(lengths) - np.cumsum(histogram)[:-1]
    sums = answers.select(pl.col("^num_.*$", "wall_s").sum()).row(0, named=True)
    return {
        "num_questions": len(answers),
        "num_rounds": len(lengths),
        **sums,
        "num_tokens_in_accept_lengths": lengths.sum(),
        "mean_acceptance_length": lengths.mean(),
        "mean_of_question_means": answers["lengths"].list.mean().mean(),
        "tokens_per_s": sums["num_tokens"] / sums["wall_s"],
        "mean_of_question_rates": answers["first_rate"].mean(),
        "acceptance_histogram": histogram.tolist(),
        "marginal_prob": (at_least / len(lengths)).tolist(),
    }


# ----------------------------------------------------------------- responses of engines


class _Request(OtherRecord):
    """The metrics of one of vLLM's responses; its counts agree, or some are another request's."""

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


class _SGLangRequest(OtherRecord):
    """The counts of one of SGLang's responses."""

    fix: ClassVar[str] = "leave the response out; specctl reads SGLang 0.5.23's names"
    spec_verify_ct: lines.Counter
    spec_num_correct_drafts: lines.Counter
    spec_num_proposed_drafts: lines.Counter
    spec_correct_drafts_histogram: Counts
    spec_cap_length: float = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        rounds, histogram = self.spec_verify_ct, self.spec_correct_drafts_histogram
        accepted = sum(j * count for j, count in enumerate(histogram))
        require(sum(histogram) == rounds, "'spec_verify_ct' as the sum of the histogram")
        require(accepted == self.spec_num_correct_drafts, "'spec_num_correct_drafts' as counted")
        whole = bool(rounds) and self.spec_num_proposed_drafts % rounds == 0
        require(whole, "'spec_num_proposed_drafts' as a multiple of 'spec_verify_ct'")
        fits = len(histogram) - 1 <= self.spec_num_proposed_drafts // rounds
        require(fits, "no round that accepted more than it drafted")
        return self


@dataclass(frozen=True)
class _Counted:
    """One request's rounds: how many accepted 0, 1, ... tokens, and draft lengths that occurred."""

    histogram: list[int]
    num_drafted: int
    draft_lengths: set[int]


class _Response(OtherRecord):
    """A response of vLLM; without speculation, or with n > 1, it has no such metrics."""

    class Metrics(OtherRecord):
        speculative_decoding: dict[str, Any] | None = None

    metrics: Metrics | None = None


def summarise_requests(source: Source, *, on_bytes: OnBytes | None = None) -> dict[str, Any]:
    """Figures over all of vLLM's responses in a file.

    Raises:
        InputError: a malformed response, by its line; one whose counts contradict each other;
            none that drafted.
    """

    def counted(spot: Spot, row: Row) -> Iterator[_Counted]:
        metrics: Row | None = row
        if "num_spec_steps" not in row:
            outer = spot.record(_Response, row).metrics
            metrics = outer.speculative_decoding if outer else None
        if metrics is not None:
            one = spot.record(_Request, metrics)
            yield _Counted(one.acceptance_histogram, one.num_draft_tokens, one.draft_lengths)

    fix = "serve with --per-request-spec-decode-metrics summary"
    return _pool(source, counted, on_bytes, fix=fix, not_known=[UNKNOWN_BATCHES])


def summarise_sglang_requests(source: Source, *, on_bytes: OnBytes | None = None) -> dict[str, Any]:
    """The same of SGLang's responses."""

    has_windows = False

    def counted(spot: Spot, row: Row) -> Iterator[_Counted]:
        nonlocal has_windows
        for details in sglang_details(row):
            if details.get("spec_verify_ct"):
                one = spot.record(_SGLangRequest, details)
                has_windows = has_windows or one.spec_cap_length > 0
                num_drafted = one.spec_num_proposed_drafts
                lengths = {num_drafted // one.spec_verify_ct}
                yield _Counted(one.spec_correct_drafts_histogram, num_drafted, lengths)

    fix = "serve with --speculative-algorithm; OpenAI requests ask for return_spec_tokens_details"
    unknown = ["whether drafts were chains or trees", UNKNOWN_BATCHES]
    figures = _pool(source, counted, on_bytes, fix=fix, if_chains=IF_CHAINS, not_known=unknown)
    if has_windows:
        why = "each round verified a window of its own draft (spec_cap_length)"
        figures |= {"fixed_length_sweep": None, "why_no_sweep": why}
    return figures


def sglang_details(row: Row) -> list[Row]:
    """The objects of a response that hold SGLang's `spec_...` figures; empty for other tools'."""
    found = row.get("meta_info")
    if found is None and isinstance(row.get("sglext"), dict):
        found = row["sglext"].get("spec_tokens_details")
    if found is None and "spec_verify_ct" in row:
        found = row
    return [one for one in (found if isinstance(found, list) else [found]) if isinstance(one, dict)]


def _pool(
    source: Source,
    counted: Callable[[Spot, Row], Iterator[_Counted]],
    on_bytes: OnBytes | None,
    *,
    fix: str,
    if_chains: str = "",
    not_known: Sequence[str],
) -> dict[str, Any]:
    found: list[_Counted] = []
    num_requests = num_with = 0
    for spot, row in json_objects(source, on_bytes):
        num_requests += 1
        before = len(found)
        found += counted(spot, row)
        num_with += len(found) > before
    lengths = set[int]().union(*(one.draft_lengths for one in found))
    histogram = [
        sum(counts) for counts in zip_longest(*(one.histogram for one in found), fillvalue=0)
    ]
    steps, depth = sum(histogram), max([len(histogram) - 1, *lengths])
    if not steps:
        raise InputError(
            source.name,
            expected="responses with speculative steps",
            found=f"{num_requests} without",
            fix=fix,
        )
    histogram += [0] * (depth + 1 - len(histogram))
    weights = np.arange(depth + 1)
    means = [
        1 + float(np.dot(one.histogram, weights[: len(one.histogram)])) / sum(one.histogram)
        for one in found
        if sum(one.histogram)
    ]
    return {
        **NOT_REPLAYED,
        "num_requests": num_requests,
        "num_requests_without_metrics": num_requests - num_with,
        "mean_of_request_means": float(np.mean(means)),
        "acceptance_histogram": histogram,
        **chain_figures(
            steps,
            list(accumulate(reversed(histogram[1:])))[::-1],
            sum(one.num_drafted for one in found),
            int(np.dot(histogram, weights)),
            is_ragged=lengths != {depth},
            if_chains=if_chains,
            not_known=not_known,
        ),
    }
