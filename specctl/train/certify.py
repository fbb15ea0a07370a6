"""The quality contract: how much a lossy setting may lose, decided on finitely many prompts.

    prompts ─sweep─► answers, strict and at every setting ─judge─► the fastest setting that keeps
                                                                   the contract ─► artifact

Settings are tested in a fixed order, from the strictest on, each at the full level, until one
fails (Learn-then-Test with fixed-sequence testing, arXiv:2110.01052). Whatever the losses do
along the order, the chance that any certified setting loses more than promised is then at most
1 - confidence. Nothing is assumed monotone: quality need not fall with the threshold.

The unit is the prompt: tokens of one text are dependent, and one relaxed token changes all that
follow. The kind of loss is stated before the data is seen; `stats.p_value_of` has a test for each.

`fit mars` and `fit adasd` are two faces of this: a configuration has the settings, a `Face` the
words. Nothing about a relaxed text can be replayed from a log: it leaves the strict one at its
first relaxed token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from specctl.artifacts import Metric
from specctl.artifacts.manifest import REPORT_JSON
from specctl.errors import EvidenceError, UsageError
from specctl.formatting import Table, number
from specctl.policy import Policy, policy_digest
from specctl.records import Record
from specctl.runtime.load import Pair
from specctl.runtime.output import write_whole
from specctl.stats import Floats, Interval, LossKind, binomial_cdf, p_value_of
from specctl.train.configs import Contract, RelaxedConfig
from specctl.train.paired import (
    Answers,
    Comparison,
    Opening,
    Plan,
    RunFolder,
    answers_digest,
    compare_answers,
    losses_of,
    run_prompts,
    strict_twin,
)
from specctl.train.report import Fit, FitReport

POWER = 0.8


class Trial(Record):
    """One setting's test.

    Attributes:
        num_prompts: n. mean_loss: over them.
        p_value: of "loses more than max_loss"; max_certifiable: the smallest max_loss that these
            losses would certify alone, at this confidence.
        certified: it and all stricter settings passed.
        is_tested: the sequence had not ended before it.
    """

    num_prompts: int
    mean_loss: float
    p_value: float
    max_certifiable: float
    certified: bool
    is_tested: bool


@dataclass(frozen=True)
class Certificate:
    """The outcome of a contract over settings, strictest first.

    Attributes:
        needed: prompts that would certify the first setting with 80 % power at the loss seen;
            None where it passed, or where no number would do.
    """

    contract: Contract
    trials: tuple[Trial, ...]
    needed: int | None

    @property
    def num_certified(self) -> int:
        return sum(trial.certified for trial in self.trials)

    def require_any(self, names: Sequence[str]) -> None:
        """Refuses when not even the strictest setting passed.

        Args:
            names: of the settings, for the message.

        Raises:
            EvidenceError: with the number of prompts it would need.
        """
        if self.num_certified:
            return
        first, contract = self.trials[0], self.contract
        least = zero_loss_prompts(contract.max_loss, contract.confidence)
        fix = "no number of prompts certifies it at the loss seen: raise --max-loss, or test "
        fix += "stricter settings"
        if self.needed is not None:
            fix = f"decide again on about {self.needed} fresh prompts ({POWER:.0%} power at the "
            fix += f"loss seen; {least} at the least, with no loss at all), or raise --max-loss"
        raise EvidenceError(
            f"quality contract of {names[0]}: expected a mean loss of at most "
            f"{contract.max_loss:g} at confidence {contract.confidence:g}, found "
            f"{first.mean_loss:.4g} over {first.num_prompts} prompts, p-value {first.p_value:.3g}",
            hint=fix,
        )


def certify(losses: Sequence[Floats], contract: Contract) -> Certificate:
    """Fixed-sequence testing of settings.

    Args:
        losses: `[n]` per prompt for each setting, strictest first. The order must not depend on
            the losses; dropping settings from the end is always allowed, since it only loses
            certificates.

    Raises:
        UsageError: no setting, no prompt, or a loss outside the kind's range.
    """
    p_values = [p_value_of(found, contract.max_loss, contract.kind) for found in losses]
    num_passed = count_passing(p_values, contract)
    trials = tuple(
        Trial(
            num_prompts=len(found),
            mean_loss=float(found.mean()),
            p_value=p_value,
            max_certifiable=max_certifiable(found, contract.confidence, contract.kind),
            certified=place < num_passed,
            is_tested=place <= num_passed,
        )
        for place, (found, p_value) in enumerate(zip(losses, p_values, strict=True))
    )
    return Certificate(
        contract, trials, None if num_passed else prompts_needed(losses[0], contract)
    )


def count_passing(p_values: Sequence[float], contract: Contract) -> int:
    """The number of settings that pass, from the first on, before one fails."""
    if not p_values:
        raise UsageError(
            "quality contract: expected settings to test, found none", hint="give at least one"
        )
    failing = (place for place, p in enumerate(p_values) if p > contract.level)
    return next(failing, len(p_values))


def max_certifiable(losses: Floats, confidence: float, kind: LossKind) -> float:
    """The smallest `max_loss` whose p-value is at most 1 - confidence; 1 if there is none.

    For binary losses this is the upper Clopper-Pearson bound.
    """
    low, high = max(0.0, float(losses.mean())), 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if p_value_of(losses, middle, kind) <= 1 - confidence:
            high = middle
        else:
            low = middle
    return high


def zero_loss_prompts(max_loss: float, confidence: float) -> int:
    """Fewest prompts that certify a binary contract when none of them loses."""
    return _fewest(lambda size: binomial_cdf(0, size, max_loss) <= 1 - confidence, 1)


def binomial_prompts(
    max_loss: float, true_loss: float, confidence: float, power: float = POWER
) -> int | None:
    """Fewest prompts that certify a binary contract with that power; None if no number does.

    For each count of losses, the fewest prompts that still certify it are the most powerful ones,
    so only those sizes need a look.
    """
    if true_loss >= max_loss:
        return None
    for lost in count():

        def certifies(size: int, lost: int = lost) -> bool:
            return binomial_cdf(lost, size, max_loss) <= 1 - confidence

        size = _fewest(certifies, lost + 1)
        if binomial_cdf(lost, size, true_loss) >= power:
            return size
    raise AssertionError("some number of prompts has the power")


def prompts_needed(losses: Floats, contract: Contract) -> int | None:
    """Prompts that would certify losses like these with 80 % power; None if no number does."""
    if losses.mean() >= contract.max_loss:
        return None
    if contract.kind == "binary":
        return binomial_prompts(contract.max_loss, float(losses.mean()), contract.confidence)

    def has_power(size: int, num: int = 200) -> bool:
        """By resamples of that size from the losses seen."""
        generator = np.random.default_rng(0)
        drawn = (generator.choice(losses, size) for _ in range(num))
        passed = [
            p_value_of(found, contract.max_loss, contract.kind) <= contract.level for found in drawn
        ]
        return sum(passed) / num >= POWER

    return _fewest(has_power, len(losses), precision=50)


def _fewest(holds: Callable[[int], bool], start: int, precision: int | None = None) -> int:
    """The least size that holds, doubling from `start`; to one part in `precision`, or exactly."""
    high = start
    while not holds(high):
        high *= 2
    low = high // 2
    while high - low > max(1, high // precision if precision else 1):
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


# --------------------------------------------------------------------------- sweeps


@dataclass(frozen=True)
class Face:
    """Words of one lossy acceptance.

    Attributes:
        kind: of the fit, such as `mars`. title, what, limits: see `FitReport`.
        setting: the name of what is swept, such as `theta`.
        opening: of a configuration, what lets a laxer setting's answers be copied; None if nothing.
    """

    kind: str
    title: str
    what: str
    setting: str
    limits: tuple[str, ...]
    opening: Callable[[Any, Pair], Opening] | None = None


@dataclass(frozen=True)
class Sweep:
    """Answers of the strict policy and of each setting, strictest first."""

    config: RelaxedConfig
    base: Policy
    strict: Answers
    relaxed: tuple[Answers, ...]

    @property
    def contract(self) -> Contract:
        return self.config.contract

    @property
    def policies(self) -> tuple[Policy, ...]:
        """One a setting."""
        return policies_of(self.config, self.base)

    @cached_property
    def certificate(self) -> Certificate:
        """The contract over the settings."""
        kind = self.contract.kind
        return certify([losses_of(self.strict, one, kind) for one in self.relaxed], self.contract)

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Each setting beside the strict policy."""
        return tuple(compare_answers(self.strict, answers) for answers in self.relaxed)

    @property
    def chosen(self) -> int | None:
        """The certified setting of most tokens per call, the strictest of equal ones.

        All certified settings hold together at the contract's confidence, so any may be picked,
        by any criterion.
        """
        certified = range(self.certificate.num_certified)
        speed = [found.tokens_per_call.value for found in self.comparisons]
        return max(certified, key=lambda index: (speed[index], -index), default=None)

    @property
    def digest(self) -> str:
        """Identity of the texts that were judged, `sha256:<hex>`."""
        policies, answers = (self.base, *self.policies), (self.strict, *self.relaxed)
        return answers_digest(
            {policy_digest(one): found for one, found in zip(policies, answers, strict=True)}
        )


