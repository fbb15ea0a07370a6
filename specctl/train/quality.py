"""The quality contract: how much a lossy setting may lose, decided on finitely many prompts.

Settings are tested in a fixed order, from the strictest on, each at the full level, until one
fails (Learn-then-Test with fixed-sequence testing, arXiv:2110.01052). Whatever the losses do
along the order, the chance that any certified setting loses more than promised is then at most
1 - confidence. Nothing is assumed monotone: quality need not fall with the threshold.

The unit is the prompt: tokens of one text are dependent, and one relaxed token changes all that
follow. The kind of loss is stated before the data is seen; `stats.p_value_of` has a test for each.

Both fits of a lossy acceptance (`mars`, AdaSD's clip) run the strict policy and each setting over
the same prompts (`Sweep`), certify, and publish the fastest certified setting (`SweepReport`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, Self

import numpy as np

from specctl.artifacts import Metric
from specctl.errors import EvidenceError, UsageError
from specctl.formatting import Table, number
from specctl.policy import Policy, policy_digest
from specctl.records import Record
from specctl.stats import Floats, Interval, LossKind, binomial_cdf, p_value_of
from specctl.train.configs import Contract
from specctl.train.paired import Answers, Comparison, answers_digest, compare_answers, losses_of
from specctl.train.report import BLUE, PALE, RED, Draw

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
            f"quality contract of {names[0]}",
            expected=f"a mean loss of at most {contract.max_loss:g} at confidence "
            f"{contract.confidence:g}",
            found=f"{first.mean_loss:.4g} over {first.num_prompts} prompts, p-value "
            f"{first.p_value:.3g}",
            fix=fix,
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
            "quality contract", expected="settings to test", found="none", fix="give at least one"
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
class Sweep:
    """Answers of the strict policy and of each setting, strictest first."""

    base: Policy
    policies: tuple[Policy, ...]
    strict: Answers
    relaxed: tuple[Answers, ...]
    contract: Contract

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


class SettingRow(Record):
    """One setting: its figures beside the strict policy's, and whether it is certified."""

    comparison: Comparison
    trial: Trial

    def cells(self) -> tuple[str, ...]:
        """The setting under `COLUMNS`."""
        seen, trial = self.comparison, self.trial
        return (
            number(seen.tokens_per_call.value),
            seen.speedup.text(".3f"),
            number(seen.accuracy, ".1%"),
            seen.recovery.text(".1%"),
            f"{seen.lost}/{seen.gained}",
            f"{trial.p_value:.2g}",
            f"{trial.max_certifiable:.3f}",
            number(seen.diverged.value, ".1%"),
            "certified" if trial.certified else "refused" if trial.is_tested else "not tested",
        )


class SweepReport(Record):
    """A judged sweep.

    Attributes:
        setup: decoding, prompts and machine.
        rows: one a setting, strictest first.
        chosen: index of the setting in the artifact; None where the contract refused all.
    """

    setup: dict[str, Any]
    num_prompts: int
    num_checked: int
    strict_accuracy: float | None
    rows: tuple[Any, ...]
    chosen: int | None

    @classmethod
    def of(cls, found: Sweep, setup: dict[str, Any], **fields: Any) -> Self:
        """The report of a finished sweep; `fields` are the subclass's own and its rows."""
        plain = compare_answers(found.strict, found.strict)
        return cls(
            setup=setup,
            num_prompts=plain.num_prompts,
            num_checked=plain.num_checked,
            strict_accuracy=plain.accuracy,
            chosen=found.chosen,
            **fields,
        )

    @property
    def published(self) -> Any:
        """The row of the chosen setting, or None."""
        return None if self.chosen is None else self.rows[self.chosen]

    @property
    def setup_line(self) -> str:
        """Models, machine and decoding in one line."""
        return "; ".join(f"{name}: {value}" for name, value in self.setup.items())

    def contract_lines(self, contract: Contract) -> tuple[str, ...]:
        """Lines of the summary: the prompts and the promise."""
        return (
            f"{self.num_prompts} prompts, {self.num_checked} with checkable answers",
            f"contract: mean {contract.kind} loss at most {contract.max_loss:g} per prompt at "
            f"confidence {contract.confidence:g}, all settings together",
        )

    def table(self, title: str, field: str, *first: Sequence[str]) -> Table:
        """The settings, named by a field of the rows, below `first` rows."""
        rows = [[f"{getattr(row, field):g}", *row.cells()] for row in self.rows]
        if self.chosen is not None:
            rows[self.chosen][-1] += ", chosen"
        return Table(title, (field, *COLUMNS), [*first, *rows], LEGEND)

    def metrics(self) -> dict[str, Metric | Interval | float | None]:
        """The manifest's figures of the published setting; empty where there is none."""
        if self.published is None:
            return {}
        seen, trial = self.published.comparison, self.published.trial
        speedup = seen.speedup
        return {
            "accuracy": seen.accuracy,
            "strict_accuracy": seen.strict_accuracy,
            "num_checked": float(self.num_checked),
            "mean_loss": trial.mean_loss,
            "p_value": trial.p_value,
            "max_certifiable": trial.max_certifiable,
            "speedup": Metric.of(
                speedup.value, speedup.low, speedup.high, num_prompts=seen.num_prompts
            ),
        }

    def promise(self, contract: Contract, setting: str) -> str:
        """The sentence of a card that says what is certified; empty where nothing is."""
        if self.published is None:
            return ""
        trial = self.published.trial
        return (
            f"Certified: {setting}, at confidence {contract.confidence:g}, it loses at most "
            f"{contract.max_loss:g} right answers per prompt ({contract.kind} loss) on prompts "
            f"like those it was judged on. Seen: {trial.mean_loss:.4g} over {trial.num_prompts}."
        )


COLUMNS = (
    "tokens/call", "× strict", "accuracy", "recovery", "lost/gained", "p-value", "bound", "changed",
    "",
)  # fmt: skip
LEGEND = (
    "tokens/call: emitted by rounds; × strict: over the strict policy's; recovery: accuracy over "
    "the strict policy's; bound: loss that these prompts would certify alone; changed: texts that "
    "differ from the strict ones; 95 % intervals by prompt"
)


def draw_settings(data: SweepReport, names: Sequence[str], contract: Contract) -> tuple[Draw, ...]:
    """Speed, accuracy and loss against the setting, the strictest on the left."""

    def ratio(axes: Any, name: str, label: str) -> None:
        for place, row in enumerate(data.rows):
            found = getattr(row.comparison, name)
            if found.known:
                axes.plot([place, place], [found.low, found.high], color=BLUE, linewidth=1.5)
                axes.plot([place], [found.value], "o", color=BLUE)
        axes.axhline(1, color=PALE, linewidth=2, label="strict")
        axes.set_ylabel(label)
        axes.set_xticks(range(len(names)), names)

    def loss(axes: Any) -> None:
        losses = [row.trial.mean_loss for row in data.rows]
        bounds = [row.trial.max_certifiable for row in data.rows]
        axes.plot(losses, "o-", color=BLUE, label="mean loss per prompt")
        axes.plot(bounds, "v--", color=BLUE, label="upper bound, each alone")
        axes.axhline(contract.max_loss, color=RED, label="contract")
        if data.chosen is not None:
            axes.axvline(data.chosen, color=PALE, linewidth=2, label="chosen")
        axes.set_ylabel("loss per prompt")
        axes.set_xticks(range(len(names)), names)

    return (
        lambda axes: ratio(axes, "speedup", "tokens/call, × strict"),
        lambda axes: ratio(axes, "recovery", "accuracy, × strict"),
        loss,
    )
