"""`fit adasd`, the acceptance: the largest clip of its threshold that a quality contract certifies.

The online threshold follows the request, blind to whether what it admits is right. The clip bounds
it. Runs of the fitted stop under each clip, on prompts with checkable answers, are paired with runs
of the same stop under strict acceptance; fixed-sequence testing goes from the smallest clip up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from specctl.artifacts import PairFingerprint
from specctl.artifacts.manifest import REPORT_JSON
from specctl.errors import EvidenceError, TraceMismatchError
from specctl.policy.acceptances import JensenShannon
from specctl.policy.base import Probability, require
from specctl.policy.parse import canonical_json
from specctl.policy.records import EntropyStop, Policy, Record
from specctl.runtime.load import Pair
from specctl.runtime.output import write_whole
from specctl.train.adasd import Signal
from specctl.train.mars import fastest
from specctl.train.mars_report import setup_of
from specctl.train.paired import (
    Answers,
    Comparison,
    Plan,
    compare_answers,
    losses_of,
    run_prompts,
    strict_twin,
)
from specctl.train.quality import Certificate, Contract, Trial, certify
from specctl.train.runs import RunFolder

CLIPS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


class ClipConfig(Record):
    """What is swept, and what is promised.

    Attributes:
        clips: of the acceptance's threshold, square root of bits, smallest first.
        variant, min_samples, half_life, deny_token_ids: as in `JensenShannon`.
    """

    clips: Annotated[tuple[Probability, ...], Field(min_length=1)] = CLIPS
    variant: Literal["base", "A", "B", "C"] = "base"
    min_samples: Annotated[int, Field(ge=0)] = 8
    half_life: Annotated[float, Field(gt=0)] | None = None
    deny_token_ids: tuple[int, ...] = ()
    contract: Contract = Contract()

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        rising = all(low < high for low, high in pairwise((0.0, *self.clips)))
        require(rising, "clips rise from above 0, each once")
        return self


class ClipRow(Record):
    """One clip: what it brings, what it changes, whether it is certified."""

    clip: float
    comparison: Comparison
    trial: Trial


class ClipReport(Record):
    """A judged sweep.

    Attributes:
        chosen: index of the clip in the artifact; None where the contract refused all.
    """

    config: ClipConfig
    setup: dict[str, Any]
    num_prompts: int
    num_checked: int
    strict_accuracy: float | None
    rows: tuple[ClipRow, ...]
    chosen: int | None


@dataclass(frozen=True)
class ClipSweep:
    """Answers under the strict acceptance and under every clip."""

    shape: EntropyStop
    distance: Signal
    config: ClipConfig
    strict: Answers
    relaxed: tuple[Answers, ...]

    def policy(self, index: int) -> Policy:
        """The whole AdaSD of one clip."""
        clip = self.config.clips[index]
        return clipped(self.shape, self.distance, self.config, clip)


def clipped(shape: EntropyStop, distance: Signal, config: ClipConfig, clip: float) -> Policy:
    """The stop with the acceptance of one clip, as warm as the stop itself."""
    warm = bool(shape.prior_weight)
    acceptance = JensenShannon(
        max_threshold=clip,
        variant=config.variant,
        min_samples=config.min_samples,
        half_life=config.half_life,
        deny_token_ids=config.deny_token_ids,
        prior_accepted=distance.accepted_mean if warm else None,
        prior_rejected=distance.rejected_mean if warm else None,
        prior_weight=shape.prior_weight,
    )
    return Policy(shape=shape, acceptance=acceptance)


def sweep_clips(
    pair: Pair,
    shape: EntropyStop,
    distance: Signal,
    plan: Plan,
    config: ClipConfig,
    folder: RunFolder,
    *,
    on_answer: Callable[[], Any] | None = None,
) -> ClipSweep:
    """Runs the strict twin and every clip over the prompts; what is in the folder is kept."""
    strict = run_prompts(pair, strict_twin(Policy(shape=shape)), plan, folder, on_answer=on_answer)
    policies = [clipped(shape, distance, config, clip) for clip in config.clips]
    relaxed = [run_prompts(pair, policy, plan, folder, on_answer=on_answer) for policy in policies]
    return ClipSweep(shape, distance, config, strict, tuple(relaxed))


def check_runs(plan: Plan, running: PairFingerprint, traced: PairFingerprint) -> None:
    """Refuses runs that could certify nothing, before the first of them.

    Raises:
        TraceMismatchError: another pair than that of the traces.
        EvidenceError: no prompt has an answer that can be checked.
    """
    if not any(prompt.answer for prompt in plan.prompts):
        raise EvidenceError(
            "--prompts",
            expected="prompts with checkable answers",
            found="none",
            fix="give prompts with an `answer`, such as the embedded ones or GSM8K",
        )
    names = ("target_digest", "drafter_digest", "tokenizer_digest")
    if any(getattr(traced, name) != getattr(running, name) for name in names):
        raise TraceMismatchError(
            "--target and --drafter",
            expected=f"the traces' pair, {traced.target} with {traced.drafter}",
            found=f"{running.target} with {running.drafter}",
            fix="name that pair, or collect traces of this one",
        )


def judge_clips(found: ClipSweep) -> Certificate:
    """The contract over the clips, smallest first."""
    contract = found.config.contract
    return certify([losses_of(found.strict, a, contract.kind) for a in found.relaxed], contract)


def keep_clips(report: ClipReport, folder: Path) -> None:
    """Leaves the figures beside the answers, whatever the contract decides."""
    content = canonical_json(report.model_dump(mode="json")).encode()
    write_whole(folder / REPORT_JSON, content, "report")


def clip_report(found: ClipSweep, pair: Pair, plan: Plan) -> ClipReport:
    """Figures of a finished sweep."""
    certificate = judge_clips(found)
    rows = tuple(
        ClipRow(clip=clip, comparison=compare_answers(found.strict, answers), trial=trial)
        for clip, answers, trial in zip(
            found.config.clips, found.relaxed, certificate.trials, strict=True
        )
    )
    plain = compare_answers(found.strict, found.strict)
    return ClipReport(
        config=found.config,
        setup=setup_of(pair, plan),
        num_prompts=plain.num_prompts,
        num_checked=plain.num_checked,
        strict_accuracy=plain.accuracy,
        rows=rows,
        chosen=fastest(certificate, [row.comparison.tokens_per_call.value for row in rows]),
    )
