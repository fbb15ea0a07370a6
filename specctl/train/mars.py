"""`fit mars`: the threshold of relaxed acceptance (arXiv:2601.15498), under a quality contract.

    prompts ─sweep─► answers, strict and at every theta ─certify─► the fastest theta that keeps
                                                                    the contract ─► artifact

Nothing about a relaxed text can be replayed from a log: it leaves the strict one at its first
relaxed token. *Whether* it leaves is exact. A run notes the closest call that each of its texts had
(`Answer.opening`); a laxer theta that is still above it would have given the same text, so that
answer is copied and only the others are decoded. Dense traces say the same of their texts
beforehand (`Hazard`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specctl.artifacts.manifest import REPORT_JSON, REPORT_PNG
from specctl.errors import UsageError
from specctl.formatting import number
from specctl.logs.fit_data import Openings
from specctl.policy import Policy
from specctl.policy.mars import Mars, bound, mars_acceptance
from specctl.policy.verification import Verification
from specctl.records import Record
from specctl.runtime.load import Pair
from specctl.runtime.output import write_whole
from specctl.runtime.requests import RoundRecord
from specctl.stats import Interval, ratio_of_sums, share
from specctl.train.configs import MarsConfig
from specctl.train.paired import (
    Answers,
    Comparison,
    Opening,
    Plan,
    RunFolder,
    compare_answers,
    run_prompts,
    strict_twin,
)
from specctl.train.quality import COLUMNS, SettingRow, Sweep, SweepReport, draw_settings
from specctl.train.report import Fit, FitReport

# --------------------------------------------------------------------------- hazards


class Hazard(Record):
    """The effect of one threshold on the texts of a log.

    Attributes:
        diverged: share of texts with a relaxed token.
        per_token: first relaxations over tokens at risk, that is, up to them.
        median_place: tokens before the first relaxation, over the texts that have one.
    """

    num_texts: int
    diverged: Interval
    per_token: Interval
    median_place: float | None


def hazards(found: Openings, bounds: Sequence[float]) -> tuple[Hazard, ...]:
    """One hazard a bound of closeness.

    Args:
        bounds: what closeness has to exceed; see `policy.mars.bound`.
    """
    result, num_texts = [], len(found.num_tokens)
    for least in bounds:
        opened = found.closeness > np.float32(least)
        texts, first = np.unique(found.text[opened], return_index=True)
        places = found.place[opened][first]
        events, at_risk = np.zeros(num_texts), found.num_tokens.astype(np.float64)
        events[texts], at_risk[texts] = 1, places + 1
        result.append(
            Hazard(
                num_texts=num_texts,
                diverged=share(len(texts), num_texts),
                per_token=ratio_of_sums(events, at_risk),
                median_place=float(np.median(places)) if len(places) else None,
            )
        )
    return tuple(result)


def screened(
    config: MarsConfig, found: Openings, max_diverging: float
) -> tuple[MarsConfig, tuple[Hazard, ...]]:
    """The thresholds that change few enough of a log's texts, and the hazard of each.

    Cutting the lax end of a fixed sequence keeps the contract's promise, however the cut was
    chosen: it can only take certificates away.

    Raises:
        UsageError: no threshold is left, or a share out of range.
    """
    if not 0 <= max_diverging <= 1:
        raise UsageError(
            "--max-diverging",
            expected="a share, 0 to 1",
            found=f"{max_diverging:g}",
            fix="change it",
        )
    seen = hazards(found, [bound(config.acceptance(theta)) for theta in config.thetas])
    above = (index for index, one in enumerate(seen) if one.diverged.value > max_diverging)
    kept = next(above, len(seen))
    if not kept:
        raise UsageError(
            "--max-diverging",
            expected=f"at least {seen[0].diverged.value:.3f}, the share of texts that theta "
            f"{config.thetas[0]:g} changes",
            found=f"{max_diverging:g}",
            fix="raise it, or give stricter --thetas",
        )
    return config.model_copy(update={"thetas": config.thetas[:kept]}), seen[:kept]


# --------------------------------------------------------------------------- the sweep


def check_mode(mode: str, *, greedy: bool) -> None:
    """Refuses a mode that the sampling gives nothing to do."""
    if mode == "alg1" and not greedy:
        raise UsageError(
            "--mode alg1",
            expected="greedy decoding, which is what the paper's Algorithm 1 states",
            found="a temperature",
            fix="use --mode sound, or leave --temperature out",
        )


def sweep(
    pair: Pair,
    base: Policy,
    plan: Plan,
    config: MarsConfig,
    folder: RunFolder,
    *,
    on_answer: Callable[[], Any] | None = None,
) -> Sweep:
    """Runs the strict policy and every theta over the prompts.

    Args:
        base: shape and budget; its own acceptance is replaced.
    """
    base = strict_twin(base)
    policies = tuple(
        base.model_copy(update={"acceptance": config.acceptance(theta)}) for theta in config.thetas
    )
    opening = opening_of(config, pair)
    strict = before = run_prompts(pair, base, plan, folder, opening=opening, on_answer=on_answer)
    relaxed = []
    for policy, theta in zip(policies, config.thetas, strict=True):
        known = unchanged(before, config.acceptance(theta), opening)
        before = run_prompts(
            pair, policy, plan, folder, opening=opening, known=known, on_answer=on_answer
        )
        relaxed.append(before)
    return Sweep(base, policies, strict, tuple(relaxed), config.contract)


def unchanged(answers: Answers, acceptance: Mars, opening: Opening) -> Answers:
    """Those of a stricter policy's answers that this acceptance would give too."""
    least = bound(acceptance)
    return {
        key: answer
        for key, answer in answers.items()
        if answer.measure == opening.measure and (answer.opening is None or answer.opening <= least)
    }


