"""Rounds of the 8B shape for `bench_collect.py`: the time and the logits of a round, no model.

A round reads as many weights as Llama-3.1-8B has, multiplied with the tokens that it verifies, and
brings one small tensor to the host, as the captured loop does. What is recorded is a real round of
the embedded pair, its logits replaced by random ones of 128,256 tokens, cloned every round because
a captured loop writes its own buffer again. On a CPU everything is tiny and shows only that it
runs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.collect import recorder as trace_recorder
from specctl.collect.live import header_of
from specctl.collect.recorder import RecorderConfig, TraceRecorder
from specctl.collect.trace_writer import TraceWriter
from specctl.logs.trace_files import Segment, SegmentRecord
from specctl.policy import Policy
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import Pair
from specctl.runtime.policy_spec import resolve_policy
from specctl.runtime.requests import Request, RoundRecord

POLICY = "eagle2:depth=8:top_k=10:num_tokens=60"
PROMPT_ROUNDS = 50
"""Rounds after which the prompts of a batch are finished."""


@dataclass(frozen=True)
class Shape:
    """Weights `[layers, rows, hidden]` of a target, and its vocabulary."""

    layers: int
    rows: int
    hidden: int
    vocab_size: int
    dtype: torch.dtype

    @classmethod
    def on(cls, device: torch.device) -> Shape:
        """8.0e9 weights on a GPU; next to none elsewhere."""
        if device.type == "cuda":
            return cls(32, 61_184, 4096, 128_256, torch.bfloat16)
        return cls(2, 512, 64, 8192, torch.float32)


class Rounds:
    """A loop that decodes nothing, at the pace of a real one.

    Args:
        record: one row; repeated for the batch.
    """

    def __init__(self, record: RoundRecord, batch_size: int, device: torch.device) -> None:
        shape, self.device = Shape.on(device), device
        options: dict[str, Any] = {"dtype": shape.dtype, "device": device}
        self.weights = torch.randn(shape.layers, shape.rows, shape.hidden, **options)
        self.record = repeated(record, batch_size, device)
        num_nodes = self.record.submitted.shape[1]
        self.tokens = torch.randn(shape.hidden, batch_size * num_nodes, **options)
        self.logits = torch.randn(batch_size, num_nodes, shape.vocab_size, **options)
        self.prompts = self.steps = 0

    def bare(self, count: int) -> float:
        """Seconds of some rounds."""
        start = time.perf_counter()
        for _ in range(count):
            self._decode()
        return time.perf_counter() - start

    def recorded(self, count: int, recorder: TraceRecorder) -> tuple[float, float]:
        """Seconds of some rounds that are recorded, and those of them inside `on_round`."""
        inside, start = 0.0, time.perf_counter()
        for _ in range(count):
            self._decode()
            record = self._next()
            before = time.perf_counter()
            recorder.on_round(record)
            inside += time.perf_counter() - before
            if self.steps % PROMPT_ROUNDS == 0:
                self._finish(recorder)
        return time.perf_counter() - start, inside

    def _decode(self) -> None:
        product = self.tokens
        for layer in self.weights:
            product = layer @ self.tokens
        product[0, :8].to("cpu")

    def _next(self) -> RoundRecord:
        logits, step = self.logits.clone(), self.steps % PROMPT_ROUNDS
        self.steps += 1
        return replace(
            self.record,
            requests=[self._request(row) for row in range(len(logits))],
            round_idx=torch.full_like(self.record.round_idx, step),
            target_logits=logits,
            target_logp_source=logits,
        )

    def _request(self, row: int) -> Request:
        name = f"{self.prompts}-{row}"
        return replace(self.record.requests[0], prompt_id=name, request_id=f"{name}/0")

    def _finish(self, recorder: TraceRecorder) -> None:
        for row in range(len(self.logits)):
            recorder.finish_prompt(f"{self.prompts}-{row}")
        self.prompts += 1


def repeated(value: Any, count: int, device: torch.device) -> Any:
    """A record of one row with every tensor `count` times along the batch, on a device."""
    if isinstance(value, Tensor):
        return value.to(device).repeat_interleave(count, 0)
    if is_dataclass(value) and not isinstance(value, type):
        inner = {field.name: getattr(value, field.name) for field in fields(value)}
        kept = ("target_logits", "target_logp_source")  # replaced, and large
        return replace(
            value,
            **{
                name: repeated(one, count, device)
                for name, one in inner.items()
                if name not in kept and (isinstance(one, Tensor) or name in ("pool", "tree"))
            },
        )
    return value


def captured_round(pair: Pair, request: Request) -> RoundRecord:
    """The first round of a request under `POLICY`."""
    seen: list[RoundRecord] = []

    class First:
        def on_round(self, record: RoundRecord) -> None:
            seen.append(record)

    policy = resolve_policy(POLICY, pair.fingerprint).policy
    room = len(request.prompt_ids) + request.max_new_tokens
    list(Decoder(pair, policy, observer=First()).loop_for(room).run([request]))
    return seen[0]


HAS_PARQUET = find_spec("pyarrow") is not None
"""Where it is missing, rows are brought to the host and dropped there."""


class Discard(TraceWriter):
    """A writer that writes nothing."""

    def commit(self, prompt_ids: Iterable[str], tables: Mapping[str, Any]) -> Segment:
        self.finished.update(prompt_ids)
        record = SegmentRecord(
            header_digest="sha256:" + "0" * 64, policy={}, nodes=None, prompt_ids=[]
        )
        return Segment("", record, 0, 0)


@contextmanager
def recording(pair: Pair, policy: Policy, config: RecorderConfig) -> Iterator[TraceRecorder]:
    """A recorder into a folder that is thrown away."""
    header = header_of(pair, policy, DecodeSettings(64))
    kind = TraceWriter if HAS_PARQUET else Discard
    if not HAS_PARQUET:
        trace_recorder.to_tables = lambda frame: {}  # type: ignore[assignment]
    with (
        tempfile.TemporaryDirectory() as folder,
        kind.open(Path(folder) / "traces", header) as writer,
        TraceRecorder(writer, config) as recorder,
    ):
        yield recorder


def measured(
    pair: Pair, request: Request, batch_size: int, device: torch.device, when_full: str
) -> list[dict[str, Any]]:
    """Bare and recorded rounds in turns; commits come often, so that each turn has some."""
    blocks, count = (6, 100) if device.type == "cuda" else (2, 20)
    rounds = Rounds(captured_round(pair, request), batch_size, device)
    seconds = {"bare": 0.0, "recorded": 0.0}
    inside = 0.0
    config = RecorderConfig(flush_s=0.2, when_full=when_full)  # type: ignore[arg-type]
    policy = resolve_policy(POLICY, pair.fingerprint).policy
    with recording(pair, policy, config) as recorder:
        rounds.bare(5)
        rounds.recorded(5, recorder)
        for block in range(blocks):
            for name in sorted(seconds, reverse=bool(block % 2)):
                if name == "bare":
                    seconds[name] += rounds.bare(count)
                    continue
                spent, within = rounds.recorded(count, recorder)
                seconds[name] += spent
                inside += within
    shape, number = Shape.on(device), blocks * count
    where = f"{shape.layers}x{shape.rows}x{shape.hidden} weights, vocabulary {shape.vocab_size}"
    return [
        line(
            f"{where}, batch {batch_size}, {name}",
            spent,
            number,
            seconds["bare"],
            inside if name == "recorded" else 0.0,
            recorder.losses.num_prompts if name == "recorded" else 0,
        )
        for name, spent in seconds.items()
    ]


def line(
    system: str, seconds: float, rounds: int, bare_s: float, inside_s: float, dropped: int
) -> dict[str, Any]:
    """One row of the table; `on_round` is what the decoding thread itself spends on recording."""
    return {
        "system": system,
        "seconds": seconds,
        "rounds": rounds,
        "us_per_round": 1e6 * seconds / rounds,
        "cost_percent": 100 * (seconds / bare_s - 1),
        "on_round_us": 1e6 * inside_s / rounds,
        "on_round_percent": 100 * inside_s / bare_s,
        "dropped_prompts": dropped,
    }
