"""Several policies on the same prompts, in turns, and their results on disk.

A machine that warms up or runs other work favours the policy that runs at the right moment. So the
policies take turns, prompt by prompt, in an order shuffled with the run's seed, and two policies
are compared by the paired times of each prompt. The prompts are shuffled too: files are often
sorted by category, and what an interrupted run has finished must be a sample.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, reduce
from itertools import count
from operator import or_
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import torch

from specctl.durable import write_whole
from specctl.policy import Ratio, RootOnly
from specctl.progress import advance
from specctl.records import json_bytes
from specctl.runtime.api import Decoder
from specctl.runtime.capture import GraphCounters, GraphSettings
from specctl.runtime.config import Decisions
from specctl.runtime.conversations import (
    Conversation,
    ConversationPrompt,
    DecodeSettings,
    longest_text,
)
from specctl.runtime.decode import SharedMemory
from specctl.runtime.identity import hardware_name
from specctl.runtime.load import Pair
from specctl.runtime.requests import PHASES, Metrics, Observer, pooled
from specctl.runtime.words import NamedPolicy
from specctl.stats import (
    MIN_PROMPTS,
    Floats,
    Interval,
    first_over_second,
    ratio_of_ratios,
    swap_p_value,
)

log = logging.getLogger(__name__)
BATCHES_A_TURN = 4
"""Batches of prompts: only the last of a turn runs partly empty."""
MAX_P_VALUE = 0.01
Verdict = Literal["faster", "slower", "not told apart"]
SCHEDULED = Path("/proc/thread-self/schedstat")
"""Linux: nanoseconds that the thread ran and that it waited ready to run, and number of turns."""


def waited_us() -> float | None:
    """Time that this thread has waited for a processor; None where the system does not count it."""
    try:
        return float(SCHEDULED.read_text().split()[1]) / 1e3
    except (OSError, IndexError, ValueError):
        return None


@dataclass(frozen=True)
class Divergence:
    """The first difference of a text from plain decoding's."""

    request_id: str
    position: int  # output tokens that agree
    top2_gap: float | None
    """Distance of the target's two best logits there, in a fresh forward; a tie within the dtype's
    rounding explains the difference. None for sampled tokens, where noise decides as well."""


@dataclass(frozen=True)
class Paired:
    """One policy's speed over another's, on the same prompts."""

    speedup: Interval  # ratio of tokens a second, with its 95 % interval over turns
    num_turns: int
    p_value: float  # of `stats.swap_p_value`, which swaps the two in random turns

    @property
    def verdict(self) -> Verdict:
        """`faster`, `slower` or `not told apart`, with at most 1 false verdict in 100."""
        if self.num_turns < MIN_PROMPTS or not self.p_value <= MAX_P_VALUE:
            return "not told apart"
        return "faster" if self.speedup.value > 1 else "slower"

    def to_json(self) -> dict[str, Any]:
        return {
            "speedup": self.speedup.to_json(),
            "num_turns": self.num_turns,
            "p_value": self.p_value,
            "verdict": self.verdict,
        }


def paired(ours: Floats, theirs: Floats) -> Paired:
    """The comparison of two policies' `[T, 2]` tokens and seconds."""
    speedup = ratio_of_ratios((ours[:, 0], ours[:, 1]), (theirs[:, 0], theirs[:, 1]))
    return Paired(speedup, len(ours), swap_p_value(ours, theirs, first_over_second))


@dataclass(frozen=True)
class RunResult:
    """One policy's run."""

    named: NamedPolicy
    conversations: list[Conversation]  # in the order of the given prompts
    metrics: Metrics
    turns: Floats  # `[T, 2]` tokens and seconds of each turn: of a prompt, or of a batch of prompts
    paired: Paired | None = None  # with plain decoding, or else the first; None for itself
    divergences: list[Divergence] | None = None
    """From plain decoding; None if it did not run, or if drafts were drawn."""
    graphs: GraphCounters = field(default_factory=GraphCounters)  # warm-up included
    taken: Sequence[Turn] = ()  # in the order of decoding

    @cached_property
    def fitted_on(self) -> set[str]:
        """The prompts here that the policy was fitted on, which flatter it."""
        return self.named.fitted_on(talk.prompt.prompt_id for talk in self.conversations)

    def summary(self) -> dict[str, Any]:
        same = None if self.divergences is None else not self.divergences
        return {
            "policy": self.named.label,
            "num_prompts_fitted_on": len(self.fitted_on),
            **self.metrics.summary(),
            "paired": None if self.paired is None else self.paired.to_json(),
            "is_lossless": self.named.policy.lossless,
            "equal_to_ar": same,
            "divergences": [vars(d) for d in self.divergences or []],
            "num_cut": sum(conversation.is_cut for conversation in self.conversations),
            "artifact_digest": self.named.artifact_digest,
            "graphs": asdict(self.graphs),
            "turns": [turn.to_json(number) for number, turn in enumerate(self.taken)],
        }


