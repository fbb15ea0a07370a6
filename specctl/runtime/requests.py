"""A request from submission to completion: settings, rounds, times and counters.

torch is imported at first use, as headers of traces use `Sampling`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from specctl.errors import PromptTooLongError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specctl.tree import DraftPool, TokenTree

PHASES = ("draft", "verify", "policy", "other")


@dataclass(frozen=True)
class Sampling:
    """Choice of the target's tokens; `temperature` 0 is greedy."""

    temperature: float = 0.0  # divides the logits
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # nucleus mass in (0, 1]
    seed: int = 0  # of the request's own noise

    def __post_init__(self) -> None:
        for name, holds, expected in (
            ("temperature", 0.0 <= self.temperature < float("inf"), "a number of at least 0"),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all tokens)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "a number above 0, at most 1"),
            ("seed", 0 <= self.seed < 2**64, "a whole number from 0 to 2^64 - 1"),
        ):
            if not holds:
                raise UsageError(f"{name} is {getattr(self, name)}, but must be {expected}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def for_request(self, seed: int) -> Sampling:
        """Copies the settings with another seed."""
        return replace(self, seed=seed)


@dataclass(frozen=True)
class Request:
    """One text to decode."""

    request_id: str  # unique within a run
    prompt_ids: tuple[int, ...]  # token ids, special tokens included, at least one
    max_new_tokens: int  # tokens to emit at most
    prompt_id: str = ""  # shared by the turns of one prompt
    category: str = ""  # of its prompt, for figures by category
    turn: int = 0  # of its conversation, from 0
    sampling: Sampling = field(default_factory=Sampling)  # greedy by default

    def __post_init__(self) -> None:
        if not self.prompt_ids or self.max_new_tokens < 1:
            raise UsageError(
                f"request {self.request_id} has {len(self.prompt_ids)} prompt tokens and "
                f"max_new_tokens {self.max_new_tokens}; each must be at least 1"
            )

    def check_room(self, max_text_tokens: int) -> None:
        """Rejects a prompt that leaves no room for a new token."""
        if len(self.prompt_ids) >= max_text_tokens:
            raise PromptTooLongError(
                f"prompt {self.request_id} has {len(self.prompt_ids)} tokens; with room for one "
                f"more at most {max_text_tokens - 1} fit",
                hint="shorten or drop this prompt",
            )


OnTokens = Callable[[Request, list[int]], None]


# --------------------------------------------------------------------------- time and counters


@dataclass(frozen=True)
class RoundTimes:
    """Wall time of one round of the whole batch, by phase."""

    draft_us: float  # the drafter's passes and the growth of the tree
    verify_us: float  # the target's pass
    policy_us: float  # decisions of rules
    other_us: float  # everything else: acceptance, caches, bookkeeping


class Stopwatch:
    """Splits a round into phases: `lap(phase)` ends one.

    On CUDA a lap ends at an event on the stream, so that times are the device's own and only
    reading them waits.

    Args:
        device: the device timed; None times the host.
        now: clock of the host, seconds; None is wall time.
    """

    def __init__(
        self, device: torch.device | None = None, now: Callable[[], float] | None = None
    ) -> None:
        self._now = now or time.perf_counter
        self._on_cuda = device is not None and device.type == "cuda"
        self._phases: list[str] = []
        self._marks: list[Any] = []
        self._mark()

    def lap(self, phase: str) -> None:
        """Books the time since the last lap under `phase`."""
        self._phases.append(phase)
        self._mark()

    def laps(self) -> dict[str, list[float]]:
        """Microseconds of every lap by phase, in order; waits for the last lap."""
        if self._on_cuda:
            self._marks[-1].synchronize()
        found: dict[str, list[float]] = {}
        for phase, (start, end) in zip(self._phases, pairwise(self._marks), strict=True):
            us = 1e3 * start.elapsed_time(end) if self._on_cuda else 1e6 * (end - start)
            found.setdefault(phase, []).append(us)
        return found

    def times(self) -> RoundTimes:
        """Sums by phase; a commit counts as drafting, as the drafter reads in it."""
        sums = {phase: sum(times) for phase, times in self.laps().items()}
        draft_us = sums.get("draft", 0.0) + sums.get("commit", 0.0)
        return RoundTimes(draft_us, *(sums.get(phase, 0.0) for phase in PHASES[1:]))

    def _mark(self) -> None:
        if not self._on_cuda:
            self._marks.append(self._now())
            return
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)