def policies_of(config: RelaxedConfig, base: Policy) -> tuple[Policy, ...]:
    """The policy of every setting, by shape and budget of `base`."""
    return tuple(
        base.model_copy(update={"acceptance": config.acceptance(setting)})
        for setting in config.settings
    )


def sweep(
    face: Face,
    pair: Pair,
    base: Policy,
    plan: Plan,
    config: RelaxedConfig,
    folder: RunFolder,
    *,
    on_answer: Callable[[], Any] | None = None,
) -> Sweep:
    """Runs the strict policy and every setting over the prompts; finished answers are kept.

    Args:
        base: shape and budget; its own acceptance is replaced.
    """
    base = strict_twin(base)
    opening = face.opening(config, pair) if face.opening else None
    answers: list[Answers] = []
    for policy in (base, *policies_of(config, base)):
        known = opening.unchanged(answers[-1], policy) if opening and answers else None
        answers.append(
            run_prompts(
                pair, policy, plan, folder, opening=opening, known=known, on_answer=on_answer
            )
        )
    strict, *relaxed = answers
    return Sweep(config, base, strict, tuple(relaxed))


# --------------------------------------------------------------------------- the fit


class SettingRow(Record):
    """One setting: its figures beside the strict policy's, and whether it is certified.

    Attributes:
        by_category: the same comparison over the prompts of each category.
        num_decoded: answers that were decoded; the others are known to be the stricter ones'.
    """

    setting: float
    comparison: Comparison
    by_category: dict[str, Comparison]
    trial: Trial
    num_decoded: int

    def cells(self) -> list[str]:
        """The setting under `COLUMNS`."""
        seen, trial = self.comparison, self.trial
        return [
            f"{self.setting:g}",
            number(seen.tokens_per_call.value),
            seen.speedup.text(".3f"),
            number(seen.accuracy, ".1%"),
            seen.recovery.text(".1%"),
            f"{seen.lost}/{seen.gained}",
            f"{trial.p_value:.2g}",
            f"{trial.max_certifiable:.3f}",
            number(seen.diverged.value, ".1%"),
            "certified" if trial.certified else "refused" if trial.is_tested else "not tested",
        ]


