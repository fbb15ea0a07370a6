"""`fit mars` and `fit adasd`: settings of a lossy acceptance, judged by a quality contract.

    prompts ─sweep─► answers, strict and at every setting ─judge─► the fastest setting that keeps
                                                                   the contract ─► artifact

Both fits are a configuration with the settings and a `Face` with the words. `contract.py` has the
statistics. A relaxed text differs from the logged one after its first relaxed token, so it cannot
be replayed and is decoded here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from specctl.artifacts import Metric
from specctl.artifacts.manifest import REPORT_JSON
from specctl.durable import write_whole
from specctl.formatting import Detail, Table, count, number
from specctl.policy import Policy, Strict, policy_digest
from specctl.progress import progress
from specctl.records import Record
from specctl.runtime.load import Pair
from specctl.stats import Interval
from specctl.train.configs import Contract, PairedConfig, RelaxedConfig
from specctl.train.contract import Certificate, Trial, certify
from specctl.train.paired import (
    Answers,
    CheckedPrompt,
    Comparison,
    Opening,
    Plan,
    RunFolder,
    compare_answers,
    digest_of,
    losses_of,
    run_prompts,
)
from specctl.train.report import Fit, FitReport

# --------------------------------------------------------------------------- sweeps


@dataclass(frozen=True)
class Face:
    """Words of one lossy acceptance; `title`, `what` and `limits`: see `FitReport`."""

    kind: str  # of the fit, such as `mars`
    title: str
    what: str
    setting: str  # name of the swept parameter, such as `theta`
    limits: tuple[str, ...]
    opening: Callable[[Any, Pair], Opening] | None = None
    """The `Opening` of a configuration, by which answers of stricter settings are copied."""


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
        """One per setting."""
        return policies_of(self.config, self.base)

    @cached_property
    def certificate(self) -> Certificate:
        return certify([losses_of(self.strict, one) for one in self.relaxed], self.contract)

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Each setting against the strict policy."""
        return tuple(compare_answers(self.strict, answers) for answers in self.relaxed)

    @property
    def chosen(self) -> int | None:
        """The certified setting of most tokens per call, the strictest of equal ones.

        The contract's confidence holds for all certified settings together, so any may be picked.
        """
        certified = range(self.certificate.num_certified)
        speed = [found.tokens_per_call.value for found in self.comparisons]
        return max(certified, key=lambda index: (speed[index], -index), default=None)

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of the judged texts."""
        policies, answers = (self.base, *self.policies), (self.strict, *self.relaxed)
        texts = {
            policy_digest(policy): [[key, list(one.token_ids)] for key, one in sorted(of.items())]
            for policy, of in zip(policies, answers, strict=True)
        }
        return digest_of(texts)


def policies_of(config: RelaxedConfig, base: Policy) -> tuple[Policy, ...]:
    """The policy of every setting, with the shape and budget of `base`."""
    return tuple(
        base.model_copy(update={"acceptance": config.acceptance(setting)})
        for setting in config.settings
    )


def sweep(
    face: Face, pair: Pair, base: Policy, plan: Plan, config: RelaxedConfig, folder: RunFolder
) -> Sweep:
    """Runs the strict policy and every setting over the prompts; finished answers are reused.

    Args:
        base: shape and budget; its acceptance is replaced.
    """
    base = base.model_copy(update={"acceptance": Strict()})
    opening = face.opening(config, pair) if face.opening else None
    answers: list[Answers] = []
    with progress("answers", (1 + len(config.settings)) * len(plan.prompts)):
        for policy in (base, *policies_of(config, base)):
            known = opening.unchanged(answers[-1], policy) if opening and answers else None
            answers.append(run_prompts(pair, policy, plan, folder, opening=opening, known=known))
    strict, *relaxed = answers
    return Sweep(config, base, strict, tuple(relaxed))


def fit_relaxed(
    face: Face,
    pair: Pair,
    base: Policy,
    prompts: Sequence[CheckedPrompt],
    config: RelaxedConfig,
    runs: PairedConfig,
    place: Path,
) -> tuple[Fit[SweepReport], str]:
    """Sweeps the settings of a lossy acceptance and picks the fastest certified one.

    Args:
        base: shape and budget.
        place: folder of answers, unless `runs` names one.

    Returns:
        The fit, and the digest of the judged texts.

    Raises:
        EvidenceError: not even the strictest setting keeps the contract.
        OutputError, UsageError, TraceError: see `RunFolder.open`.
    """
    denied = {*config.deny_token_ids, *pair.target.tokenizer.all_special_ids}
    config = config.model_copy(update={"deny_token_ids": tuple(sorted(denied))})
    plan = Plan(prompts, runs.settings, runs.batch_size)
    header = plan.header(pair.fingerprint)
    folder = RunFolder.open(runs.runs or place, header, resume=runs.resume)
    found = sweep(face, pair, base, plan, config, folder)
    return judge(found, face, plan.setup(pair), folder), found.digest


# --------------------------------------------------------------------------- the fit


class SettingRow(Record):
    """Figures of one setting against the strict policy, and its trial."""

    setting: float
    comparison: Comparison
    by_category: dict[str, Comparison]
    trial: Trial
    num_decoded: int  # the other answers are copied from the stricter setting

    def cells(self) -> list[str]:
        """The setting under `COLUMNS`."""
        found, trial = self.comparison, self.trial
        return [
            f"{self.setting:g}",
            number(found.tokens_per_call.value),
            found.speedup.text(".3f"),
            number(found.accuracy, ".1%"),
            found.recovery.text(".1%"),
            f"{found.lost}/{found.gained}",
            f"{trial.p_value:.2g}",
            f"{trial.max_certifiable:.3f}",
            number(found.diverged.value, ".1%"),
            "certified" if trial.certified else "refused" if trial.is_tested else "not tested",
        ]


class SweepReport(Record):
    """`report.json` of a judged sweep."""

    config: dict[str, Any]
    policy: Policy  # the strict policy: shape and budget of all settings
    setup: dict[str, Any]  # decoding, prompts and machine
    num_prompts: int
    num_checked: int
    strict_accuracy: float | None
    strict_tokens_per_call: Interval  # of the same shape with the target's own text
    rows: tuple[SettingRow, ...]  # one per setting, strictest first
    chosen: int | None  # index of the setting in the artifact; None if all were refused
    needed: int | None  # see `Certificate`

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
        """The strict policy and the settings."""
        strict = ("strict", number(self.strict_tokens_per_call.value), "1",
                  number(self.strict_accuracy, ".1%"))  # fmt: skip
        rows = [row.cells() for row in self.rows]
        if self.chosen is not None:
            rows[self.chosen][-1] += ", chosen"
        columns = (setting, *COLUMNS)
        first = [*strict, *([""] * (len(columns) - len(strict)))]
        return Table(f"{setting.capitalize()}s", columns, [first, *rows], LEGEND, wide=WIDE)


COLUMNS = (
    "tokens/call", "× strict", "accuracy", "recovery", "lost/gained", "p-value", "bound", "changed",
    "",
)  # fmt: skip
WIDE = ("tokens/call", "recovery", "lost/gained", "p-value")
LEGEND = (
    "tokens/call: emitted by rounds; × strict: over the strict policy's; recovery: accuracy over "
    "the strict policy's; bound: loss that these prompts would certify alone; changed: texts that "
    "differ from the strict ones; 95 % intervals by prompt"
)


def judge(found: Sweep, face: Face, setup: dict[str, Any], folder: RunFolder) -> Fit[SweepReport]:
    """Judges a finished sweep; writes its report to the folder even if all settings fail."""
    report = report_of(found, face, setup)
    write_whole(folder.path / REPORT_JSON, report.json_bytes(), "report")
    found.certificate.require_any([f"{face.setting} {one:g}" for one in found.config.settings])
    assert found.chosen is not None, "a certified setting is chosen"
    judged = sorted(found.strict)
    return Fit(found.policies[found.chosen], report, judged)


def report_of(found: Sweep, face: Face, setup: dict[str, Any]) -> FitReport[SweepReport]:
    """The report of a sweep."""
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
        verdict=_verdict(data, face.setting, contract),
        summary=(
            f"Loss: right answers per prompt less than the strict policy's, on {data.num_checked} "
            f"of {count(data.num_prompts, 'prompt')} with answers that can be checked.",
            Detail(
                "acceptance: "
                + ", ".join(f"{name} {value}" for name, value in rule.items())
                + f"; shape {found.base.shape.kind}"
            ),
            Detail("; ".join(f"{name}: {value}" for name, value in setup.items())),
        ),
        tables=(data.table(face.setting),),
        limits=face.limits,
        promise="" if index is None else _promise(data.rows[index], face.setting, contract),
    )


def _metrics(row: SettingRow, setting: str) -> dict[str, Metric | Interval | float | None]:
    """The figures of the chosen setting, for the manifest."""
    found, trial, speedup = row.comparison, row.trial, row.comparison.speedup
    return {
        setting: row.setting,
        "tokens_per_call": found.tokens_per_call,
        "speedup": Metric.of(
            speedup.value, speedup.low, speedup.high, num_prompts=found.num_prompts
        ),
        "accuracy": found.accuracy,
        "strict_accuracy": found.strict_accuracy,
        "num_checked": float(found.num_checked),
        "recovery": found.recovery,
        "diverged": found.diverged,
        "mean_loss": trial.mean_loss,
        "p_value": trial.p_value,
        "max_certifiable": trial.max_certifiable,
    }


def _verdict(data: SweepReport, setting: str, contract: Contract) -> str:
    at_most = f"loss at most {contract.max_loss:g} at confidence {contract.confidence:g}"
    if data.chosen is None:
        return f"No {setting} is certified: {at_most}."
    row = data.rows[data.chosen]
    gain = row.comparison.speedup
    speed = f", × {gain.text('.2f')} tokens a call" + ", no gain shown" * (not gain.low > 1)
    return f"Certified: {setting} {row.setting:g}, {at_most}{speed}."


def _promise(row: SettingRow, setting: str, contract: Contract) -> str:
    """The sentence of the card about the certified promise."""
    return (
        f"Certified: at {setting} {row.setting:g}, at confidence {contract.confidence:g}, it loses "
        f"at most {contract.max_loss:g} right answers per prompt on prompts "
        f"like those it was judged on. Observed: {row.trial.mean_loss:.4g} over "
        f"{row.trial.num_prompts}."
    )
