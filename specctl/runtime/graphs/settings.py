"""Which graphs a loop may make, and the sizes they come in."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import Literal

import torch

from specctl.errors import UsageError
from specctl.runtime.graphs.capture import BROKEN, Capture, CudaCapture

TOKEN_STEPS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)
"""Tiers, and multiples of 512 beyond: padding adds half at most, mostly a sixth."""
REMEMBERED = 4
"""Rounds whose need a tier covers: a tree that has to be cut is worth more than some padding."""
WAITING_ROWS = 4
"""Requests up to which the host waits where drafting may stop. A wait costs about as much as a
twentieth of a drafted level of an 8B pair's head, and all requests must stop for it to pay."""


@dataclass(frozen=True)
class GraphSettings:
    """How a loop keeps its rounds on the device.

    Attributes:
        capture: `auto` makes CUDA graphs on a CUDA device, `none` runs the same work without;
            or what else records it.
        limit_bytes: memory that all graphs may hold together.
        stop_waits: whether the host asks, where a policy may stop, if any request goes on.
            `auto` in batches of up to 4; `never` drafts every level, whose nodes are then
            dropped on the device.
        flat_tokens: verifications of up to so many tokens take equal time, as reading the weights
            does; smaller tiers are not made, so that no tree is cut for nothing. An 8B model on
            an H200 is flat up to 100 and more (notes/state-of-the-art.md, 2.5).
    """

    capture: Capture | Literal["auto", "none"] = "auto"
    limit_bytes: int = 4 << 30
    stop_waits: Literal["auto", "always", "never"] = "auto"
    flat_tokens: int = 64

    def __post_init__(self) -> None:
        known = self.stop_waits in ("auto", "always", "never")
        if self.limit_bytes < 0 or self.flat_tokens < 1 or not known:
            raise UsageError(
                "graph settings",
                expected="limit_bytes of at least 0, flat_tokens of at least 1, and stop_waits "
                "auto, always or never",
                found=f"{self.limit_bytes}, {self.flat_tokens} and {self.stop_waits!r}",
                fix="correct them",
            )

    def capture_on(self, device: torch.device) -> Capture | None:
        """What records there; None for nothing."""
        if self.capture == "none":
            return None
        if self.capture == "auto" and (device.type != "cuda" or BROKEN):
            return None
        return CudaCapture(device) if self.capture == "auto" else self.capture

    def waits(self, num_rows: int) -> bool:
        """Whether the host asks in a batch of that size."""
        return self.stop_waits == "always" or (
            self.stop_waits == "auto" and num_rows <= WAITING_ROWS
        )


def bucket_of(num_rows: int, num_slots: int) -> int:
    """Rows of the graph for that many requests: the next power of two, or all slots."""
    return min(1 << (num_rows - 1).bit_length(), num_slots)


def tiers_up_to(most: int, wanted: Iterable[int] = (), least: int = 1) -> tuple[int, ...]:
    """Ascending token tiers; the last is `most`, and the wanted ones are among them."""
    steps = (*TOKEN_STEPS, *range(2048, most, 512), *wanted)
    return tuple(sorted({max(step, least) for step in steps if max(step, least) < most} | {most}))


class TierChoice:
    """The tier of the next round, from what the last ones needed.

    The host does not know yet what this round needs; the device cuts it to the tier (its likeliest
    nodes) if it is more. So a tier covers the largest need of the last rounds, by request: some
    may have joined or left since.
    """

    def __init__(self) -> None:
        self._needs: deque[float] = deque(maxlen=REMEMBERED)

    def choose(self, tiers: tuple[int, ...], num_rows: int, known: int | None = None) -> int:
        """The smallest tier that covers the need, known or expected; the largest at first."""
        expected = ceil(num_rows * max(self._needs)) if self._needs else tiers[-1]
        need = expected if known is None else known
        return tiers[min(bisect_left(tiers, need), len(tiers) - 1)]

    def note(self, num_tokens: int, num_rows: int) -> None:
        """What a round of so many requests would have verified, had nothing been cut."""
        self._needs.append(num_tokens / num_rows)
