"""Live collection: decode prompts with a static policy and record every round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from specctl.collect.config import FINISHED, WHOLE, Shard, TokenMode
from specctl.collect.prompts import Prompt
from specctl.collect.rounds import TraceRecorder
from specctl.collect.trace_writer import TraceWriter, pair_header
from specctl.formatting import count
from specctl.logs.trace_files import Segment
from specctl.policy import Policy
from specctl.progress import advance
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import Pair, pair_domain
from specctl.runtime.requests import Metrics, pooled


@dataclass(frozen=True)
class SetOptions:
    """Options of a collection on its trace set."""

    resume: bool = False  # go on with a set of the same run
    shard: Shard = WHOLE  # the part of the prompts for this process, if several write to one set
    tokens: TokenMode = "keep"
    workload: str | None = None  # the user's word for the prompts; goes into artifacts
    own_prompts: bool = False  # see `TraceWriter.open`

    def open(
        self, pair: Pair, policy: Policy, settings: DecodeSettings, out: str | Path, **more: Any
    ) -> TraceWriter:
        """Starts or joins the set; `more` goes into its header, see `pair_header`."""
        header = pair_header(
            policy,
            settings.sampling,
            pair.fingerprint,
            pair_domain(pair, workload=self.workload),
            self.tokens,
            max_new_tokens=settings.max_new_tokens,
            draft_vocab_size=None if pair.drafter is None else pair.drafter.vocab_size,
            **more,
        )
        joins = self.resume or self.shard.count > 1
        return TraceWriter.open(out, header, resume=joins, own_prompts=self.own_prompts)


FRESH = SetOptions()
"""A set of its own, of all prompts."""


@dataclass
class Summary:
    """Counts of a run of `specctl collect`."""

    out: str
    num_planned: int
    num_skipped: int  # prompts that an earlier run had finished
    num_committed: int = 0
    num_cut: int = 0  # conversations that outgrew the context

    @classmethod
    def begin(
        cls, writer: TraceWriter, prompts: Sequence[Prompt], shard: Shard
    ) -> tuple[Self, list[Prompt]]:
        """Counts of nothing yet, and the prompts of this shard that are not finished."""
        planned = [prompt for prompt in prompts if shard.holds(prompt.prompt_id)]
        left = writer.plan(planned)
        return cls(writer.place.name, len(planned), len(planned) - len(left)), left

    def add(self, part: Summary) -> None:
        """Adds the counts of a batch; its prompts are planned here already."""
        for name, done in vars(part).items():
            if name not in ("out", "num_planned", "num_skipped"):
                before = getattr(self, name)
                both = pooled([before, done]) if isinstance(done, Metrics) else before + done
                setattr(self, name, both)

    def committed(self, segment: Segment) -> None:
        """Counts a segment, and shows its prompts as progress."""
        self.num_committed += len(segment.prompt_ids)
        advance(FINISHED, len(segment.prompt_ids))

    def to_json(self) -> dict[str, Any]:
        return vars(self).copy()

    def render(self) -> str:
        """The counts in words."""
        raise NotImplementedError

    def words(self, figures: str, losses: str = "") -> str:
        """The counts in words, with lines of a kind of collection."""
        cut = f"{self.num_cut} conversations outgrew the context and were cut"
        lines = [
            f"{self.out}: {count(self.num_committed, 'prompt')} collected"
            + (f", {self.num_skipped} were there before" if self.num_skipped else ""),
            *(figures, cut if self.num_cut else "", losses),
        ]
        return "\n".join(filter(None, lines))


@dataclass
class LiveSummary(Summary):
    """Counts of a live collection."""

    metrics: Metrics = field(default_factory=Metrics)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "metrics": self.metrics.summary()}

    def render(self) -> str:
        metrics = self.metrics
        figures = (
            f"{metrics.num_tokens} tokens, {metrics.calls} calls, "
            f"τ {metrics.mean_acceptance_length:.2f}, {metrics.tokens_per_s:.0f} tokens/s"
        )
        return self.words(figures if metrics.calls else "")


def collect_live(
    pair: Pair,
    prompts: Sequence[Prompt],
    policy: Policy,
    settings: DecodeSettings,
    out: str | Path,
    *,
    options: SetOptions = FRESH,
    batch_size: int = 1,
    decoder: Decoder | None = None,
) -> LiveSummary:
    """Decodes the prompts that are not finished yet and writes their traces.

    Ctrl-C keeps every finished prompt; `resume` goes on with the others.

    Args:
        out: a folder or `s3://bucket/prefix`.
        decoder: a decoder of this pair and policy, to use again.

    Raises:
        TraceError, OutputError, PromptTooLongError: see `specctl.errors`.
    """
    with options.open(pair, policy, settings, out) as writer:
        summary, left = LiveSummary.begin(writer, prompts, options.shard)
        with TraceRecorder(writer, on_commit=summary.committed) as recorder:
            decoder = decoder or Decoder(pair, policy, batch_size=batch_size)
            decoder.observer = recorder
            for done in decoder.converse(left, settings):
                recorder.finish_prompt(done.prompt.prompt_id)
                parts = [completion.metrics for completion in done.completions]
                summary.metrics = pooled([summary.metrics, *parts])
                summary.num_cut += done.is_cut
    return summary


@contextmanager
def recording(
    pair: Pair, prompts: Sequence[Prompt], policy: Policy, settings: DecodeSettings, out: str
) -> Iterator[TraceRecorder]:
    """An observer that records the caller's own run; the caller reports each finished prompt.

    Raises:
        TraceError, OutputError: see `specctl.errors`.
    """
    with FRESH.open(pair, policy, settings, out) as writer:
        writer.plan(prompts)
        with TraceRecorder(writer) as recorder:
            yield recorder