@dataclass
class Metrics:
    """Additive counts and times: pooled metrics are sums over requests."""

    num_requests: int = 0  # requests added up
    num_tokens: int = 0  # tokens emitted, the one of prefill included
    calls: int = 0
    """Verification forwards of the target, a batched one counted once per request, so that the
    number is independent of the batch."""
    verified_tokens: int = 0  # tokens processed in verification, roots included
    num_accepted: int = 0  # draft tokens accepted and emitted
    drafted_levels: int = 0  # levels drafted for the requests
    fallback_calls: int = 0  # calls whose policy failed, decided by a static plan
    draft_us: float = 0.0  # wall time of rounds by phase, shared equally by a batch's requests
    verify_us: float = 0.0  # see `RoundTimes`, as of the next two
    policy_us: float = 0.0  # decisions
    other_us: float = 0.0  # everything else
    prefill_us: float = 0.0  # wall time of reading prompts, target and drafter together
    accepted_lengths: list[int] = field(default_factory=list)  # draft tokens accepted, call by call

    def __repr__(self) -> str:
        length = f"τ {self.mean_acceptance_length:.2f}"
        return f"Metrics({self.num_tokens} tokens, {self.calls} calls, {length})"

    @property
    def mean_acceptance_length(self) -> float:
        """τ = 1 + accepted draft tokens per call, pooled; NaN without a call."""
        return 1 + self.num_accepted / self.calls if self.calls else float("nan")

    @property
    def wall_us(self) -> float:
        """Rounds and prefill, in microseconds."""
        return self.draft_us + self.verify_us + self.policy_us + self.other_us + self.prefill_us

    @property
    def tokens_per_s(self) -> float:
        """Tokens emitted over wall time, prefill included: Σ tokens / Σ time."""
        return 1e6 * self.num_tokens / self.wall_us if self.wall_us else float("nan")

    def add_round(
        self,
        *,
        verified: int,
        accepted: int,
        emitted: int,
        levels: int,
        is_fallback: bool = False,
    ) -> None:
        """Adds one call: draft tokens verified (root included) and accepted, tokens emitted."""
        self.calls += 1
        self.verified_tokens += verified
        self.num_accepted += accepted
        self.num_tokens += emitted
        self.drafted_levels += levels
        self.fallback_calls += is_fallback
        self.accepted_lengths.append(accepted)

    def add_times(self, times: RoundTimes, share: int) -> None:
        """Books a round's time, which `share` requests split."""
        for phase in PHASES:
            key = f"{phase}_us"
            setattr(self, key, getattr(self, key) + getattr(times, key) / share)

    def summary(self) -> dict[str, float | int]:
        """Plain values for JSON, with derived ones."""
        derived = ("wall_us", "mean_acceptance_length", "tokens_per_s")
        names = [f.name for f in fields(self) if f.name != "accepted_lengths"]
        return {name: getattr(self, name) for name in (*names, *derived)}


def pooled(parts: Iterable[Metrics]) -> Metrics:
    total = Metrics()
    for part in parts:
        for item in fields(Metrics):
            setattr(total, item.name, getattr(total, item.name) + getattr(part, item.name))
    return total


# --------------------------------------------------------------------------- in flight


@dataclass(frozen=True)
class Completion:
    """A finished request."""

    request: Request
    token_ids: tuple[int, ...]
    """Emitted tokens, the end-of-text token included."""
    finish_reason: str  # `eos`, `length` (max_new_tokens) or `context` (the model's positions)
    metrics: Metrics  # of this request alone


@dataclass
class Active:
    """A request in a slot."""

    request: Request
    limit: int  # tokens that it may emit
    output: list[int] = field(default_factory=list)
    metrics: Metrics = field(default_factory=lambda: Metrics(num_requests=1))
    reason: str = ""  # of its end; empty while it runs

    @property
    def text_tokens(self) -> int:
        """Tokens before the root: prompt and all emitted but the last."""
        return len(self.request.prompt_ids) + len(self.output) - 1

    def emit(self, tokens: Sequence[int], eos_ids: Collection[int]) -> list[int]:
        """Appends tokens up to the end of the text or the limit, and returns them."""
        kept = list(tokens[: self.limit - len(self.output)])
        for place, token in enumerate(kept):
            if token in eos_ids:
                kept, self.reason = kept[: place + 1], "eos"
                break
        self.output.extend(kept)
        if not self.reason and len(self.output) == self.limit:
            at_request = self.limit == self.request.max_new_tokens
            self.reason = "length" if at_request else "context"
        return kept


# --------------------------------------------------------------------------- observers


@dataclass(frozen=True)
class RoundRecord:
    """One finished round of B active requests.

    Tensors belong to the round and are never overwritten, so an observer may keep them and process
    them in another thread. On CUDA they are ready in the stream that is current when `on_round` is
    called; work in another stream must wait for an event of that stream.
    """

    requests: list[Request]  # of the B rows
    round_idx: Tensor  # `[B]` int64, 0-based within each request
    position: Tensor  # `[B]` int64, output tokens emitted before this round
    context_tokens: Tensor  # `[B]` int64, text length, root included
    pool: DraftPool  # all drafted candidates, `[B, P]`, root at 0; for `ar` the root alone
    offered_depth: Tensor  # `[B]` int64, levels drafted for the row
    offered_width: int  # nodes expanded per level at most
    top_k: int  # children per expanded node at most; every `pool.sibling_rank` is below it
    submitted: Tensor  # `[B, N]` int64, pool index of every verified node, root first, -1 padded
    tree: TokenTree  # the verified nodes, `[B, N]`
    target_logits: Tensor  # `[B, N, V]` raw logits after each verified node
    processed: Tensor
    """`[B, N, V]` logits after temperature, top-k and top-p, from which tokens were drawn;
    `target_logits` itself when greedy."""
    target_ids: Tensor  # `[B, N]` int64, the target's token after each verified node
    path: Tensor
    """`[B, D + 1]` int64, tree indices of root and accepted nodes, -1 padded; not cut at EOS or
    the length."""
    num_emitted: Tensor  # `[B]` int64, tokens emitted, bonus included, after EOS and length
    times: RoundTimes  # wall time of the round
    policy_digest: str  # identity of the deciding policy

    @property
    def path_length(self) -> Tensor:
        """`[B]` int64: draft tokens that verification admitted."""
        return (self.path >= 0).sum(1) - 1

    @property
    def num_accepted(self) -> Tensor:
        """`[B]` int64: draft tokens accepted and emitted."""
        return self.path_length.minimum(self.num_emitted)


class Observer(Protocol):
    """A receiver of rounds; it must return quickly and change nothing."""

    def on_round(self, record: RoundRecord) -> None:
        """Receives a round after its commit, on the decoding thread."""
        ...
