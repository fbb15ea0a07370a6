"""Live collection: decode prompts with a static policy and record every round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from specctl.collect.config import FINISHED, WHOLE, Shard, WhenFull
from specctl.collect.prompts import Prompt
from specctl.collect.recorder import RecorderConfig
from specctl.collect.rounds import TraceRecorder
from specctl.collect.tokens import TokenMode, token_header
from specctl.collect.trace_writer import TraceWriter, make_header
from specctl.formatting import count
from specctl.logs.trace_files import Segment, TraceHeader
from specctl.policy import Policy
from specctl.progress import advance
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import Pair, pair_domain
from specctl.runtime.requests import Metrics, pooled


@dataclass
class Sitting:
    """Counts of a collection in this sitting.

    Attributes:
        num_skipped: prompts that an earlier sitting had finished.
        num_committed: prompts made durable. num_cut: conversations that outgrew the context.
    """

    out: str
    num_planned: int
    num_skipped: int
    num_committed: int = 0
    num_cut: int = 0

    @classmethod
    def begin(
        cls, writer: TraceWriter, prompts: Sequence[Prompt], shard: Shard
    ) -> tuple[Self, list[Prompt]]:
        """Nothing done yet, and the prompts of this shard that are not finished."""
        planned = [prompt for prompt in prompts if shard.holds(prompt.prompt_id)]
        left = writer.plan(planned)
        return cls(writer.place.name, len(planned), len(planned) - len(left)), left

    def add(self, part: Sitting) -> None:
        """Adds what was done in a part of this sitting, whose prompts are planned here already."""
        for name, done in vars(part).items():
            if name not in ("out", "num_planned", "num_skipped"):
                before = getattr(self, name)
                both = pooled([before, done]) if isinstance(done, Metrics) else before + done
                setattr(self, name, both)

    def to_json(self) -> dict[str, Any]:
        return vars(self).copy()

    def words(self, figures: str, losses: str) -> str:
        """The counts in words, around those of a kind of collection."""
        cut = f"{self.num_cut} conversations outgrew the context and were cut"
        lines = [
            f"{count(self.num_committed, 'prompt')} committed to {self.out}"
            f" ({self.num_skipped} were there before, {self.num_planned} planned)",
            *(figures, cut if self.num_cut else "", losses),
        ]
        return "\n".join(filter(None, lines))


@dataclass
class CollectSummary(Sitting):
    """Counts of a live collection in this sitting.

    Attributes:
        num_dropped: prompts that were decoded and not written, as the queue was full.
        num_dropped_rounds: of theirs, one a request in a round.
    """

    num_dropped: int = 0
    num_dropped_rounds: int = 0
    metrics: Metrics = field(default_factory=Metrics)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "metrics": self.metrics.summary()}

    def render(self) -> str:
        """The counts in words."""
        metrics = self.metrics
        figures = (
            f"{metrics.num_tokens} tokens, {metrics.calls} calls, "
            f"τ {metrics.mean_acceptance_length:.2f}, {metrics.tokens_per_s:.0f} tokens/s"
        )
        dropped = (
            f"{self.num_dropped} prompts with {self.num_dropped_rounds} rounds were dropped, "
            "as writing fell behind; --resume decodes them again"
        )
        return self.words(figures if metrics.calls else "", dropped if self.num_dropped else "")


def collect_live(
    pair: Pair,
    prompts: Sequence[Prompt],
    policy: Policy,
    settings: DecodeSettings,
    out: str | Path,
    *,
    batch_size: int = 1,
    resume: bool = False,
    shard: Shard = WHOLE,
    tokens: TokenMode = "keep",
    when_full: WhenFull = "block",
    workload: str | None = None,
    own_prompts: bool = False,
    decoder: Decoder | None = None,
) -> CollectSummary:
    """Decodes the prompts that are not finished yet and writes their traces.

    Ctrl-C keeps every finished prompt; `resume` goes on with the others.

    Args:
        out: a folder or `s3://bucket/prefix`. shard: which of `prompts` this process takes, where
            several write to one set, which it then joins. tokens: how ids are stored.
        when_full: where writing falls behind decoding, `block` lets decoding wait and `drop`
            leaves out the prompts that are being decoded, which `resume` decodes again.
        workload: the kind of prompts, in the user's word; goes into artifacts.
        own_prompts: see `TraceWriter.open`. decoder: of this pair and policy, to be used again.

    Raises:
        TraceError, OutputError, PromptTooLongError: see `specctl.errors`.
    """
    header = header_of(pair, policy, settings, workload=workload, tokens=tokens)
    joins = resume or shard.count > 1
    with TraceWriter.open(
        out, header, resume=joins, tokens=tokens, own_prompts=own_prompts
    ) as writer:
        summary, left = CollectSummary.begin(writer, prompts, shard)

        def committed(segment: Segment) -> None:
            summary.num_committed += len(segment.prompt_ids)
            advance(FINISHED, len(segment.prompt_ids))

        with TraceRecorder(writer, RecorderConfig(when_full=when_full), committed) as recorder:
            decoder = decoder or Decoder(pair, policy, batch_size=batch_size)
            decoder.observer = recorder
            for done in decoder.converse(left, settings):
                recorder.finish_prompt(done.prompt.prompt_id)
                parts = [completion.metrics for completion in done.completions]
                summary.metrics = pooled([summary.metrics, *parts])
                summary.num_cut += done.is_cut
        summary.num_dropped, summary.num_dropped_rounds = recorder.losses
    return summary


@contextmanager
def recording(
    pair: Pair, prompts: Sequence[Prompt], policy: Policy, settings: DecodeSettings, out: str
) -> Iterator[TraceRecorder]:
    """The observer of a run of somebody else's, who says which prompts are finished.

    Raises:
        TraceError, OutputError: see `specctl.errors`.
    """
    with TraceWriter.open(out, header_of(pair, policy, settings)) as writer:
        writer.plan(prompts)
        with TraceRecorder(writer) as recorder:
            yield recorder


def header_of(
    pair: Pair,
    policy: Policy,
    settings: DecodeSettings,
    *,
    workload: str | None = None,
    tokens: TokenMode = "keep",
    more: Mapping[str, Any] | None = None,
) -> TraceHeader:
    """Identity of the traces: pair, policy, sampling and options that must be equal on resume.

    Args:
        tokens: how ids are stored. more: JSON values that also shape the rows.
    """
    return make_header(
        policy,
        settings.sampling,
        target_digest=pair.target.digest,
        drafter_digest=None if pair.drafter is None else pair.drafter_digest,
        tokenizer_digest=pair.target.tokenizer_digest,
        collect={
            "max_new_tokens": settings.max_new_tokens,
            "target": pair.target.name,
            "drafter": pair.drafter_name,
            "dtype": str(pair.target.model.dtype).removeprefix("torch."),
            "draft_vocab_size": None if pair.drafter is None else pair.drafter.vocab_size,
            "domain": pair_domain(pair, workload=workload).model_dump(mode="json"),
            **token_header(tokens),
            **(more or {}),
        },
    )