@dataclass(frozen=True)
class Comparison:
    """Runs on the prompts that all policies finished, in the order of the policies."""

    results: list[RunResult]
    num_given: int  # prompts
    waiting_frac: float | None
    """Fraction of the time that the decoding thread waited for a processor; None where the system
    does not count it."""

    @property
    def num_prompts(self) -> int:
        """Prompts that all policies finished; after Ctrl-C a random part of the given ones."""
        return len(self.results[0].conversations)

    @property
    def is_interrupted(self) -> bool:
        return self.num_prompts < self.num_given


def compare_policies(
    pair: Pair,
    policies: Sequence[NamedPolicy],
    prompts: Sequence[ConversationPrompt],
    settings: DecodeSettings,
    *,
    batch_size: int = 1,
    decisions: Decisions = "auto",
    on_prompt: Callable[[str], None] | None = None,
    observer: Observer | None = None,
) -> Comparison:
    """Decodes the prompts under every policy, in turns, after an unobserved warm-up.

    A turn is a prompt, or `BATCHES_A_TURN` batches if `batch_size` exceeds 1; prompts come in
    shuffled order. A single policy takes all prompts in one turn, in their order. After Ctrl-C the
    comparison covers the turns that all policies finished; before the first of them the interrupt
    is raised.

    Args:
        decisions, observer: see `Decoder`.
        on_prompt: called with the id of every finished prompt.
    """
    graphs = GraphSettings()
    graphs = replace(graphs, limit_bytes=graphs.limit_bytes // len(policies))
    decoders = [
        Decoder(
            pair, named.policy, batch_size=batch_size, decisions=decisions, observer=observer,
            graphs=graphs,
        )
        for named in policies
    ]  # fmt: skip
    memory = SharedMemory(reduce(or_, (decoder.tree_room for decoder in decoders)))
    longest = longest_text(pair.target.tokenizer, prompts, settings)
    for decoder in decoders:
        decoder.loop_for(longest, memory)
        if observer is None:  # the timed turns replay graphs captured here
            list(decoder.converse(prompts[:batch_size], settings))
    size = 1 if batch_size == 1 else BATCHES_A_TURN * batch_size
    size = len(prompts) if len(policies) == 1 else size
    order = Random(settings.sampling.seed)
    queue = order.sample(prompts, len(prompts)) if len(policies) > 1 else prompts
    finished, places = list[list[Turn]](), count()
    began, waited = time.perf_counter(), waited_us()
    try:
        for start in range(0, len(prompts), size):
            part, taken = queue[start : start + size], {}
            for index in order.sample(range(len(decoders)), len(decoders)):
                taken[index] = take_turn(decoders[index], part, settings, next(places), on_prompt)
            finished.append([taken[index] for index in range(len(decoders))])
    except KeyboardInterrupt:
        if not finished:
            raise
    wall_us = 1e6 * (time.perf_counter() - began)
    rank = {prompt.prompt_id: number for number, prompt in enumerate(prompts)}
    runs = [
        result_of(named, [turns[index] for turns in finished], decoders[index], rank)
        for index, named in enumerate(policies)
    ]
    waiting = None if waited is None else min(1.0, ((waited_us() or 0.0) - waited) / wall_us)
    for run in runs:
        if failed := run.metrics.fallback_calls:
            log.warning(
                "%s failed in %s of %s calls, which a static plan decided; the text is the same",
                *(run.named.label, failed, run.metrics.calls),
            )
    return Comparison(checked_against_plain(runs, pair), len(prompts), waiting)


@dataclass(frozen=True)
class Turn:
    """Some prompts under one policy."""

    conversations: list[Conversation]
    seconds: float
    place: int  # among the turns of all policies, in the order of decoding

    @property
    def metrics(self) -> Metrics:
        return pooled(done.metrics for talk in self.conversations for done in talk.completions)

    def to_json(self, number: int) -> dict[str, Any]:
        """The turn as a row; its number is that of the same prompts under other policies."""
        sums = self.metrics
        names = ("num_tokens", "calls", "verified_tokens", "num_accepted")
        phases = ("prefill_us", *(f"{phase}_us" for phase in PHASES))
        return {
            "turn": number,
            "place": self.place,
            "prompt_ids": [talk.prompt.prompt_id for talk in self.conversations],
            "time_us": 1e6 * self.seconds,
            **{name: getattr(sums, name) for name in (*names, *phases)},
        }


def take_turn(
    decoder: Decoder,
    prompts: Sequence[ConversationPrompt],
    settings: DecodeSettings,
    place: int,
    on_prompt: Callable[[str], None] | None,
) -> Turn:
    finished, began = {}, time.perf_counter()
    for conversation in decoder.converse(prompts, settings):
        finished[conversation.prompt.prompt_id] = conversation
        advance("decoded prompts")
        if on_prompt is not None:
            on_prompt(conversation.prompt.prompt_id)
    spent = time.perf_counter() - began
    return Turn([finished[prompt.prompt_id] for prompt in prompts], spent, place)


def result_of(
    named: NamedPolicy, turns: Sequence[Turn], decoder: Decoder, rank: Mapping[str, int]
) -> RunResult:
    talks = [talk for turn in turns for talk in turn.conversations]
    talks.sort(key=lambda talk: rank[talk.prompt.prompt_id])
    metrics = pooled(turn.metrics for turn in turns)
    sums = np.array([(turn.metrics.num_tokens, turn.seconds) for turn in turns], np.float64)
    return RunResult(named, talks, metrics, sums, graphs=decoder.graph_counters, taken=turns)


def verdict(results: Sequence[RunResult]) -> str:
    """A sentence on the fastest policy, beside plain decoding or else the first; empty of one.

    A policy that was fitted on some of the prompts cannot win, as in `replay`.
    """
    base_run = next((run for run in results if run.paired is None), None)
    if base_run is None or not results[1:]:
        return ""
    beside = {
        run.named.label: run.paired
        for run in results
        if run.paired is not None and not run.fitted_on and not base_run.fitted_on
    }
    if not beside:
        return "No verdict on speed: fitted policies ran on prompts of their own fits."
    num_turns = next(iter(beside.values())).num_turns
    if num_turns < MIN_PROMPTS:
        return f"No verdict on speed: {num_turns} turns of each policy, {MIN_PROMPTS} are needed."
    ranked = sorted(beside, key=lambda label: -beside[label].speedup.value)
    faster, unclear = (
        [label for label in ranked if beside[label].verdict == word]
        for word in ("faster", "not told apart")
    )
    best = (faster or ranked)[0]
    plain = isinstance(base_run.named.policy.shape, RootOnly)
    base = "plain decoding" if plain else base_run.named.label
    times = f"× {beside[best].speedup.text('.2f')} of {base} ({num_turns} turns)"
    if not faster and unclear:
        gain = beside[unclear[0]]
        ends = gain.speedup
        lean = "faster" if ends.low > 1 else "slower" if ends.high < 1 else ""
        if lean:
            return (
                f"No verdict beside {base}: {unclear[0]}, × {ends.text('.2f')}, is {lean} by its "
                f"interval, but its p, {gain.p_value:.2g}, is above {MAX_P_VALUE} ({num_turns} "
                "turns); more prompts may settle it."
            )
        return (
            f"Not told apart from {base}: {unclear[0]} × {gain.speedup.text('.2f')} ({num_turns} "
            f"turns, p {gain.p_value:.2g}; a verdict needs p of at most {MAX_P_VALUE})."
        )
    if not faster:
        what = "Drafting did not pay here: the best" if plain else f"Fastest: {base}; next"
        return f"{what}, {best}, was {times}."
    sums = {run.named.label: run.turns for run in results}
    close = [
        label
        for label in ranked
        if label != best and paired(sums[best], sums[label]).verdict == "not told apart"
    ]
    return f"Fastest: {best}, {times}{'; not told apart from ' * bool(close)}{', '.join(close)}."


def checked_against_plain(runs: list[RunResult], pair: Pair) -> list[RunResult]:
    """The runs with divergences from plain decoding, and speedups over it or else the first."""
    plain = next((run for run in runs if isinstance(run.named.policy.shape, RootOnly)), None)
    base = plain or runs[0]
    return [
        replace(
            run,
            paired=None if run is base else paired(run.turns, base.turns),
            divergences=None if not plain or _draws_drafts(run) else _divergences(plain, run, pair),
        )
        for run in runs
    ]


def _draws_drafts(run: RunResult) -> bool:
    """Whether drafts were drawn: only the distribution of texts is then plain decoding's."""
    done = (one for conversation in run.conversations for one in conversation.completions)
    drawn = isinstance(run.named.policy.acceptance, Ratio)
    return drawn and not all(one.request.sampling.greedy for one in done)


def _divergences(reference: RunResult, run: RunResult, pair: Pair) -> list[Divergence]:
    found = []
    for ours, theirs in zip(run.conversations, reference.conversations, strict=True):
        # Only the first differing turn counts: later ones answer different texts.
        pairs = zip(ours.completions, theirs.completions, strict=False)
        differing = next((p for p in pairs if p[0].token_ids != p[1].token_ids), None)
        if differing is not None:
            mine, plain = differing
            same = [a == b for a, b in zip(mine.token_ids, plain.token_ids, strict=False)]
            position = [*same, False].index(False)
            text = [*plain.request.prompt_ids, *plain.token_ids[:position]]
            gap = top2_gap(pair, text) if plain.request.sampling.greedy else None
            found.append(Divergence(plain.request.request_id, position, gap))
    return found


@torch.inference_mode()
def top2_gap(pair: Pair, text: Sequence[int]) -> float:
    """Distance of the target's two best logits after a text, by a fresh forward."""
    model = pair.target.model
    model.allocate(1, len(text))
    logits = model.extend(0, 0, torch.tensor([text], device=model.device)).logits[-1]
    best = logits.float().topk(2).values
    return float(best[0] - best[1])


# --------------------------------------------------------------------------- on disk


def write_results(
    folder: Path,
    comparison: Comparison,
    pair: Pair,
    settings: DecodeSettings,
    batch_size: int,
    decisions: Decisions = "auto",
    *,
    num_left_out: int = 0,
) -> None:
    """Writes `results.json` (one object a policy), `run.json` and `<policy>.jsonl`.

    Args:
        num_left_out: further prompts, of some policy's fit.
    """
    results = comparison.results
    facts = {
        "pair": pair.fingerprint.model_dump(),
        "num_prompts": comparison.num_prompts,
        "num_prompts_given": comparison.num_given,
        "num_prompts_left_out": num_left_out,
        "dtype": str(pair.target.model.dtype).removeprefix("torch."),
        "device": hardware_name(*pair.target.model.devices),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "batch_size": batch_size,
        "max_new_tokens": settings.max_new_tokens,
        "sampling": vars(settings.sampling),
        "decisions": decisions,
        "waiting_frac": comparison.waiting_frac,
        "verdict": verdict(results),
    }
    write_whole(folder / "results.json", json_bytes([r.summary() for r in results]), "results")
    write_whole(folder / "run.json", json_bytes(facts), "results")
    for result in results:
        lines = [json.dumps(_texts(c), ensure_ascii=False) for c in result.conversations]
        name = re.sub(r"[^A-Za-z0-9._=-]+", "_", result.named.label)
        write_whole(folder / f"{name}.jsonl", ("\n".join(lines) + "\n").encode(), "results")


def _texts(conversation: Conversation) -> dict[str, Any]:
    done = conversation.completions
    return {
        "prompt_id": conversation.prompt.prompt_id,
        "category": conversation.prompt.category,
        "texts": conversation.texts,
        "token_ids": [list(completion.token_ids) for completion in done],
        "finish_reasons": [completion.finish_reason for completion in done],
        "accepted_lengths": [completion.metrics.accepted_lengths for completion in done],
    }
