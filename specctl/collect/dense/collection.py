"""Dense collection: from prompts and responses to a trace set."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from specctl.collect.dense.trees import DenseDrafting
from specctl.collect.live import FRESH, SetOptions, Summary
from specctl.collect.prompt_files import usable
from specctl.collect.prompts import Prompt
from specctl.collect.recorder import Publication, Recorder, RecorderConfig
from specctl.collect.responses import Response, Responses, TurnText
from specctl.collect.trace_writer import FLUSH_BYTES, TraceWriter, finishing
from specctl.errors import PromptLineError, PromptTooLongError
from specctl.formatting import count
from specctl.logs.parquet import Tables, join_tables
from specctl.policy import FullTree, Policy, RootOnly
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import (
    Conversation,
    DecodeSettings,
    decode_text,
    next_request,
)
from specctl.runtime.load import Pair, Target
from specctl.runtime.requests import Request

GROUP_PROMPTS = 16
"""Prompts whose texts are generated before trees are drafted; at least twice the batch."""


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt with the answers of its turns, in order."""

    prompt_id: str
    answers: tuple[tuple[Request, tuple[int, ...]], ...]  # with the token ids of the answer
    is_cut: bool = False  # a later turn did not fit into the context and was left out
    num_shortened: int = 0  # given responses longer than `max_new_tokens` or the context


@dataclass
class DenseSummary(Summary):
    """Counts of a dense collection."""

    num_shortened: int = 0  # given responses that were cut
    num_tokens: int = 0  # of the responses
    num_trees: int = 0
    num_nodes: int = 0
    seconds: float = 0.0  # wall time of drafting and writing, without generation

    def render(self) -> str:
        figures = (
            f"{self.num_trees} trees of {self.num_nodes} nodes along {self.num_tokens} tokens, "
            f"{self.num_trees / (self.seconds or 1.0):.0f} trees/s"
        )
        shortened = f"cut to the limit of new tokens: {count(self.num_shortened, 'response')}"
        losses = shortened if self.num_shortened else ""
        return self.words(figures if self.num_trees else "", losses)


def collect_dense(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    out: str | Path,
    shape: FullTree,
    *,
    options: SetOptions = FRESH,
    responses: Responses | None = None,
    batch_size: int = 1,
    decoder: Decoder | None = None,
    strict: bool = False,
) -> DenseSummary:
    """Drafts the full tree from every position of every response and writes dense traces.

    Ctrl-C keeps every finished prompt; `resume` goes on with the others. The rows of a prompt stay
    in memory until it is finished, about 100 bytes per node.

    Args:
        settings: the limit of new tokens, which also cuts given responses, and the sampling of
            texts and labels.
        responses: texts to draft along, of prompts that `Responses.answered` has; None lets the
            target generate them.
        batch_size: prompts generated together.
        out: a folder or `s3://bucket/prefix`.
        decoder: a `plain_decoder` to use again.
        strict: refuse a response that cannot be used, in place of skipping its prompt.

    Raises:
        UsageError: a pair that cannot draft the shape.
        PromptError: no response can be used; see `answerable`.
        TraceError, OutputError: see `specctl.errors`.
    """
    drafting = DenseDrafting(pair, shape)
    policy, facts = Policy(shape=shape), dense_facts(shape, responses)
    with options.open(pair, policy, settings, out, **facts) as writer:
        summary, left = DenseSummary.begin(writer, prompts, options.shard)
        if responses is None:
            texts = generate(decoder or plain_decoder(pair, batch_size), left, settings)
        else:
            # Checks all before the first is drafted.
            usable = answerable(pair.target, left, responses, settings, strict=strict)
            summary.num_planned -= len(left) - len(usable)
            by_prompt = responses.by_prompt
            texts = (answered(pair.target, p, by_prompt[p.prompt_id], settings) for p in usable)
        _record(drafting, texts, writer, summary)
    return summary


def dense_facts(shape: FullTree, responses: Responses | None) -> dict[str, Any]:
    """The entries of `header.collect` that only dense sets have."""
    support = {name: getattr(shape, name) for name in ("top_k", "depth", "nested")}
    return {
        "dense": {**support, "width": shape.width or shape.top_k},
        "responses_digest": None if responses is None else responses.digest,
    }


class DensePrompt(NamedTuple):
    """A prompt with all its rows."""

    prompt_id: str
    tables: list[Tables]
    size_bytes: int


class DensePrompts:
    """The recorder's source of whole prompts, all of which have ended."""

    def __init__(self) -> None:
        self._held: list[DensePrompt] = []

    @property
    def held_bytes(self) -> int:
        return sum(one.size_bytes for one in self._held)

    @property
    def has_ended(self) -> bool:
        return bool(self._held)

    def take(self, items: list[DensePrompt]) -> None:
        self._held += items

    def publish(self) -> list[Publication]:
        held, self._held = self._held, []
        tables = [part for one in held for part in one.tables]
        size_bytes = sum(one.size_bytes for one in held)
        names = [one.prompt_id for one in held]
        return [Publication(names, partial(join_tables, tables), size_bytes)]

    def unfinished(self) -> list[str]:
        return []


