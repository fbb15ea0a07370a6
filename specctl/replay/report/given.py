"""Results of other verbs as a report reads them: `replay.json`, `ladder.json`, `tune.json`.

Only what is shown is read; fields beside that are theirs to change. What is read is checked, so a
file of another kind is named and refused, never shown half.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specctl.errors import InputError
from specctl.policy.parse import describe_violation
from specctl.replay.cost.files import load_cost_model
from specctl.replay.cost.model import CostModel
from specctl.stats import Interval


class ReadRecord(BaseModel):
    """Base of what is read: frozen, strict in types."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class Facts(ReadRecord):
    """What results were made from: see `specctl.replay.results.facts_of`."""

    traces_digest: str
    target_digest: str
    drafter_digest: str | None
    target: str
    drafter: str
    cost_model: str | None


class GivenInterval(ReadRecord):
    """An interval; null stands for NaN, which JSON lacks."""

    value: float | None
    low: float | None
    high: float | None

    @property
    def interval(self) -> Interval:
        """With NaN again."""
        return Interval(*(math.nan if v is None else v for v in (self.value, self.low, self.high)))


class Bound(ReadRecord):
    """Least and most that a figure can be."""

    low: float | None
    high: float | None


class Ratios(ReadRecord):
    """See `specctl.replay.score.RATIOS`; times are absent without a cost model."""

    mean_acceptance_length: GivenInterval
    verified_per_token: GivenInterval
    tokens_per_s: GivenInterval | None = None


class PolicyFigures(ReadRecord):
    """See `specctl.replay.score.Figures`."""

    policy: str
    num_prompts: int
    num_tokens: int
    calls: int
    verified_tokens: int
    time_us: float | None
    ratios: Ratios
    expansion_support: float
    censored_share: float
    is_marked: bool
    bounds: dict[str, Bound]
    against: dict[str, GivenInterval]

    @property
    def tau(self) -> Interval:
        """Mean acceptance length, tokens."""
        return self.ratios.mean_acceptance_length.interval

    @property
    def verified_per_token(self) -> Interval:
        """Verified tokens per output token."""
        return self.ratios.verified_per_token.interval

    @property
    def tokens_per_s(self) -> Interval | None:
        """None without a cost model."""
        found = self.ratios.tokens_per_s
        return None if found is None else found.interval


class GivenPolicy(ReadRecord):
    """One replayed policy."""

    policy: str
    pooled: PolicyFigures


class ReplayResults(Facts):
    """`replay.json`."""

    kind: Literal["replay"]
    baseline: str
    policies: tuple[GivenPolicy, ...] = Field(min_length=1)


class GivenRung(ReadRecord):
    """See `specctl.replay.ladder.rungs.Rung`."""

    kind: str
    label: str
    setting: str
    calls: int
    verified_tokens: int
    tokens_per_s: GivenInterval
    mean_acceptance_length: GivenInterval
    against_static: GivenInterval
    gap_closed: GivenInterval | None
    is_estimate: bool
    is_marked: bool


class GivenSplit(ReadRecord):
    """Where the time between the best static rung and the clairvoyant goes, tokens/s."""

    irreducible: GivenInterval
    drafter: GivenInterval
    headroom: GivenInterval


class LadderResults(Facts):
    """`ladder.json`."""

    kind: Literal["ladder"]
    rungs: tuple[GivenRung, ...] = Field(min_length=1)
    best_static: str
    split: GivenSplit
    num_prompts: dict[str, int]
    batch_size: int


class Objective(ReadRecord):
    """What tuning maximised. `meaning`: in words."""

    kind: str
    meaning: str


class Load(ReadRecord):
    """Requests at a time, and per second where they arrive by the clock."""

    batch_size: int
    arrival_rate_per_s: float | None


class HeldOutRate(ReadRecord):
    """On held-out prompts: the objective, tokens/s, and over the baseline's, paired."""

    rate: GivenInterval
    against: GivenInterval


class GivenStanding(ReadRecord):
    """See `specctl.replay.tune.verdict.Standing`."""

    policy: str
    family: str
    held_out: HeldOutRate


class TuneResults(Facts):
    """`tune.json`."""

    kind: Literal["tune"]
    load: Load
    approximations: str
    objective: Objective
    chosen: str
    beats_static: bool
    baseline: str
    winner_on_train: str
    num_settings: int
    num_prompts: dict[str, int]
    policies: tuple[GivenStanding, ...] = Field(min_length=1)


NAMES: dict[type[Facts], str] = {
    ReplayResults: "replay.json",
    LadderResults: "ladder.json",
    TuneResults: "tune.json",
}
ResultsT = TypeVar("ResultsT", bound=Facts)


@dataclass(frozen=True)
class Given:
    """What may stand beside traces; None where it was not given."""

    replay: ReplayResults | None = None
    ladder: LadderResults | None = None
    tune: TuneResults | None = None
    cost_model: CostModel | None = None

    @property
    def results(self) -> tuple[Facts, ...]:
        """Of the verbs whose results were given."""
        return tuple(r for r in (self.replay, self.ladder, self.tune) if r is not None)


def read_results(path: Path, kind: type[ResultsT]) -> ResultsT:
    """A result of another verb.

    Raises:
        InputError: it cannot be read, or lacks what a report shows of it; the field is named.
    """
    name, fix = NAMES[kind], "write it again with this version of specctl"
    try:
        content = path.read_bytes()
        return kind.model_validate_json(content)
    except OSError as error:
        found = os.strerror(error.errno or 0)
    except ValidationError as error:
        found = describe_violation(error)
        if other := _not_of_dense_traces(content):
            found, fix = other, "leave it out: the page shows dense traces, one request at a time"
    raise InputError(
        f"{name} {path}",
        expected=f"what `specctl {name.partition('.')[0]}` writes of dense traces",
        found=found,
        fix=fix,
    )


def _not_of_dense_traces(content: bytes) -> str | None:
    """In words, if this is a whole result that a page has no place for."""
    try:
        value = json.loads(content)
    except ValueError:
        return None
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind in ("replay-serving", "replay-waves"):
        return "a simulated batch"
    return "the replay of an import" if kind == "replay" and "drafters" in value else None


def read_given(
    replay: Path | None, ladder: Path | None, tune: Path | None, cost_model: Path | None
) -> Given:
    """Whatever of these files is named.

    Raises:
        InputError: see `read_results` and `load_cost_model`.
    """
    return Given(
        None if replay is None else read_results(replay, ReplayResults),
        None if ladder is None else read_results(ladder, LadderResults),
        None if tune is None else read_results(tune, TuneResults),
        None if cost_model is None else load_cost_model(cost_model),
    )
