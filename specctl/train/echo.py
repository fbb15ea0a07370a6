"""`fit echo`: levels and thresholds of ECHO's gates (arXiv:2604.09603, section 3.2).

    positions ─area by level─► sweet spots ─Youden's J, or replayed cost─► SparseGates ─► report

confidence of a level    the probability of its likeliest path (Eq. 6)
label of a level         the accepted length reaches it
sweet spot               the area under the ROC curve is above δ

Readings of the paper: docs/echo.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue
from torch import Tensor

from specctl.errors import TraceEmptyError, UsageError
from specctl.formatting import Table, count
from specctl.logs.logged_draft import LoggedDraft
from specctl.logs.parquet import collected
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, sampled
from specctl.policy import ElasticBudget, Policy, SparseGates, build_shape
from specctl.policy.echo import stop_levels
from specctl.progress import progress
from specctl.records import Record
from specctl.replay.cost.files import AnyCost
from specctl.replay.metrics import LoadClock, Measure, Sums, by_prompt, request_sums
from specctl.replay.rounds import Clock, replay
from specctl.runtime.twins import Port
from specctl.stats import UNKNOWN, Floats, Interval, Resamples, auc, split_prompts, sums_by
from specctl.train.configs import EchoConfig
from specctl.train.positions import PositionRows, position_rows
from specctl.train.report import Fit, FitReport, check_twin

if TYPE_CHECKING:  # slow to import
    import polars as pl

Bools = NDArray[np.bool_]
COST_SHARES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65)
"""Shares of the rows that the tried thresholds of a gate cut; 0 is a gate that never closes."""
NUM_RESAMPLES = 1000
NUM_STEPS = 512
"""Steps of confidence in resampled curves. Rows in one step count as ties, which moves an area by
less than 1 / 512; the area of all rows is exact."""


# --------------------------------------------------------------------------- levels and gates


@dataclass(frozen=True)
class LevelRows:
    """R positions, as if no gate ever closed."""

    level_logp: NDArray[np.float32]  # [R, D] nats, of the likeliest path to each level
    accepted: NDArray[np.int64]  # [R] draft tokens
    prompt: NDArray[np.int64]  # [R] codes

    @classmethod
    def of_prompts(cls, rows: pl.DataFrame, prompts: Sequence[str]) -> LevelRows:
        """One side of the split."""
        side = rows.filter(rows["prompt_id"].is_in(list(prompts)))
        levels = [name for name in rows.columns if name.startswith("level_")]
        return cls(
            level_logp=side.select(levels).to_numpy().astype(np.float32),
            accepted=side["accepted"].to_numpy().astype(np.int64),
            prompt=np.unique(side["prompt_id"].to_numpy(), return_inverse=True)[1],
        )

    def of(self, rows: Bools) -> LevelRows:
        return LevelRows(self.level_logp[rows], self.accepted[rows], self.prompt[rows])

    def confidence(self, level: int) -> Floats:
        """`[R]` probability of the likeliest path to a level, 1-based."""
        return np.exp(self.level_logp[:, level - 1].astype(np.float64))

    def reached(self, level: int) -> Bools:
        """`[R]` bool: the accepted length reaches the level."""
        return self.accepted >= level


@dataclass(frozen=True)
class Gate:
    """One gate of a set."""

    level: int
    threshold: float  # probability below which it closes
    auc: Interval  # among the rows that pass the shallower gates


def area_by_prompt(rows: LevelRows, level: int, *, min_rows: int, seed: int) -> Interval:
    """The area under the ROC curve of a level, with a bootstrap interval over prompts.

    Args:
        min_rows: fewest rows of each class; below it the area is unknown.
    """
    from scipy.sparse import csr_array
    from sklearn.metrics import roc_auc_score

    score, label = rows.confidence(level), rows.reached(level)
    if min(int(label.sum()), int((~label).sum())) < min_rows:
        return UNKNOWN
    codes, owner = np.unique(rows.prompt, return_inverse=True)
    step = np.searchsorted(np.quantile(score, np.arange(1, NUM_STEPS) / NUM_STEPS), score)
    hits, misses = (
        csr_array((side.astype(float), (owner, step)), shape=(len(codes), NUM_STEPS))
        for side in (label, ~label)
    )
    resamples = Resamples.draw(len(codes), seed=seed, num=NUM_RESAMPLES)
    drawn = auc(*(resamples.drawn(side)[1:] for side in (hits, misses)))
    return Interval(float(roc_auc_score(label, score)), *resamples.bounds(drawn))


def youden_threshold(score: Floats, label: Bools) -> float:
    """The cut that maximises the true minus the false positive rate (Youden's J).

    It lies midway between two neighbouring confidences, so that rounding moves no row across it; 0
    if no cut is better than none.
    """
    from sklearn.metrics import roc_curve

    false_rate, true_rate, cuts = roc_curve(label, score, drop_intermediate=False)
    gain = true_rate - false_rate
    best = int(np.argmax(gain))
    if gain[best] <= 0:
        return 0.0
    return float(cuts[best] + cuts[best + 1]) / 2  # below the last cut the gain is 0


def gates_at(levels: Sequence[int], rows: LevelRows, *, min_rows: int, seed: int) -> list[Gate]:
    """Gates at given levels, each fitted to the rows that pass the shallower gates."""
    gates: list[Gate] = []
    for level in sorted(levels):
        found = area_by_prompt(rows, level, min_rows=min_rows, seed=seed)
        if not found.known:
            gates.append(Gate(level, 0.0, found))
            continue
        score = rows.confidence(level)
        threshold = youden_threshold(score, rows.reached(level))
        gates.append(Gate(level, threshold, found))
        rows = rows.of(score >= threshold)
    return gates


def choose_gates(rows: LevelRows, areas: Sequence[Interval], config: EchoConfig) -> list[Gate]:
    """Sweet spots: the root's level, then the deepest, then the others by falling area.

    A level joins if its area is above δ over all rows, and if with it every gate's area is above δ
    among the rows that reach the gate: rows that passed other gates are harder to separate.
    """
    tried = [level for level, found in enumerate(areas, 1) if found.value > config.delta]
    tried.sort(key=lambda level: (level != 1, level != len(areas), -areas[level - 1].value))
    chosen: list[Gate] = []
    for level in tried:
        levels = [*(gate.level for gate in chosen), level]
        gates = gates_at(levels, rows, min_rows=config.min_rows, seed=config.seed)
        if all(gate.auc.value > config.delta for gate in gates):
            chosen = gates
        if len(chosen) == config.max_gates:
            break
    return chosen


def shape_with(config: EchoConfig, gates: Sequence[Gate]) -> SparseGates:
    """The tree with these gates."""
    return config.shape(tuple(g.level for g in gates), tuple(g.threshold for g in gates))


# --------------------------------------------------------------------------- from the log


def gate_rows(log: DenseLog, shape: SparseGates) -> PositionRows:
    """Every position, drafted as if no gate ever closed.

    Columns `level_1` to `level_D` are the log-probability of the likeliest path to each level, nats
    (ECHO, Eq. 6).
    """
    never = tuple(0.0 for _ in shape.thresholds)
    rule = build_shape(shape.model_copy(update={"thresholds": never}))

    def columns(draft: LoggedDraft) -> dict[str, Tensor]:
        joint = draft.pool.joint_logp
        best = torch.full((len(joint), rule.max_depth + 1), -torch.inf)
        best = best.scatter_reduce(1, draft.pool.depth, joint, "amax")
        return {f"level_{d}": best[:, d] for d in range(1, rule.max_depth + 1)}

    return position_rows(log, rule, columns, with_entropy=False)


@dataclass(frozen=True)
class Replays:
    """Replays of a log, one request at a time."""

    log: DenseLog
    clock: Clock | None = None  # a cost model's, for times

    def sums(self, policies: Sequence[Policy], prompts: Sequence[str]) -> list[Sums]:
        """Sums of each policy by prompt; `utilisation` is a sum over rounds."""
        found, part = [], self.log.only(prompts)
        with progress("replays", None):
            runs = replay(part, policies, with_bounds=False)
        for run in runs:
            sums, of = request_sums(run, self.clock), run.outcomes
            share = of.accepted / np.maximum(of.levels, 1)
            sums["utilisation"] = sums_by(run.request, run.positions.num_requests, [share])[:, 0]
            found.append(by_prompt(run.positions, sums))
        return found


# --------------------------------------------------------------------------- the batch's cap


def saturation_tokens(
    verify_us: Callable[[Floats], Floats], batch_size: int, num_tokens: int
) -> int:
    """K_max of Eq. 2: the most tokens of a batch, roots counted, that take at most a third longer
    to verify than half as many.

    For times a + b K this is K = a / b, the compute-bound limit, at which the tokens' time equals
    the rest. For the times of Eq. 2 it lies between K_max and K_max + 1 / (3 γ).

    Args:
        verify_us: time of verifying a number of tokens, us.
        num_tokens: most tokens that a request submits, root counted.
    """
    sizes = np.arange(2 * batch_size, batch_size * num_tokens + 1, dtype=np.float64)
    added = verify_us(sizes) / verify_us(sizes / 2) - 1
    free = np.flatnonzero(added <= 1 / 3)
    if len(free) and free[-1] < len(sizes) - 1:
        return int(sizes[free[-1]])
    when, place = ("never", -1) if len(free) else ("always", 0)
    raise UsageError(
        f"this clock has no K_max for batches of {batch_size}, which verify {2 * batch_size} to "
        f"{sizes[-1]:.0f} tokens: it is {when} saturated: {sizes[place]:.0f} take "
        f"{added[place]:.0%} longer than half as many, and K_max is where they take a third longer",
        hint="give --max-tokens, or another --cost-model or --batch-size",
    )


# --------------------------------------------------------------------------- the fit


def fit_echo(
    traces: TraceSet, config: EchoConfig, cost_model: AnyCost | None = None
) -> Fit[EchoReport]:
    """Fits gates to dense traces, and K_max if the configuration has a batch size.

    Args:
        cost_model: times for the report, for thresholds chosen by cost, and for K_max.

    Raises:
        UsageError: the tree is larger than the traces hold, thresholds by cost or K_max lack
            times, or the times have no K_max.
        TraceEmptyError: too few prompts, or no level whose area is known and above δ.
        TraceError: live traces.
    """
    log = sampled(DenseLog.open(traces), config.max_positions, config.seed)
    held = log.support
    config.check_support(held)
    sizes = f"depth {config.depth}, width {config.width}, at most {config.max_width}"
    notes = [f"tree: {sizes}, of traces of depth {held.depth}, top_k {held.top_k}"]
    if (batch := config.batch_size) and not config.max_tokens:
        if cost_model is None:
            raise UsageError(
                f"--batch-size {batch} fits K_max to times: it needs --cost-model, or --max-tokens "
                "in its place",
                hint="measure times with `specctl profile`, or name a clock (docs/cost-model.md)",
            )
        context = collected(traces.scan("rounds").select("context_tokens")).mean().item() - 1
        clock = partial(cost_model.verify_us, batch_size=batch, context_tokens=context)
        most = saturation_tokens(clock, batch, config.num_tokens)
        config = config.model_copy(update={"max_tokens": most})
        notes.append(
            f"K_max {most} of batches of {batch} at {context:.0f} tokens of context (Eq. 2)"
        )
    found = gate_rows(log, config.open_shape)
    replays = Replays(log, None if cost_model is None else LoadClock(cost_model))
    fitted = fit_gates(found, config, replays)
    found.warn_left_out()
    return replace(fitted, notes=notes)


def fit_gates(found: PositionRows, config: EchoConfig, replays: Replays) -> Fit[EchoReport]:
    """Chooses gates on the training prompts and reports on the held-out ones.

    Args:
        found: from `gate_rows`, for `config.open_shape`.
        replays: of the same log; with a clock if thresholds are chosen by cost.
    """
    rows = found.rows
    split = split_prompts(
        rows["prompt_id"].unique(), held_out_frac=config.held_out_frac, seed=config.seed
    )
    train, held_out = (LevelRows.of_prompts(rows, side) for side in (split.train, split.held_out))
    levels = range(1, train.level_logp.shape[1] + 1)
    by_prompt = partial(area_by_prompt, min_rows=config.min_rows, seed=config.seed)
    areas = [by_prompt(train, level) for level in levels]
    gates = choose_gates(train, areas, config)
    if not gates:
        raise _no_sweet_spot(areas, len(train.accepted), config)
    if config.thresholds == "cost":
        time_us = partial(_times, replays, split.train)
        gates = cheapest_gates(gates, train, config, time_us)
    shape, gate_at = shape_with(config, gates), {gate.level: gate for gate in gates}
    policies = [Policy(shape=shape), Policy(shape=config.open_shape)]
    replayed = dict(zip(("gates", "no_gates"), replays.sums(policies, split.held_out), strict=True))
    data = EchoReport(
        config=config.model_dump(mode="json"),
        prompts={"train": len(split.train), "held_out": len(split.held_out)},
        rows={"train": len(train.accepted), "held_out": len(held_out.accepted)},
        num_left_out=found.num_left_out,
        levels=tuple(
            LevelReport(
                level=level,
                reached_frac=float(train.reached(level).mean()),
                auc=areas[level - 1],
                held_out_auc=by_prompt(held_out, level),
                gated_auc=gate_at[level].auc if level in gate_at else None,
                threshold=gate_at[level].threshold if level in gate_at else None,
            )
            for level in levels
        ),
        gates=tuple(_gate_reports(gates, held_out)),
        recall=recall(gates, held_out),
        replayed={name: _replay_report(sums, config.seed) for name, sums in replayed.items()},
    )
    policy = Policy(shape=shape, budget=config.budget)
    held_out_logp = held_out.level_logp[:, [level - 1 for level in shape.gate_levels]]
    unseen = torch.from_numpy(held_out_logp)
    decided = {Port("gate_logp", "stopped_at", torch.int64): stop_levels(shape, unseen)}
    check = partial(check_twin, rows=unseen, wanted=decided)
    return Fit(policy, report_of(data, policy, config), split.train, check)


def cheapest_gates(
    gates: Sequence[Gate],
    rows: LevelRows,
    config: EchoConfig,
    time_us: Callable[[Sequence[SparseGates]], Sequence[float]],
) -> list[Gate]:
    """Chooses the threshold of least time for one gate after another, from the root on.

    Args:
        time_us: predicted time of the training prompts under each shape.
    """
    chosen = list(gates)
    for place, gate in enumerate(chosen):
        score = rows.confidence(gate.level)
        # Quantiles of the rows, Youden's threshold, and no gate.
        cuts = np.unique([*np.quantile(score, COST_SHARES[1:]), gate.threshold]).tolist()
        tried = [replace(gate, threshold=cut) for cut in (0.0, *cuts)]
        sets = [[*chosen[:place], one, *chosen[place + 1 :]] for one in tried]
        chosen = sets[int(np.argmin(time_us([shape_with(config, one) for one in sets])))]
        rows = rows.of(score >= chosen[place].threshold)
    return chosen


def _times(
    replays: Replays, prompts: Sequence[str], shapes: Sequence[SparseGates]
) -> Sequence[float]:
    found = replays.sums([Policy(shape=shape) for shape in shapes], prompts)
    times = [sums.totals["time_us"] for sums in found]
    if np.isnan(times).any():
        raise UsageError(
            "--thresholds cost predicts times: it needs --cost-model",
            hint="measure one with `specctl profile`",
        )
    return times


def _no_sweet_spot(areas: Sequence[Interval], num_rows: int, config: EchoConfig) -> TraceEmptyError:
    listed = ", ".join(f"level {n} {found.text('.2f')}" for n, found in enumerate(areas, 1))
    fix = "collect more prompts, or lower --min-rows"
    if known := [found.value for found in areas if found.known]:
        fix = f"pass --delta {np.floor(100 * max(known) - 0.5) / 100:.2f}, or another --width"
    return TraceEmptyError(
        f"no level's confidence has an area under the ROC curve above {config.delta}: {listed} "
        f"over {num_rows} positions",
        hint=fix,
    )


# --------------------------------------------------------------------------- the report's record


class LevelReport(Record):
    """One level, 1-based."""

    level: int
    reached_frac: float  # of training positions, by their accepted lengths
    auc: Interval  # area under the ROC curve of its confidence over all training positions
    held_out_auc: Interval
    gated_auc: Interval | None  # over positions that pass the shallower gates; null without a gate
    threshold: float | None  # probability below which its gate closes


class GateReport(Record):
    """One gate on held-out positions that pass the shallower gates."""

    level: int
    threshold: float
    num_rows: int
    closes_frac: float
    true_rate: float | None  # share that passes of positions that reach the level
    false_rate: float | None  # share that passes of the others


class ReplayReport(Record):
    """Held-out prompts under a policy, one request at a time."""

    mean_acceptance_length: Interval
    verified_per_call: float
    levels_per_call: float
    draft_yield: float  # E[L] of Eq. 3: accepted draft tokens per round
    verified_yield: float | None  # accepted over verified draft tokens, as the paper words it
    utilisation: float  # u: accepted over drafted levels, averaged over rounds
    token_us: float | None  # predicted; null without a cost model


class RecallReport(Record):
    """Accepted tokens that closed gates cut, over accepted tokens; means over held-out prompts.

    If the budget leaves nothing to widen with, the level of the gate is lost too; a widened level
    is verified. A bound is (n · loss + 1) / (n + 1), which conformal risk control compares with the
    allowed loss.
    """

    num_prompts: int
    loss_frac: float
    loss_bound: float
    widened_loss_frac: float
    widened_loss_bound: float


class EchoReport(Record):
    """`report.json` of a fit."""

    config: dict[str, JsonValue]
    prompts: dict[str, int]
    rows: dict[str, int]
    num_left_out: int  # positions without a label
    levels: tuple[LevelReport, ...]
    gates: tuple[GateReport, ...]
    recall: RecallReport
    replayed: dict[str, ReplayReport]  # `gates`; `no_gates`: the same tree without them


def recall(gates: Sequence[Gate], rows: LevelRows) -> RecallReport:
    """The share of each prompt's accepted tokens that the gates cut."""
    stopped = np.zeros(len(rows.accepted), np.int64)  # level of the first gate that closes
    for gate in gates:
        closed = (rows.confidence(gate.level) < gate.threshold) & (stopped == 0)
        stopped[closed] = gate.level
    _, owner = np.unique(rows.prompt, return_inverse=True)
    total = np.bincount(owner, rows.accepted).astype(np.float64)
    some = total > 0
    num_prompts, losses = int(some.sum()), []
    for lost in (1, 0):
        kept = np.where(stopped > 0, np.minimum(rows.accepted, stopped - lost), rows.accepted)
        left = np.bincount(owner, kept)[some] / total[some]
        losses.append(float(np.mean(1 - left)) if num_prompts else 0.0)
    bounds = [(num_prompts * loss + 1) / (num_prompts + 1) for loss in losses]
    return RecallReport(
        num_prompts=num_prompts,
        loss_frac=losses[0],
        loss_bound=bounds[0],
        widened_loss_frac=losses[1],
        widened_loss_bound=bounds[1],
    )


def _gate_reports(gates: Sequence[Gate], rows: LevelRows) -> list[GateReport]:
    reports = []
    for gate in gates:
        passes, reached = rows.confidence(gate.level) >= gate.threshold, rows.reached(gate.level)
        true_rate, false_rate = (
            float(passes[side].mean()) if side.any() else None for side in (reached, ~reached)
        )
        reports.append(
            GateReport(
                level=gate.level,
                threshold=gate.threshold,
                num_rows=len(passes),
                closes_frac=float(1 - passes.mean()) if len(passes) else 0.0,
                true_rate=true_rate,
                false_rate=false_rate,
            )
        )
        rows = rows.of(passes)
    return reports


def _replay_report(of: Sums, seed: int) -> ReplayReport:
    measure, sums = Measure(Resamples.draw(len(of.rows), seed=seed)), of.totals
    calls, accepted = sums["calls"], sums["accepted"]
    drafted, token_us = sums["verified"] - calls, sums["time_us"] / sums["tokens"]
    return ReplayReport(
        **measure.figures(["mean_acceptance_length"], measure.drawn(of, "")),
        verified_per_call=sums["verified"] / calls,
        levels_per_call=sums["levels"] / calls,
        draft_yield=accepted / calls,
        verified_yield=accepted / drafted if drafted else None,
        utilisation=sums["utilisation"] / calls,
        token_us=None if np.isnan(token_us) else token_us,
    )


# --------------------------------------------------------------------------- what is shown


LEVEL_COLUMNS = {
    "level": "level",
    "reached": "reached_frac:.0%",
    "train AUC": "auc:.2f",
    "given gates": "gated_auc:.2f",
    "held-out AUC": "held_out_auc:.2f",
    "threshold": "threshold:.3f",
}
LEVELS_WIDE = ("given gates",)
LEVEL_LEGEND = (
    "reached: training positions whose accepted length reaches the level; AUC: area under the ROC "
    "curve of its confidence, 95% by prompt, - over too few positions; threshold: probability "
    "below which the gate closes"
)


def report_of(data: EchoReport, policy: Policy, config: EchoConfig) -> FitReport[EchoReport]:
    gated, budget = data.replayed["gates"], policy.budget
    shared = "The batch verifies what the shape submits: no budget is set."
    if isinstance(budget, ElasticBudget):
        shared = f"A batch verifies {budget.max_tokens} nodes a round at most, roots counted."
    return FitReport(
        kind="echo",
        title="ECHO gates",
        what="A draft grows level by level with a fixed width. At a few levels a gate compares the "
        "probability of the likeliest path with a threshold: below it the level is widened and "
        f"drafting ends (arXiv:2604.09603). {shared}",
        config=data.config,
        data=data,
        splits={side: (data.prompts[side], data.rows[side]) for side in ("train", "held_out")},
        metrics={
            **{
                f"held_out_auc_level_{row.level}": row.held_out_auc
                for row in data.levels
                if row.threshold is not None
            },
            "held_out_loss_frac": data.recall.loss_frac,
            "held_out_mean_acceptance_length": gated.mean_acceptance_length,
            "held_out_verified_per_call": gated.verified_per_call,
            "held_out_utilisation": gated.utilisation,
        },
        verdict=_verdict(data),
        summary=_summary(data),
        tables=(Table.of("Levels", data.levels, LEVEL_COLUMNS, LEVEL_LEGEND, LEVELS_WIDE),),
        limits=(
            f"The thresholds hold for this pair and for levels of {config.width} nodes.",
            "Areas are over every position of the texts, not over the rounds of a policy. A gate "
            "saves verification, or gives it to other requests; the draft step that it looks at "
            "was run already.",
            "Compare it with a static tree and with the survival budget at the same number of "
            "verified tokens before you trust it (docs/echo.md).",
        ),
        twin="Other runtimes can evaluate `policy.onnx`: `gate_logp` float32 `[n, G]`, the "
        "log-probability of the likeliest path at every gate, to `stopped_at`, the level of the "
        "gate that closes or 0.",
        use=("specctl replay TRACES -p PATH+echo_budget:max_tokens=64 --batch-size 8 ...",),
    )


def _verdict(data: EchoReport) -> str:
    tau = {name: one.mean_acceptance_length.text(".2f") for name, one in data.replayed.items()}
    gates, prompts = count(len(data.gates), "gate"), count(data.prompts["held_out"], "prompt")
    return f"{gates}: τ {tau['gates']} on {prompts} held out, without gates {tau['no_gates']}."


def _summary(data: EchoReport) -> tuple[str, ...]:
    gates = [
        f"The gate at level {gate.level} closes below {gate.threshold:.3f}: in "
        f"{gate.closes_frac:.0%} of {gate.num_rows} held-out positions."
        for gate in data.gates
    ]
    replayed = []
    for name, one in data.replayed.items():
        time = "" if one.token_us is None else f", {one.token_us:.0f} us a token (cost model)"
        replayed.append(
            f"{name.replace('_', ' ')}: {one.verified_per_call:.1f} tokens verified and "
            f"{one.levels_per_call:.1f} levels drafted a call{time}"
        )
    loss = data.recall
    lost = (
        f"Counted from every position, the gates cut {loss.loss_frac:.1%} of accepted tokens (mean "
        f"of {count(loss.num_prompts, 'held-out prompt')}; of a fresh prompt at most "
        f"{loss.loss_bound:.1%} is expected); τ is over rounds."
    )
    return (*gates, lost, *replayed)
