"""Numbers and what they stand on as texts, one way for the whole page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from typing import Any

from specctl.policy.records import StaticTree
from specctl.replay.report.evidence import Evidence
from specctl.stats import Interval

NOTHING = "–"
BY_PROMPT = "95% intervals resample prompts"
PROBABILITY = (0.0, 1.0)


def number(value: float, spec: str = ".2f") -> str:
    """A dash where there is none."""
    return format(value, spec) if math.isfinite(value) else NOTHING


def span(interval: Interval, spec: str = ".2f") -> str:
    """Value and interval."""
    if not math.isfinite(interval.value):
        return NOTHING
    if not math.isfinite(interval.low):
        return number(interval.value, spec)
    return f"{interval.value:{spec}} [{interval.low:{spec}}, {interval.high:{spec}}]"


def share(interval: Interval) -> str:
    """The same as percentages."""
    if not math.isfinite(interval.value):
        return NOTHING
    if not math.isfinite(interval.low):
        return f"{interval.value:.0%}"
    return f"{interval.value:.0%} [{interval.low:.0%}, {interval.high:.0%}]"


def count(value: int, noun: str) -> str:
    """`1 prompt`, `2,000 prompts`."""
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"


def listed(names: Iterable[str]) -> str:
    """`a, b and c`."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def plain(value: Any) -> Any:
    """Records as dicts, for JSON."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def tree_label(tree: StaticTree) -> str:
    """As it is written on the command line."""
    return f"eagle2:depth={tree.depth}:top_k={tree.top_k}:num_tokens={tree.num_tokens}"


def reference_words(evidence: Evidence) -> str:
    """Which rounds the figures of rounds come from."""
    if evidence.tree is None:
        return f"{count(evidence.num_reference, 'live round')} with a draft"
    return f"{count(evidence.num_reference, 'round')} of {tree_label(evidence.tree)}, replayed"


def rows_words(evidence: Evidence) -> str:
    """n of what counts every row."""
    noun = "position" if evidence.kind == "dense" else "round"
    return f"{count(evidence.num_prompts, 'prompt')}, {count(evidence.num_rows, noun)}"
