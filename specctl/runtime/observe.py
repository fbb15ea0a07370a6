"""What a round tells an observer. The runtime knows this contract and nothing behind it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from specctl.errors import UsageError

if TYPE_CHECKING:  # who only reads `Sampling`, as headers of traces do, starts without torch
    from torch import Tensor

    from specctl.features import DraftPool
    from specctl.tree import TokenTree


@dataclass(frozen=True)
class Sampling:
    """How the target's tokens are chosen; `temperature` 0 is greedy.

    Attributes:
        temperature: divides the logits. top_k: 0 keeps all. top_p: nucleus mass in (0, 1].
        seed: of this request's own noise; nothing else shares it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, holds, law in (
            ("temperature", 0.0 <= self.temperature < float("inf"), "a number of at least 0"),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all tokens)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "a number above 0, at most 1"),
            ("seed", 0 <= self.seed < 2**64, "a whole number from 0 to 2^64 - 1"),
        ):
            if not holds:
                raise UsageError(
                    f"sampling {name}",
                    expected=law,
                    found=str(getattr(self, name)),
                    fix="change it",
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def for_request(self, seed: int) -> Sampling:
        """The same law with a request's own seed."""
        return replace(self, seed=seed)


@dataclass(frozen=True)
class Request:
    """One text to decode.

    Attributes:
        request_id: unique within a run. prompt_id: shared by the turns of one prompt.
        prompt_ids: token ids, special tokens included, at least one.
        max_new_tokens: tokens to emit at most; decoding stops there exactly.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    prompt_id: str = ""
    category: str = ""
    turn: int = 0
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if not self.prompt_ids or self.max_new_tokens < 1:
            raise UsageError(
                f"request {self.request_id}",
                expected="at least one prompt token and max_new_tokens of at least 1",
                found=f"{len(self.prompt_ids)} and {self.max_new_tokens}",
                fix="correct the request",
            )


@dataclass(frozen=True)
class RoundTimes:
    """Wall time of one round, microseconds, whole batch."""

    draft_us: float
    verify_us: float
    policy_us: float
    other_us: float


@dataclass(frozen=True)
class RoundRecord:
    """One finished round of B active requests.

    Tensors belong to the round and are never written again, so an observer may keep them and
    work on them later in another thread. On CUDA they are ready in the stream that is current on
    the thread that calls `on_round`: work in another stream has to wait for an event of that one.

    Attributes:
        requests: the B requests, row by row.
        round_idx: `[B]` int64, 0-based within each request.
        position: `[B]` int64, output tokens emitted before this round.
        context_tokens: `[B]` int64, text length up to and with the root.
        pool: all drafted candidates, `[B, P]`, root at 0; for `ar` the root alone.
        offered_depth: `[B]` int64, levels drafted for the row.
        top_k: children per expanded node at most; every `pool.sibling_rank` is below it.
        submitted: `[B, N]` int64, pool index of every verified node, root first, -1 padded.
        tree: the verified nodes themselves, `[B, N]`.
        target_logits: `[B, N, V]` raw logits after each verified node.
        target_logp_source: `[B, N, V]` logits after temperature, top-k and top-p, the law that
            was drawn from; the same tensor as `target_logits` when greedy.
        target_ids: `[B, N]` int64, the target's token after each verified node.
        path: `[B, D + 1]` int64, tree indices of root and accepted nodes, -1 padded; what
            verification admitted, before EOS and length cut it.
        num_emitted: `[B]` int64, tokens emitted, bonus included, after EOS and length.
        policy_digest: identity of the deciding policy.
    """

    requests: list[Request]
    round_idx: Tensor
    position: Tensor
    context_tokens: Tensor
    pool: DraftPool
    offered_depth: Tensor
    offered_width: int
    top_k: int
    submitted: Tensor
    tree: TokenTree
    target_logits: Tensor
    target_logp_source: Tensor
    target_ids: Tensor
    path: Tensor
    num_emitted: Tensor
    times: RoundTimes
    policy_digest: str

    @property
    def path_length(self) -> Tensor:
        """`[B]` int64: draft tokens that verification admitted."""
        return (self.path >= 0).sum(1) - 1

    @property
    def num_accepted(self) -> Tensor:
        """`[B]` int64: draft tokens accepted and emitted."""
        return self.path_length.minimum(self.num_emitted)


class Observer(Protocol):
    """Sees every round; must return at once and must not change anything."""

    def on_round(self, record: RoundRecord) -> None:
        """Called after commit, on the decoding thread."""
        ...
