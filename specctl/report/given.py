"""The results of other verbs that a report is given: files read back, and what they agree on."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ConfigDict, Field, ValidationError

from specctl.artifacts import PairFingerprint
from specctl.errors import InputError
from specctl.records import describe_violation
from specctl.replay.cost.files import CostFacts
from specctl.replay.facts import ResultRecord, TraceFacts
from specctl.replay.ladder.result import LadderResult
from specctl.replay.results import ReplayScores
from specctl.replay.tune.verdict import TuneResult
from specctl.report.page import EngineSettings
from specctl.stats import Interval
from specctl.watch.drift import DriftScores

ResultT = TypeVar("ResultT", bound=ResultRecord)


class RunPaired(ResultRecord):
    """A policy beside plain decoding, prompt by prompt; see `runtime.compare.Paired`."""

    speedup: Interval
    num_turns: int
    p_value: float
    verdict: str


class RunPolicy(ResultRecord):
    """One policy of `results.json`, as measured: the figures that a page shows."""

    model_config = ConfigDict(extra="ignore")

    policy: str
    num_tokens: int
    calls: int
    verified_tokens: int
    mean_acceptance_length: float
    tokens_per_s: float
    equal_to_ar: bool | None
    artifact_digest: str | None
    paired: RunPaired | None


class RunFacts(ResultRecord):
    """`run.json`: the conditions of the runs beside it."""

    model_config = ConfigDict(extra="ignore")

    pair: PairFingerprint
    num_prompts: int
    device: str
    dtype: str
    num_threads: int
    batch_size: int
    max_new_tokens: int
    waiting_frac: float | None
    verdict: str


class RunScores(ResultRecord):
    """`results.json` of `specctl run`, with the `run.json` beside it."""

    policies: tuple[RunPolicy, ...] = Field(min_length=1)
    facts: RunFacts


@dataclass(frozen=True)
class Given:
    """Results that may stand beside traces; None for those that are not given.

    Attributes:
        artifact: digest of the policy that was tuned, by which `run` names what it ran.
        engines: what to set in them for the recommended setting.
    """

    replay: ReplayScores | None = None
    ladder: LadderResult | None = None
    tune: TuneResult | None = None
    run: RunScores | None = None
    drift: DriftScores | None = None
    cost: CostFacts | None = None
    artifact: str | None = None
    engines: Sequence[EngineSettings] = ()

    @property
    def results(self) -> dict[str, TraceFacts]:
        """The results of verbs on traces, by the names of their files."""
        named = {"replay.json": self.replay, "ladder.json": self.ladder, "tune.json": self.tune}
        return {name: one for name, one in named.items() if one is not None}

    @property
    def setting(self) -> str | None:
        """The recommended setting: the tuned one, else the ladder's; None without either."""
        if self.tune is not None:
            return self.tune.chosen
        return None if self.ladder is None else self.ladder.to_run.label

    @property
    def ladder_of_load(self) -> LadderResult | None:
        """The ladder, if it is of the traces, the times and the load that were tuned for."""
        one, tune = self.ladder, self.tune
        if one is None or tune is None:
            return one
        load = (tune.load.batch_size, tune.load.arrival_rate_per_s)
        alike = (one.traces_digest, one.cost_model) == (tune.traces_digest, tune.cost_model)
        return one if alike and load == (one.batch_size, None) else None

    @property
    def comparable_ladder(self) -> LadderResult | None:
        """That ladder, if it is of the same prompts: only then do its figures stand beside."""
        one, tune = self.ladder_of_load, self.tune
        is_same = one is None or tune is None or one.prompts_digest == tune.prompts_digest
        return one if is_same else None


def read_given(
    replay: Path | None = None,
    ladder: Path | None = None,
    tune: Path | None = None,
    run: Path | None = None,
    drift: Path | None = None,
    cost: CostFacts | None = None,
) -> Given:
    """The results in the named files.

    Args:
        run: `results.json`, with `run.json` beside it.

    Raises:
        InputError: a file that cannot be read, or is no result of its verb; the field is named.
    """
    return Given(
        _read("replay.json", replay, ReplayScores),
        _read("ladder.json", ladder, LadderResult),
        _read("tune.json", tune, TuneResult),
        _read("results.json", run, RunScores),
        _read("drift.json", drift, DriftScores),
        cost,
    )


def _read(name: str, path: Path | None, kind: type[ResultT]) -> ResultT | None:
    if path is None:
        return None
    fix = "write it again with this version of specctl"
    try:
        content = path.read_bytes()
        if kind is RunScores:
            facts = path.with_name("run.json").read_bytes()
            content = b'{"policies": ' + content + b', "facts": ' + facts + b"}"
        return kind.model_validate_json(content)
    except OSError as error:
        found, fix = os.strerror(error.errno or 0).lower(), "check the path"
    except ValidationError as error:
        found = describe_violation(error)
        if other := _not_of_dense_traces(content):
            found, fix = other, "leave it out: the page shows dense traces, one request at a time"
    expected = f"the output of `specctl {name.partition('.')[0]}` on dense traces"
    if kind is RunScores:
        expected = "the output of `specctl run`, with its run.json beside it"
    if kind is DriftScores:
        expected = "the output of `specctl drift`"
    raise InputError(f"{name} {path}: expected {expected}, found {found}", hint=fix)


def _not_of_dense_traces(content: bytes) -> str | None:
    """In words, if this is a whole result that a page has no place for."""
    try:
        value = json.loads(content)
    except ValueError:
        return None
    kind = value.get("kind") if isinstance(value, dict) else None
    return "a simulated batch" if kind in ("replay-serving", "replay-batch") else None