class SweepReport(Record):
    """`report.json` of a judged sweep.

    Attributes:
        policy: shape and budget under which everything was judged.
        setup: decoding, prompts and machine.
        strict_tokens_per_call: of the same shape with the target's own text.
        rows: one a setting, strictest first.
        chosen: index of the setting in the artifact; None where the contract refused all.
        needed: prompts that the first setting would need; see `Certificate`.
    """

    config: dict[str, Any]
    policy: Policy
    setup: dict[str, Any]
    num_prompts: int
    num_checked: int
    strict_accuracy: float | None
    strict_tokens_per_call: Interval
    rows: tuple[SettingRow, ...]
    chosen: int | None
    needed: int | None

    @classmethod
    def of(cls, found: Sweep, setup: dict[str, Any]) -> SweepReport:
        """The report of a finished sweep."""

        def of(answers: Answers, category: str) -> Answers:
            return {key: answer for key, answer in answers.items() if answer.category == category}

        def row(index: int, setting: float) -> SettingRow:
            strict, answers = found.strict, found.relaxed[index]
            return SettingRow(
                setting=setting,
                comparison=found.comparisons[index],
                by_category={c: compare_answers(of(strict, c), of(answers, c)) for c in categories},
                trial=found.certificate.trials[index],
                num_decoded=sum(not answer.is_copied for answer in answers.values()),
            )

        plain = compare_answers(found.strict, found.strict)
        categories = sorted({answer.category for answer in found.strict.values()} - {""})
        return cls(
            config=found.config.model_dump(mode="json"),
            policy=found.base,
            setup=setup,
            num_prompts=plain.num_prompts,
            num_checked=plain.num_checked,
            strict_accuracy=plain.accuracy,
            strict_tokens_per_call=plain.tokens_per_call,
            rows=tuple(row(*one) for one in enumerate(found.config.settings)),
            chosen=found.chosen,
            needed=found.certificate.needed,
        )

    def table(self, setting: str) -> Table:
        """The settings, below the strict policy."""
        strict = ("strict", number(self.strict_tokens_per_call.value), "1",
                  number(self.strict_accuracy, ".1%"))  # fmt: skip
        rows = [row.cells() for row in self.rows]
        if self.chosen is not None:
            rows[self.chosen][-1] += ", chosen"
        columns = (setting, *COLUMNS)
        first = [*strict, *([""] * (len(columns) - len(strict)))]
        return Table(f"{setting.capitalize()}s", columns, [first, *rows], LEGEND)


