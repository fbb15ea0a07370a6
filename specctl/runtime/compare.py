"""Several policies on the same prompts, side by side in one run, and their results on disk."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specctl.policy import Ratio, RootOnly
from specctl.runtime.api import Decoder
from specctl.runtime.capture import GraphCounters
from specctl.runtime.config import Decisions
from specctl.runtime.conversations import (
    Conversation,
    ConversationPrompt,
    DecodeSettings,
    converse,
    longest_text,
)
from specctl.runtime.identity import hardware_name
from specctl.runtime.load import Pair
from specctl.runtime.output import json_bytes, write_whole
from specctl.runtime.policy_spec import NamedPolicy
from specctl.runtime.requests import Metrics, Observer, OnTokens, pooled


@dataclass(frozen=True)
class Divergence:
    """Where a text first differs from plain decoding's.

    Attributes:
        position: output tokens that agree.
        top2_gap: logits between the target's two best tokens there, in a fresh forward; a tie
            within the dtype's rounding explains it. None where tokens were sampled: there the
            noise of the race decides as well.
    """

    request_id: str
    position: int
    top2_gap: float | None


@dataclass(frozen=True)
class RunResult:
    """One policy's run.

    Attributes:
        conversations: in prompt order.
        divergences: against `ar`; None when `ar` was not part of the comparison, or drafts were
            drawn.
        graphs: what became of the rounds' graphs, the warm-up's among them.
    """

    named: NamedPolicy
    conversations: list[Conversation]
    metrics: Metrics
    divergences: list[Divergence] | None = None
    graphs: GraphCounters = field(default_factory=GraphCounters)

    def summary(self) -> dict[str, Any]:
        """One row of `results.json`."""
        same = None if self.divergences is None else not self.divergences
        return {
            "policy": self.named.label,
            **self.metrics.summary(),
            "is_lossless": self.named.policy.lossless,
            "equal_to_ar": same,
            "divergences": [vars(d) for d in self.divergences or []],
            "num_cut": sum(conversation.is_cut for conversation in self.conversations),
            "artifact_digest": self.named.artifact_digest,
            "graphs": asdict(self.graphs),
        }


@dataclass(frozen=True)
class Comparison:
    """Finished runs, in the order asked for; fewer than asked for if interrupted."""

    results: list[RunResult]
    is_interrupted: bool


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
    on_tokens: OnTokens | None = None,
) -> Comparison:
    """Decodes the prompts once per policy, after one warm-up prompt each where nobody observes.

    Ctrl-C ends the comparison with the policies that are finished, if there are any.

    Args:
        decisions: see `Decoder`. A policy that cannot be decided so is refused before any text.
        on_prompt: called with the id of every finished prompt. observer: sees every round.
        on_tokens: called with each request's new tokens as they are emitted.
    """
    runs: list[RunResult] = []
    decoders = [
        Decoder(pair, named.policy, batch_size=batch_size, decisions=decisions, observer=observer)
        for named in policies
    ]
    try:
        for named, decoder in zip(policies, decoders, strict=True):
            # Warm-up, not counted; graphs that it captures serve the texts that are.
            decoder.loop_for(longest_text(pair.target.tokenizer, prompts, settings))
            if observer is None:
                list(converse(decoder, prompts[:batch_size], settings))
            finished = {}
            for conversation in converse(decoder, prompts, settings, on_tokens):
                finished[conversation.prompt.prompt_id] = conversation
                if on_prompt is not None:
                    on_prompt(conversation.prompt.prompt_id)
            talks = [finished[prompt.prompt_id] for prompt in prompts]
            metrics = pooled(done.metrics for talk in talks for done in talk.completions)
            runs.append(RunResult(named, talks, metrics, graphs=decoder.graph_counters))
            decoder.release()  # the next policy's graphs want the memory
    except KeyboardInterrupt:
        if not runs:
            raise
    return Comparison(checked_against_plain(runs, pair), is_interrupted=len(runs) < len(policies))


def checked_against_plain(runs: list[RunResult], pair: Pair) -> list[RunResult]:
    """The runs with their divergences from plain decoding, where that is among them."""
    plain = next((run for run in runs if isinstance(run.named.policy.shape, RootOnly)), None)
    if plain is None:
        return runs
    return [
        run if _has_own_text(run) else replace(run, divergences=_against(plain, run, pair))
        for run in runs
    ]


def _has_own_text(run: RunResult) -> bool:
    """Whether drafts were drawn: the text then follows plain decoding's distribution alone."""
    done = (one for conversation in run.conversations for one in conversation.completions)
    drawn = isinstance(run.named.policy.acceptance, Ratio)
    return drawn and not all(one.request.sampling.greedy for one in done)


def _against(reference: RunResult, run: RunResult, pair: Pair) -> list[Divergence]:
    found = []
    for ours, theirs in zip(run.conversations, reference.conversations, strict=True):
        # Later turns answer other texts once a turn differs: only the first one counts.
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
    """Distance of the target's two best logits after a text, from an uncached forward."""
    model = pair.target.model
    model.allocate(1, len(text))
    logits = model.extend(0, 0, torch.tensor([text], device=model.device)).logits[-1]
    best = logits.float().topk(2).values
    return float(best[0] - best[1])


# --------------------------------------------------------------------------- on disk


def write_results(
    folder: Path,
    results: Sequence[RunResult],
    pair: Pair,
    settings: DecodeSettings,
    batch_size: int,
    decisions: Decisions = "auto",
) -> None:
    """Writes `results.json` (a list, one object a policy), `run.json` and `<policy>.jsonl`.

    Raises:
        OutputError: a file cannot be written.
    """
    num_prompts = max((len(result.conversations) for result in results), default=0)
    facts = {
        "pair": pair.fingerprint.model_dump(),
        "num_prompts": num_prompts,
        "dtype": str(pair.target.model.dtype).removeprefix("torch."),
        "device": hardware_name(*pair.target.model.devices),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "batch_size": batch_size,
        "max_new_tokens": settings.max_new_tokens,
        "sampling": vars(settings.sampling),
        "decisions": decisions,
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
