"""Results of other verbs for a report: reads their files and relates them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from specctl.artifacts import PairFingerprint
from specctl.contents import utf8_of
from specctl.engines.engine import EngineSettings
from specctl.errors import InputError, UsageError
from specctl.replay.cost.files import AnyCost
from specctl.replay.facts import ResultRecord, TraceFacts, read_result
from specctl.replay.ladder.result import LadderResult
from specctl.replay.results import ReplayScores
from specctl.replay.tune.verdict import TuneResult
from specctl.runtime.words import part_of
from specctl.stats import Interval
from specctl.watch.drift import DriftScores


class RunPaired(ResultRecord):
    """A policy beside plain decoding or the first one; see `runtime.compare.Paired`."""

    speedup: Interval
    num_turns: int
    p_value: float
    verdict: str


class RunPolicy(ResultRecord):
    """One measured policy of `results.json`; figures that the page shows."""

    model_config = ConfigDict(extra="ignore")

    policy: str
    num_prompts_fitted_on: int
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
    num_prompts_given: int
    num_prompts_left_out: int
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

    @property
    def has_plain(self) -> bool:
        """Whether `paired` is beside plain decoding, the only policy that always equals it."""
        return any(one.paired is None and one.equal_to_ar for one in self.policies)


@dataclass(frozen=True)
class Given:
    """Results given beside traces, or None."""

    replay: ReplayScores | None = None
    ladder: LadderResult | None = None
    tune: TuneResult | None = None
    run: RunScores | None = None
    drift: DriftScores | None = None
    cost: AnyCost | None = None
    artifact: str | None = None  # digest of the tuned policy, its name in `run`
    engines: Sequence[EngineSettings] = ()  # for the recommended setting

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
    def comparable_ladder(self) -> LadderResult | None:
        """The ladder, if it has the tuning's traces, times, load and prompts, so that figures
        compare."""
        one, tune = self.ladder, self.tune
        if one is None or tune is None:
            return one
        alike = ("traces_digest", "cost_model", "prompts_digest")
        load = (tune.load.batch_size, tune.load.arrival_rate_per_s)
        same = load == (one.batch_size, None)
        return one if same and all(getattr(one, n) == getattr(tune, n) for n in alike) else None


KINDS: dict[str, type[ResultRecord]] = {
    "replay": ReplayScores,
    "ladder": LadderResult,
    "tune": TuneResult,
    "run": RunScores,
    "drift": DriftScores,
}
"""Results by the verb that writes them."""


def read_given(cost: AnyCost | None = None, **paths: Path | None) -> Given:
    """Reads results from files.

    Args:
        paths: by verb; of `run` its `results.json`, with `run.json` beside it.

    Raises:
        InputError: a file cannot be read, or is no result of its verb; names the field.
    """
    found: dict[str, Any] = {}
    for verb, path in paths.items():
        if path is not None:
            read = _with_facts if verb == "run" else None
            found[verb] = read_result(path, KINDS[verb], f"specctl {verb}", read)
    return Given(**found, cost=cost)


def _with_facts(path: Path) -> bytes:
    """Both files of `specctl run` as one."""
    hint = "give --run FOLDER/results.json; run.json is read beside it"
    policies = utf8_of(path, InputError, hint)
    if not policies.lstrip().startswith(b"["):
        raise InputError(
            f"{path} is not results.json of `specctl run`",
            hint=hint,
        )
    facts = utf8_of(path.with_name("run.json"), InputError, hint)
    return b'{"policies": ' + policies + b', "facts": ' + facts + b"}"


def settings_for(given: Given, tune: Path | None) -> Given:
    """Adds engine settings for the recommended setting: of the tuned engine, else of all.

    Args:
        tune: file of the tuning in `given`.
    """
    from specctl.engines.export import ENGINES, read_source, settings_of

    setting, facts = given.setting, given.tune or given.ladder
    if setting is None or facts is None:
        return given
    source = None
    if tune is not None or part_of(setting) is not None:
        with suppress(UsageError):  # an artifact's label is no policy in words
            source = read_source(setting if tune is None else str(tune))
    if source is None:
        words = f"specctl export ARTIFACT --to ENGINE prints what to set for {setting}."
        return replace(given, engines=[EngineSettings("", notes=(words,))])
    only = given.tune.for_engine if given.tune is not None else None
    chosen = ENGINES.values() if only is None else [ENGINES[only]]
    engines = [settings_of(source, engine, facts.target, facts.drafter) for engine in chosen]
    return replace(given, engines=engines, artifact=source.named.artifact_digest)
