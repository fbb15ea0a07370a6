"""Lossy settings tried from the strictest on, under a quality contract: sweep, figures, cards.

Both fits of a lossy acceptance (`mars`, AdaSD's clip) run the strict policy and each setting over
the same prompts, certify by `quality.certify` and publish the fastest certified setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from specctl.artifacts import Metric
from specctl.formatting import Table, number
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
    seen = [row.comparison for row in data.rows]

    def ticked(axes: Any) -> None:
        axes.set_xticks(range(len(names)), names)

    def speed(axes: Any) -> None:
        draw_intervals(axes, [one.speedup for one in seen], "tokens/call, × strict")
        ticked(axes)

    def accuracy(axes: Any) -> None:
        draw_intervals(axes, [one.recovery for one in seen], "accuracy, × strict")
        ticked(axes)

    def loss(axes: Any) -> None:
        losses = [row.trial.mean_loss for row in data.rows]
        bounds = [row.trial.max_certifiable for row in data.rows]
        axes.plot(losses, "o-", color=BLUE, label="mean loss per prompt")
        axes.plot(bounds, "v--", color=BLUE, label="upper bound, each alone")
        axes.axhline(contract.max_loss, color=RED, label="contract")
        if data.chosen is not None:
            axes.axvline(data.chosen, color=PALE, linewidth=2, label="chosen")
        axes.set_ylabel("loss per prompt")
        ticked(axes)

    return speed, accuracy, loss
