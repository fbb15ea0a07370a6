"""What is known of a sweep of relaxed acceptance: figures, table, JSON, picture."""

from __future__ import annotations

import io
from typing import Any

from specctl.policy.parse import canonical_json
from specctl.policy.records import Policy, Record
from specctl.runtime.hardware import hardware_name
from specctl.runtime.load import Pair
from specctl.stats import Interval
from specctl.train.hazard import Hazard
from specctl.train.mars import MarsConfig, MarsSweep, fastest, judge_sweep
from specctl.train.paired import Answers, Comparison, Plan, compare_answers
from specctl.train.quality import Trial

STRICT, RELAXED, LOST = "#9db4c8", "#1f5a8a", "#b03030"


class ThetaRow(Record):
    """One threshold.

    Attributes:
        by_category: the same comparison over the prompts of each category.
        hazard: what dense traces said of it beforehand, or None.
        num_decoded: answers that were decoded; the others are known to be the stricter ones'.
    """

    theta: float
    comparison: Comparison
    by_category: dict[str, Comparison]
    trial: Trial
    hazard: Hazard | None
    num_decoded: int


class MarsReport(Record):
    """Everything that is known of a sweep; `report.json` is this record.

    Attributes:
        policy: shape and budget under which everything was judged.
        setup: decoding, prompts and machine.
        strict_tokens_per_call: of the same shape with the target's own text.
        rows: one a theta, strictest first.
        chosen: index of the theta in the artifact; None where the contract refused all.
        needed: prompts that the first theta would need; see `quality.Certificate`.
    """

    config: MarsConfig
    policy: Policy
    setup: dict[str, Any]
    num_prompts: int
    num_checked: int
    strict_accuracy: float | None
    strict_tokens_per_call: Interval
    rows: tuple[ThetaRow, ...]
    chosen: int | None
    needed: int | None


def build_report(
    found: MarsSweep, pair: Pair, plan: Plan, hazards: tuple[Hazard, ...] | None = None
) -> MarsReport:
    """Figures of a finished sweep.

    Args:
        hazards: one a theta.
    """
    certificate = judge_sweep(found)
    rows = tuple(
        ThetaRow(
            theta=theta,
            comparison=compare_answers(found.strict, answers),
            by_category=_by_category(found.strict, answers),
            trial=certificate.trials[index],
            hazard=hazards[index] if hazards else None,
            num_decoded=sum(not answer.is_copied for answer in answers.values()),
        )
        for index, (theta, answers) in enumerate(
            zip(found.config.thetas, found.relaxed, strict=True)
        )
    )
    plain = compare_answers(found.strict, found.strict)
    return MarsReport(
        config=found.config,
        policy=found.base,
        setup=setup_of(pair, plan),
        num_prompts=plain.num_prompts,
        num_checked=plain.num_checked,
        strict_accuracy=plain.accuracy,
        strict_tokens_per_call=plain.tokens_per_call,
        rows=rows,
        chosen=fastest(certificate, [row.comparison.tokens_per_call.value for row in rows]),
        needed=certificate.needed,
    )


def setup_of(pair: Pair, plan: Plan) -> dict[str, Any]:
    """What figures must say of themselves: models, machine, decoding."""
    model, sampling = pair.target.model, plan.settings.sampling
    return {
        "pair": f"{pair.target.name} with {pair.drafter_name}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": hardware_name(model.device),
        "max_new_tokens": plan.settings.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "num_seeds": plan.num_seeds,
        "batch_size": plan.batch_size,
    }


def _by_category(strict: Answers, relaxed: Answers) -> dict[str, Comparison]:
    names = sorted({answer.category for answer in strict.values()})
    return {name: compare_answers(_of(strict, name), _of(relaxed, name)) for name in names if name}


def _of(answers: Answers, category: str) -> Answers:
    return {key: answer for key, answer in answers.items() if answer.category == category}


def report_json(report: MarsReport) -> bytes:
    """Canonical JSON."""
    return canonical_json(report.model_dump(mode="json")).encode()


COLUMNS = (
    "theta",
    "tokens/call",
    "× strict",
    "accuracy",
    "recovery",
    "lost/gained",
    "p-value",
    "bound",
    "changed",
    "",
)


