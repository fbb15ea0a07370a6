"""The ladder of one log at one load: tuned on training prompts, measured on held-out ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specctl.errors import UsageError
from specctl.logs.positions import Ints
from specctl.logs.tree_log import DenseLog
from specctl.policy.records import PerRequest, Policy
from specctl.replay.calibrate import Quality
from specctl.replay.config import ShowProgress, no_progress
from specctl.replay.ladder.clock import LoadClock
from specctl.replay.ladder.config import BOUNDS, LadderConfig
from specctl.replay.ladder.estimates import Estimates
from specctl.replay.ladder.making import Maker, num_settings
from specctl.replay.ladder.material import num_reads, read_material
from specctl.replay.ladder.rungs import Entry, Measure, Rung, Split, measure_rung, split_of
from specctl.stats import Split as PromptSplit
from specctl.stats import split_prompts


@dataclass(frozen=True)
class Ladder:
    """All rungs of one log at one load.

    Attributes:
        rungs: from plain decoding to the ceiling. best_static: label of the faster static rung.
        calibration: quality of the estimates on held-out prompts.
        oracle_features: what R_prob's estimate looked at.
        num_prompts: by side of the split. is_sampled: the texts were, so that R_prob knows the
            target's law at depth 1.
    """

    rungs: tuple[Rung, ...]
    best_static: str
    split: Split
    calibration: dict[str, Quality]
    oracle_features: tuple[str, ...]
    num_prompts: dict[str, int]
    batch_size: int
    is_sampled: bool
    config: LadderConfig = field(default_factory=LadderConfig)

    def rung(self, label: str) -> Rung:
        """One rung by its label."""
        return next(rung for rung in self.rungs if rung.label == label)

    def to_json(self) -> dict[str, Any]:
        return {
            "rungs": [rung.to_json() for rung in self.rungs],
            "best_static": self.best_static,
            "split": self.split.to_json(),
            "calibration": {name: q.to_json() for name, q in self.calibration.items()},
            "oracle_features": list(self.oracle_features),
            "num_prompts": self.num_prompts,
            "batch_size": self.batch_size,
            "is_sampled": self.is_sampled,
            "config": vars(self.config).copy(),
        }


def build_ladder(
    log: DenseLog,
    prompt_ids: Sequence[str],
    clock: LoadClock,
    policies: Sequence[tuple[str, Policy]] = (),
    *,
    is_sampled: bool = False,
    config: LadderConfig | None = None,
    progress: ShowProgress = no_progress,
) -> Ladder:
    """Every rung on the same held-out prompts.

    Args:
        prompt_ids: of the log. policies: labels and policies between the static rungs and the
            bounds; each must be replayable, position by position.

    Raises:
        UsageError: a policy that a log cannot tell. TraceError: see `DenseLog`.
        TraceEmptyError: under two prompts, or nothing to calibrate on.
    """
    config = config or LadderConfig()
    made = make_rungs(
        log,
        prompt_ids,
        clock,
        policies,
        is_sampled=is_sampled,
        config=config,
        progress=progress,
    )
    measure = Measure.of(made.entries, made.prompt, config.seed)
    return Ladder(
        rungs=tuple(measure_rung(e, measure, BOUNDS, made.best_static) for e in made.entries),
        best_static=made.best_static,
        split=split_of(measure, BOUNDS, made.best_static),
        calibration=made.estimates.quality,
        oracle_features=made.estimates.oracle.names,
        num_prompts={"train": len(made.sides.train), "held_out": len(made.sides.held_out)},
        batch_size=clock.batch_size,
        is_sampled=is_sampled,
        config=config,
    )


@dataclass(frozen=True)
class Made:
    """Rungs before they are measured.

    Attributes:
        entries: each tallies the held-out requests, in one order. prompt: `[Q]` their prompts.
    """

    entries: list[Entry]
    best_static: str
    prompt: Ints
    sides: PromptSplit
    estimates: Estimates


def make_rungs(
    log: DenseLog,
    prompt_ids: Sequence[str],
    clock: LoadClock,
    policies: Sequence[tuple[str, Policy]],
    *,
    is_sampled: bool,
    config: LadderConfig,
    progress: ShowProgress = no_progress,
) -> Made:
    """Reads, tunes and adds up; see `build_ladder`."""
    clock.check()
    for label, policy in policies:
        _check_rung(label, policy)
    sides = split_prompts(prompt_ids, held_out_frac=config.held_out_frac, seed=config.seed)
    with progress("positions read", num_reads(log)) as tick:
        material = read_material(log, policies, sides, config, tick, is_sampled=is_sampled)
    with progress("settings tuned", num_settings(log.support, config)) as tick:
        entries, best_static = Maker(material, clock, config, tick).entries()
    prompt = material.positions.prompt[~material.train]
    return Made(entries, best_static, prompt, sides, material.estimates)


def _check_rung(label: str, policy: Policy) -> None:
    if label in BOUNDS.values() or label == "ar":
        raise UsageError(
            f"policy {label}",
            expected="a label that the ladder does not use itself",
            found="ar, which is always there" if label == "ar" else label,
            fix="leave it out",
        )
    if not isinstance(policy.budget, PerRequest):
        raise UsageError(
            f"ladder with {label}",
            expected="policies that decide for one request at a time",
            found=f"budget {policy.budget.kind}, shared by a batch",
            fix="score it with specctl replay --batch-size, which simulates the batch",
        )
