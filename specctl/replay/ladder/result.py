"""What `specctl ladder` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specctl.replay.ladder.build import Ladder


@dataclass(frozen=True)
class LadderResult:
    """A ladder and what it holds for.

    Attributes:
        facts: pair, log, support, sampling, cost model; plain JSON values.
    """

    facts: dict[str, Any]
    ladder: Ladder

    def to_json(self) -> dict[str, Any]:
        return {"kind": "ladder", **self.facts, **self.ladder.to_json()}