def _record(
    drafting: DenseDrafting,
    texts: Iterator[AnsweredPrompt],
    writer: TraceWriter,
    summary: DenseSummary,
    config: RecorderConfig | None = None,
) -> None:
    """Drafts and writes; finished prompts are written after Ctrl-C or an error, too."""
    config = config or RecorderConfig(max_bytes=FLUSH_BYTES)
    with Recorder(lambda: writer, DensePrompts(), config, summary.committed) as recorder:
        for text in texts:
            start = time.perf_counter()
            tables = _draft(drafting, text, summary)
            size_bytes = sum(rows.nbytes for table in tables for rows in table.values())
            with finishing():  # an interrupt inside would leave the queue locked
                recorder.put(DensePrompt(text.prompt_id, tables, size_bytes), size_bytes)
            summary.seconds += time.perf_counter() - start
        start = time.perf_counter()
        recorder.close()
        summary.seconds += time.perf_counter() - start


def _draft(drafting: DenseDrafting, text: AnsweredPrompt, summary: DenseSummary) -> list[Tables]:
    tables = [rows for answer in text.answers for rows in drafting.tables(*answer)]
    summary.num_cut += text.is_cut
    summary.num_shortened += text.num_shortened
    summary.num_tokens += sum(len(token_ids) for _, token_ids in text.answers)
    summary.num_trees += sum(rows["rounds"].num_rows for rows in tables)
    summary.num_nodes += sum(rows["nodes"].num_rows for rows in tables)
    return tables


# --------------------------------------------------------------------------- texts


def plain_decoder(pair: Pair, batch_size: int) -> Decoder:
    """The decoder of `generate`, which drafts nothing."""
    return Decoder(pair, Policy(shape=RootOnly()), batch_size=batch_size)


def generate(
    decoder: Decoder, prompts: Sequence[Prompt], settings: DecodeSettings
) -> Iterator[AnsweredPrompt]:
    """Generates the target's answers by plain decoding.

    Lossless policies agree on the distribution of texts, but rounding in a wide verification can
    flip a near-tie. Texts of `ar`, the baseline of every comparison, favour none of them.
    Generation runs in groups, because it and dense reading share the target's cache.
    """
    size = max(GROUP_PROMPTS, 2 * decoder.batch_size)
    for start in range(0, len(prompts), size):
        for done in list(decoder.converse(prompts[start : start + size], settings)):
            answers = ((turn.request, turn.token_ids) for turn in done.completions)
            yield AnsweredPrompt(done.prompt.prompt_id, tuple(answers), done.is_cut)


def answerable(
    target: Target,
    prompts: Sequence[Prompt],
    responses: Responses,
    settings: DecodeSettings,
    *,
    strict: bool,
) -> list[Prompt]:
    """The prompts whose responses the target can have given; a warning counts the others.

    Raises:
        PromptError: it can have given none; the first fault with `strict`.
    """

    def use(prompt: Prompt) -> Prompt:
        try:
            answered(target, prompt, responses.by_prompt[prompt.prompt_id], settings)
        except PromptTooLongError as error:
            path = str(responses.path)
            raise PromptLineError(path, prompt.prompt_id, error.message) from error
        return prompt

    return usable(prompts, use, responses.path, strict=strict, unit="prompts") if prompts else []


def answered(
    target: Target, prompt: Prompt, response: Response, settings: DecodeSettings
) -> AnsweredPrompt:
    """A prompt with its answers from a file.

    Raises:
        PromptError: a response that the target cannot have given, see `response_ids`.
        PromptTooLongError: a prompt that leaves no room for a response.
    """
    conversation = Conversation(prompt)
    answers, num_shortened = [], 0
    for turn in response.turns:
        request = next_request(target.tokenizer, conversation, settings)
        request.check_room(target.model.context_tokens)
        found = response_ids(target, request, turn, response)
        room = target.model.context_tokens - len(request.prompt_ids)
        kept = found[: min(room, settings.max_new_tokens)]
        num_shortened += len(kept) < len(found)
        answers.append((request, kept))
        text = turn if isinstance(turn, str) else decode_text(target.tokenizer, found)
        conversation.texts.append(text)
    return AnsweredPrompt(prompt.prompt_id, tuple(answers), num_shortened=num_shortened)


def response_ids(
    target: Target, request: Request, turn: TurnText, response: Response
) -> tuple[int, ...]:
    """The tokens of one turn, as the target would have emitted them after the prompt.

    A text is tokenised alone; decoded after the prompt it must give the same text, which fails if
    the tokenizer puts a space in front of every text. A response that is known to have ended
    (`eos`) gets the end-of-text token at its end.

    Raises:
        PromptError: a text that its tokens do not spell, tokens that the target does not have, or
            tokens after its end of text.
    """
    if isinstance(turn, str):
        tokenizer, prompt_ids = target.tokenizer, list(request.prompt_ids)
        ids = tuple(tokenizer(turn, add_special_tokens=False)["input_ids"])
        before = tokenizer.decode(prompt_ids, clean_up_tokenization_spaces=False)
        whole = tokenizer.decode([*prompt_ids, *ids], clean_up_tokenization_spaces=False)
        if whole != before + turn:
            spelt = whole.removeprefix(before)[:24]
            raise response.entry.refuse(
                "its tokens spell another text after the prompt",
                f"{turn[:24]!r} becomes {spelt!r}",
                hint="give 'token_ids' instead",
            )
        if not response.ends or not target.eos_ids:
            return ids
        named = tokenizer.eos_token_id  # models may have several
        return (*ids, int(named) if named in target.eos_ids else target.eos_ids[0])
    unknown = [token for token in turn if token >= target.model.vocab_size]
    if unknown:
        reason = f"a token id is not below the target's {target.model.vocab_size}"
        raise response.entry.refuse(reason, str(unknown[0]), hint="use the target's own tokens")
    if not set(target.eos_ids).isdisjoint(turn[:-1]):
        raise response.entry.refuse("tokens follow the end-of-text token")
    return turn