def opening_of(config: MarsConfig, pair: Pair) -> Opening:
    """Closeness, in the configuration's form, where each request's path ended."""
    eos_ids: Collection[int] = pair.target.eos_ids
    device = pair.target.model.device
    rule = mars_acceptance(config.acceptance(config.thetas[0]), device, eos_ids)

    def of_round(record: RoundRecord) -> Tensor:
        last = (record.path >= 0).sum(1, keepdim=True) - 1
        none = torch.zeros_like(record.position)
        greedy = [request.sampling.greedy for request in record.requests]
        given = Verification(  # nothing here draws, so seeds are left out
            tree=record.tree,
            target_ids=record.target_ids,
            logits=record.target_logits,
            law=record.target_logp_source,
            greedy=torch.tensor(greedy, device=none.device),
            seeds=none,
            positions=record.tree.depth,
            memory=none[:, None].double(),
        )
        return rule.openings(given).gather(1, record.path.gather(1, last))[:, 0]

    denied = ",".join(map(str, sorted({*config.deny_token_ids, *eos_ids})))
    return Opening(f"{config.form}, denied {denied}", of_round)


# --------------------------------------------------------------------------- the fit


class ThetaRow(SettingRow):
    """One threshold.

    Attributes:
        by_category: the same comparison over the prompts of each category.
        hazard: what dense traces said of it beforehand, or None.
        num_decoded: answers that were decoded; the others are known to be the stricter ones'.
    """

    theta: float
    by_category: dict[str, Comparison]
    hazard: Hazard | None
    num_decoded: int


class MarsReport(SweepReport):
    """`report.json` of a fit.

    Attributes:
        policy: shape and budget under which everything was judged.
        strict_tokens_per_call: of the same shape with the target's own text.
        needed: prompts that the first theta would need; see `quality.Certificate`.
    """

    config: MarsConfig
    policy: Policy
    strict_tokens_per_call: Interval
    rows: tuple[ThetaRow, ...]
    needed: int | None


