"""Requests in flight: what a slot knows, what is left when it is freed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from specctl.errors import PromptTooLongError
from specctl.runtime.metrics import Metrics
from specctl.runtime.observe import Request

OnTokens = Callable[[Request, list[int]], None]


@dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
        token_ids: emitted tokens; the end-of-text token, where it was reached, is the last.
        finish_reason: `eos`, `length` (max_new_tokens) or `context` (the model's positions).
    """

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: str
    metrics: Metrics


@dataclass
class Active:
    """A request in a slot. `limit` is the number of tokens it may emit."""

    request: Request
    limit: int
    output: list[int] = field(default_factory=list)
    metrics: Metrics = field(default_factory=lambda: Metrics(num_requests=1))
    reason: str = ""

    @property
    def text_tokens(self) -> int:
        """Tokens before the root: prompt and all emitted but the last."""
        return len(self.request.prompt_ids) + len(self.output) - 1

    def emit(self, tokens: Sequence[int], eos_ids: Collection[int]) -> list[int]:
        """Appends tokens up to the end of the text or the limit, exactly; those appended."""
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


def new_active(request: Request, max_text_tokens: int) -> Active:
    """A request in a loop for texts of that length."""
    room = max_text_tokens - len(request.prompt_ids)
    return Active(request, min(request.max_new_tokens, room))


def completion(active: Active) -> Completion:
    """What is left of a request when its slot is freed."""
    return Completion(active.request, tuple(active.output), active.reason, active.metrics)


def check_room(request: Request, max_text_tokens: int) -> None:
    """Refuses a prompt that leaves no room for one new token."""
    if len(request.prompt_ids) >= max_text_tokens:
        raise PromptTooLongError(
            f"prompt {request.request_id}",
            expected=f"at most {max_text_tokens - 1} tokens, to leave room for one more",
            found=f"{len(request.prompt_ids)}",
            fix="shorten or drop this prompt",
        )