def table_rows(report: MarsReport) -> list[tuple[str, ...]]:
    """The strict policy, then the thetas; intervals are 95 %."""
    strict_accuracy = report.strict_accuracy
    strict = (
        "strict",
        f"{report.strict_tokens_per_call.value:.2f}",
        "1",
        "-" if strict_accuracy is None else f"{strict_accuracy:.1%}",
        *([""] * (len(COLUMNS) - 4)),
    )
    return [strict, *(_cells(report, index) for index in range(len(report.rows)))]


def _cells(report: MarsReport, index: int) -> tuple[str, ...]:
    row = report.rows[index]
    seen, trial = row.comparison, row.trial
    mark = "certified" if trial.certified else "refused" if trial.is_tested else "not tested"
    return (
        f"{row.theta:g}",
        f"{seen.tokens_per_call.value:.2f}",
        seen.speedup.text(),
        "-" if seen.accuracy is None else f"{seen.accuracy:.1%}",
        seen.recovery.text(".1%"),
        f"{seen.lost}/{seen.gained}",
        f"{trial.p_value:.2g}",
        f"{trial.max_certifiable:.3f}",
        _changed(row),
        f"{mark}, chosen" if index == report.chosen else mark,
    )


def _changed(row: ThetaRow) -> str:
    """Share of texts that differ, and of the log's texts that would."""
    lived = f"{row.comparison.diverged.value:.1%}"
    return lived if row.hazard is None else f"{lived} (log {row.hazard.diverged.value:.0%})"


def summary(report: MarsReport) -> tuple[str, ...]:
    """What the table cannot say of itself."""
    contract = report.config.contract
    return (
        f"{report.num_prompts} prompts, {report.num_checked} with checkable answers",
        f"contract: mean {contract.kind} loss at most {contract.max_loss:g} per prompt at "
        f"confidence {contract.confidence:g}, all thetas together",
        f"acceptance {report.config.mode}, form {report.config.form}; shape "
        f"{report.policy.shape.kind}",
        "; ".join(f"{name}: {value}" for name, value in report.setup.items()),
    )


def render_report(report: MarsReport) -> Any:
    """The table for a terminal."""
    from rich.table import Table

    table = Table(title="\n".join(summary(report)), title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for cells in table_rows(report):
        table.add_row(*cells)
    return table


def report_png(report: MarsReport) -> bytes:
    """Accuracy and tokens per call against theta; drawn without pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    speed, quality, loss = figure.subplots(3, 1, sharex=True)
    _draw_speed(speed, report)
    _draw_accuracy(quality, report)
    _draw_loss(loss, report)
    places = range(len(report.rows))
    loss.set_xticks(places, [f"{row.theta:g}" for row in report.rows])
    loss.set_xlabel(f"theta ({report.config.form}), strictest on the left")
    figure.suptitle(
        f"Relaxed acceptance ({report.config.mode}): {report.num_prompts} prompts, "
        f"{report.num_checked} checkable",
        fontsize=11,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw_speed(axes: Any, report: MarsReport) -> None:
    found = [row.comparison.speedup for row in report.rows]
    _bars(axes, found, RELAXED)
    axes.axhline(1, color=STRICT, linewidth=2, label="strict")
    axes.set_ylabel("tokens per call, × strict")
    axes.legend(frameon=False)


def _draw_accuracy(axes: Any, report: MarsReport) -> None:
    found = [row.comparison.recovery for row in report.rows]
    _bars(axes, found, RELAXED)
    axes.axhline(1, color=STRICT, linewidth=2, label="strict")
    axes.set_ylabel("accuracy, × strict")
    axes.legend(frameon=False)


def _draw_loss(axes: Any, report: MarsReport) -> None:
    places = range(len(report.rows))
    losses = [row.trial.mean_loss for row in report.rows]
    bounds = [row.trial.max_certifiable for row in report.rows]
    axes.plot(places, losses, "o-", color=RELAXED, label="mean loss per prompt")
    axes.plot(places, bounds, "v--", color=RELAXED, label="upper bound, each alone")
    axes.axhline(report.config.contract.max_loss, color=LOST, label="contract")
    if report.chosen is not None:
        axes.axvline(report.chosen, color=STRICT, linewidth=2, label="chosen")
    axes.set_ylabel("loss per prompt")
    axes.legend(frameon=False)


def _bars(axes: Any, found: list[Interval], colour: str) -> None:
    """Figures with their intervals; what is not defined is left out."""
    known = [(place, e) for place, e in enumerate(found) if e.known]
    for place, e in known:
        axes.plot([place, place], [e.low, e.high], color=colour, linewidth=1.5)
    axes.plot([p for p, _ in known], [e.value for _, e in known], "o", color=colour)