def fit_mars(
    found: Sweep,
    config: MarsConfig,
    setup: dict[str, Any],
    folder: RunFolder,
    hazard: tuple[Hazard, ...] | None = None,
) -> Fit[MarsReport]:
    """Judges a finished sweep; its report stays in the folder, whatever the contract decides.

    Args:
        setup: of `Plan.setup`. hazard: one a theta, where dense traces were given.

    Raises:
        EvidenceError: not even the strictest theta keeps the contract.
    """

    def of(answers: Answers, category: str) -> Answers:
        return {key: answer for key, answer in answers.items() if answer.category == category}

    categories = sorted({answer.category for answer in found.strict.values()} - {""})
    data = MarsReport.of(
        found,
        setup,
        config=config,
        policy=found.base,
        strict_tokens_per_call=compare_answers(found.strict, found.strict).tokens_per_call,
        rows=tuple(
            ThetaRow(
                theta=theta,
                comparison=found.comparisons[index],
                by_category={
                    c: compare_answers(of(found.strict, c), of(answers, c)) for c in categories
                },
                trial=found.certificate.trials[index],
                hazard=hazard[index] if hazard else None,
                num_decoded=sum(not answer.is_copied for answer in answers.values()),
            )
            for index, (theta, answers) in enumerate(zip(config.thetas, found.relaxed, strict=True))
        ),
        needed=found.certificate.needed,
    )
    published = {} if found.chosen is None else found.relaxed[found.chosen]
    report = report_of(data, sum(answer.calls for answer in published.values()))
    write_whole(folder.path / REPORT_JSON, report.json_bytes(), "report")
    write_whole(folder.path / REPORT_PNG, report.png(), "report")
    found.certificate.require_any([f"theta {theta:g}" for theta in config.thetas])
    assert found.chosen is not None, "a certified setting is chosen"
    return Fit(found.policies[found.chosen], report)


def report_of(data: MarsReport, num_calls: int) -> FitReport[MarsReport]:
    """The figures as they are shown and published.

    Args:
        num_calls: of the chosen policy.
    """
    config, contract, published = data.config, data.config.contract, data.published
    strict_speed, accuracy = data.strict_tokens_per_call.value, number(data.strict_accuracy, ".1%")
    strict = ("strict", number(strict_speed), "1", accuracy, *([""] * (len(COLUMNS) - 3)))
    foretold = ", ".join(
        f"{row.theta:g}: {row.hazard.diverged.value:.0%}" for row in data.rows if row.hazard
    )
    found, promise = data.metrics(), ""
    if published is not None:
        seen = published.comparison
        own = ("tokens_per_call", "recovery", "diverged")
        found |= {"theta": published.theta, **{name: getattr(seen, name) for name in own}}
        promise = data.promise(contract, f"at theta {published.theta:g}")
    return FitReport(
        kind="mars",
        title="Relaxed acceptance",
        what="Accepts the target's second choice where the target is nearly indifferent "
        "(MARS, arXiv:2601.15498).",
        config=config.model_dump(mode="json"),
        data=data,
        splits={"paired": (data.num_prompts, num_calls)},
        metrics=found,
        summary=(
            *data.contract_lines(contract),
            f"acceptance {config.mode}, form {config.form}; shape {data.policy.shape.kind}",
            *([f"texts of the traces that each theta changes: {foretold}"] if foretold else []),
            data.setup_line,
        ),
        tables=(data.table("Thresholds", "theta", strict),),
        figures=draw_settings(data, [f"{row.theta:g}" for row in data.rows], contract),
        limits=(
            "The promise is about checkable answers to such prompts, under this shape and this "
            "decoding. The draft decides what can be relaxed: fit again for another shape, pair or "
            "load.",
            "Thresholds on logits do not carry over between models: z2 / z1 moves with the "
            "logits' origin.",
            "Answers that change without an answer key, such as prose, are not judged.",
        ),
        promise=promise,
    )