COLUMNS = (
    "tokens/call", "× strict", "accuracy", "recovery", "lost/gained", "p-value", "bound", "changed",
    "",
)  # fmt: skip
LEGEND = (
    "tokens/call: emitted by rounds; × strict: over the strict policy's; recovery: accuracy over "
    "the strict policy's; bound: loss that these prompts would certify alone; changed: texts that "
    "differ from the strict ones; 95 % intervals by prompt"
)


def judge(found: Sweep, face: Face, setup: dict[str, Any], folder: RunFolder) -> Fit[SweepReport]:
    """Judges a finished sweep; its report stays in the folder, whatever the contract decides.

    Args:
        setup: of `Plan.setup`.

    Raises:
        EvidenceError: not even the strictest setting keeps the contract.
    """
    report = report_of(found, face, setup)
    write_whole(folder.path / REPORT_JSON, report.json_bytes(), "report")
    found.certificate.require_any([f"{face.setting} {one:g}" for one in found.config.settings])
    assert found.chosen is not None, "a certified setting is chosen"
    judged = sorted({prompt_id for prompt_id, _ in found.strict})
    return Fit(found.policies[found.chosen], report, judged)


def report_of(found: Sweep, face: Face, setup: dict[str, Any]) -> FitReport[SweepReport]:
    """The figures of a sweep as they are shown and published."""
    data, contract, index = SweepReport.of(found, setup), found.contract, found.chosen
    rule = found.config.model_dump(exclude={f"{face.setting}s", "deny_token_ids", "contract"})
    published = {} if index is None else found.relaxed[index]
    return FitReport(
        kind=face.kind,
        title=face.title,
        what=face.what,
        config=data.config,
        data=data,
        splits={"paired": (data.num_prompts, sum(one.calls for one in published.values()))},
        metrics={} if index is None else _metrics(data.rows[index], face.setting),
        summary=(
            f"{data.num_prompts} prompts, {data.num_checked} with checkable answers",
            f"contract: mean {contract.kind} loss at most {contract.max_loss:g} per prompt at "
            f"confidence {contract.confidence:g}, all settings together",
            "acceptance: "
            + ", ".join(f"{name} {value}" for name, value in rule.items())
            + f"; shape {found.base.shape.kind}",
            "; ".join(f"{name}: {value}" for name, value in setup.items()),
        ),
        tables=(data.table(face.setting),),
        limits=face.limits,
        promise="" if index is None else _promise(data.rows[index], face.setting, contract),
    )


def _metrics(row: SettingRow, setting: str) -> dict[str, Metric | Interval | float | None]:
    """The manifest's figures of the published setting."""
    seen, trial, speedup = row.comparison, row.trial, row.comparison.speedup
    return {
        setting: row.setting,
        "tokens_per_call": seen.tokens_per_call,
        "speedup": Metric.of(
            speedup.value, speedup.low, speedup.high, num_prompts=seen.num_prompts
        ),
        "accuracy": seen.accuracy,
        "strict_accuracy": seen.strict_accuracy,
        "num_checked": float(seen.num_checked),
        "recovery": seen.recovery,
        "diverged": seen.diverged,
        "mean_loss": trial.mean_loss,
        "p_value": trial.p_value,
        "max_certifiable": trial.max_certifiable,
    }


def _promise(row: SettingRow, setting: str, contract: Contract) -> str:
    """The sentence of a card that says what is certified."""
    return (
        f"Certified: at {setting} {row.setting:g}, at confidence {contract.confidence:g}, it loses "
        f"at most {contract.max_loss:g} right answers per prompt ({contract.kind} loss) on prompts "
        f"like those it was judged on. Seen: {row.trial.mean_loss:.4g} over "
        f"{row.trial.num_prompts}."
    )
