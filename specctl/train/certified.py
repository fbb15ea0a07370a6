"""Lossy settings tried from the strictest on, under a quality contract: sweep, figures, cards.

Both fits of a lossy acceptance (`mars`, AdaSD's clip) run the strict policy and each setting over
the same prompts, certify by `quality.certify` and publish the fastest certified setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specctl.artifacts import Metric
from specctl.formatting import number
from specctl.policy import Policy, policy_digest
from specctl.records import Record
from specctl.stats import Interval
from specctl.train.configs import Contract
from specctl.train.paired import Answers, Comparison, compare_answers, losses_of
from specctl.train.quality import Certificate, Trial, certify
from specctl.train.report import BLUE, PALE, RED, Draw, draw_intervals
from specctl.train.run_folder import answers_digest


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


COLUMNS = (
    "tokens/call", "× strict", "accuracy", "recovery", "lost/gained", "p-value", "bound", "changed",
    "",
)  # fmt: skip
LEGEND = (
    "tokens/call: emitted by rounds; × strict: over the strict policy's; recovery: accuracy over "
    "the strict policy's; bound: loss that these prompts would certify alone; changed: texts that "
    "differ from the strict ones; 95 % intervals by prompt"
)


def cells(row: SettingRow, *, is_chosen: bool) -> tuple[str, ...]:
    """`COLUMNS` of a setting."""
    seen, trial = row.comparison, row.trial
    mark = "certified" if trial.certified else "refused" if trial.is_tested else "not tested"
    return (
        number(seen.tokens_per_call.value),
        seen.speedup.text(".3f"),
        number(seen.accuracy, ".1%"),
        seen.recovery.text(".1%"),
        f"{seen.lost}/{seen.gained}",
        f"{trial.p_value:.2g}",
        f"{trial.max_certifiable:.3f}",
        number(seen.diverged.value, ".1%"),
        f"{mark}, chosen" if is_chosen else mark,
    )


def metrics(row: SettingRow, num_checked: int) -> dict[str, Metric | Interval | float | None]:
    """The manifest's figures of the published setting."""
    seen, trial = row.comparison, row.trial
    return {
        "accuracy": seen.accuracy,
        "strict_accuracy": seen.strict_accuracy,
        "num_checked": float(num_checked),
        "mean_loss": trial.mean_loss,
        "p_value": trial.p_value,
        "max_certifiable": trial.max_certifiable,
        "speedup": Metric.of(
            seen.speedup.value, seen.speedup.low, seen.speedup.high, num_prompts=seen.num_prompts
        ),
    }


def promise(row: SettingRow, contract: Contract, setting: str) -> str:
    """The sentence of a card that says what is certified."""
    return (
        f"Certified: {setting}, at confidence {contract.confidence:g}, it loses at most "
        f"{contract.max_loss:g} right answers per prompt ({contract.kind} loss) on prompts like "
        f"those it was judged on. Seen: {row.trial.mean_loss:.4g} over {row.trial.num_prompts}."
    )


def contract_lines(contract: Contract, num_prompts: int, num_checked: int) -> tuple[str, ...]:
    """Lines of the summary: the prompts and the promise."""
    return (
        f"{num_prompts} prompts, {num_checked} with checkable answers",
        f"contract: mean {contract.kind} loss at most {contract.max_loss:g} per prompt at "
        f"confidence {contract.confidence:g}, all settings together",
    )


def setup_line(setup: dict[str, Any]) -> str:
    """Models, machine and decoding in one line."""
    return "; ".join(f"{name}: {value}" for name, value in setup.items())


def draw_settings(
    rows: Sequence[SettingRow], names: Sequence[str], contract: Contract, chosen: int | None
) -> tuple[Draw, ...]:
    """Speed, accuracy and loss against the setting, the strictest on the left."""

    def ticked(axes: Any) -> None:
        axes.set_xticks(range(len(names)), names)

    def speed(axes: Any) -> None:
        draw_intervals(axes, [row.comparison.speedup for row in rows], "tokens/call, × strict")
        ticked(axes)

    def accuracy(axes: Any) -> None:
        draw_intervals(axes, [row.comparison.recovery for row in rows], "accuracy, × strict")
        ticked(axes)

    def loss(axes: Any) -> None:
        losses = [row.trial.mean_loss for row in rows]
        bounds = [row.trial.max_certifiable for row in rows]
        axes.plot(losses, "o-", color=BLUE, label="mean loss per prompt")
        axes.plot(bounds, "v--", color=BLUE, label="upper bound, each alone")
        axes.axhline(contract.max_loss, color=RED, label="contract")
        if chosen is not None:
            axes.axvline(chosen, color=PALE, linewidth=2, label="chosen")
        axes.set_ylabel("loss per prompt")
        ticked(axes)

    return speed, accuracy, loss
