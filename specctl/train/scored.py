"""The common part of the fits of node scorers (`c2t`, `survival`): read, choose beta, judge.

    logged nodes ─read_sides─► rows ─(a fit)─► scorer ─judge─► beta, what thresholds keep ─► report

Beta is chosen on the training prompts. The report compares the policy with the plain threshold on
the path's probability on held-out prompts; boosted trees on the same nodes show how much better a
large model would be.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from specctl.errors import UsageError
from specctl.formatting import Detail, Table, count
from specctl.logs.node_sample import LoggedNodes, NodeRows, sample_nodes
from specctl.logs.tree_log import DenseLog
from specctl.policy import JointThreshold, Policy, ScoredTree, Scorer, build_shape
from specctl.policy.c2t import nothing_kept
from specctl.policy.scorers import build_log_odds
from specctl.progress import progress
from specctl.records import Record
from specctl.replay.facts import MARKED_BELOW
from specctl.replay.rounds import replay
from specctl.runtime.twins import SCORER
from specctl.stats import (
    Floats,
    Interval,
    Split,
    boosted_trees,
    intervals_over,
    split_prompts,
)
from specctl.train.configs import ScoredConfig, check_sizes
from specctl.train.curves import BETAS, Curve, CurvePoint, DepthCalibration, trace_curve
from specctl.train.report import Fit, FitReport, check_twin

RECALLS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Shares of accepted tokens at which policies are compared."""
TOO_WIDE, MOST_MISSING = (0.9, 0.95), 0.05
"""Recalls that are not judged if the log lacks more expansions a position."""
TWIN_TOLERANCE = 1e-5
"""Absolute and relative tolerance of log-odds: above the effect of the order of float32 additions,
below that of another weight."""
TREES, DRAFTER = "boosted trees", "drafter"
"""References of a scorer on its label."""
DRAFTED = {"joint": ("joint_logp", "joint_prob"), "conditional": ("draft_logp",)}
"""Features that are the drafter's own prediction of the label."""
MOST_CHECKED = 100_000
"""Held-out rows that a scorer's twin is checked on."""


# --------------------------------------------------------------------------- the fit


@dataclass(frozen=True)
class Sides:
    """Prompts and sampled rows of both sides."""

    split: Split
    train: NodeRows
    held_out: NodeRows


@dataclass(frozen=True)
class Judged:
    """The nodes and tokens kept by thresholds."""

    config: ScoredConfig  # with its `second_top_k`
    beta: float
    support: float | None  # share of its expansions and rounds that the log holds
    chosen: Curve  # on training prompts, where beta was chosen
    curve: Curve  # on held-out prompts
    control: Curve  # of the path's probability, on held-out prompts


def read_sides(source: LoggedNodes, prompt_ids: Iterable[str], config: ScoredConfig) -> Sides:
    """Rows of training and of held-out prompts."""
    nodes, support = config.nodes, source.support
    check_sizes(
        ("--depth", nodes.depth, support.depth),
        ("--first-top-k", nodes.first_top_k, support.top_k),
        ("--second-top-k", nodes.second_top_k or 1, support.width),
    )
    split = split_prompts(prompt_ids, held_out_frac=config.held_out_frac, seed=config.seed)
    fields = {**nodes.model_dump(), "second_top_k": nodes.widths(support.width)[0]}
    train = sample_nodes(source, split.train, **fields)
    return Sides(split, train, sample_nodes(source, split.held_out, **fields))


def judge(source: LoggedNodes, scorer: Scorer, config: ScoredConfig, split: Split) -> Judged:
    """Chooses sizes and beta on the training prompts, then measures on the held-out ones."""
    config, chosen, beta, support = choose(source, scorer, config, split.train)
    rule, nodes, betas = open_rule(scorer, config), config.nodes, chosen.betas
    # The control's second Top-K equals the first. As it is no policy, its Top-K may exceed a
    # policy's (15); `model_copy` does not validate.
    joint = JointThreshold(depth=nodes.depth, top_k=1, min_prob=0.0)
    joint = joint.model_copy(update={"top_k": nodes.first_top_k})
    curve = trace_curve(source, rule, split.held_out, betas=betas)
    control = trace_curve(source, build_shape(joint), split.held_out, betas=betas)
    return Judged(config, beta, support, chosen, curve, control)


def choose(
    source: LoggedNodes, scorer: Scorer, config: ScoredConfig, train: Sequence[str]
) -> tuple[ScoredConfig, Curve, float, float | None]:
    """The configuration with the most nodes expanded per level with which the log holds what the
    policy drafts, or with fewer if that does not reach the recall; the curve of its training
    prompts, beta, and the share that the log holds.

    Figures of a policy that the log does not hold are ranges, so that it cannot be tuned. Where the
    number is given, and in a live log, which replays no policy, the share is None.
    """
    betas = BETAS if config.beta is None else tuple(sorted({*BETAS, config.beta}))
    found: tuple[ScoredConfig, Curve, float] | None = None
    widths, support = config.nodes.widths(source.support.width), None
    for width in widths:
        nodes = config.nodes.model_copy(update={"second_top_k": width})
        sized = config.model_copy(update={"nodes": nodes})
        more = progress("positions", 2 * source.sizes(train)[0]) if found else nullcontext()
        with more:
            curve = trace_curve(source, open_rule(scorer, sized), train, betas=betas)
            try:
                beta = choose_beta(curve, sized)
            except UsageError:
                if found is None:
                    raise
                break  # fewer keep too little
            found = sized, curve, beta
            if len(widths) == 1 or not isinstance(source.log, DenseLog):
                break
            policy = Policy(shape=shape_of(scorer, sized, beta))
            [run] = replay(source.log.only(train), [policy], with_bounds=False)
            if (support := run.outcomes.support) >= MARKED_BELOW:
                break
    assert found is not None
    return *found, support


def shape_of(scorer: Scorer, config: ScoredConfig, beta: float) -> ScoredTree:
    """The record of a policy; pydantic refuses contradictory options."""
    return ScoredTree(
        scorer=scorer,
        beta=beta,
        **config.model_dump(include={"keep_leaves", "num_tokens", "min_level_prob"}),
        **config.nodes.model_dump(include={"predicts", "depth", "first_top_k", "second_top_k"}),
    )


def open_rule(scorer: Scorer, config: ScoredConfig) -> Any:
    """The rule that keeps everything.

    A node is kept only with its ancestors, so joint scores are the minimum along the path. Caps on
    nodes do not apply to the curve.
    """
    shape = shape_of(scorer, config, 0.0)
    whole = {"num_tokens": None, "min_level_prob": 0.0}
    rule: Any = build_shape(shape.model_copy(update=whole))
    return replace(rule, combine=rule.combine or torch.minimum)


def choose_beta(curve: Curve, config: ScoredConfig) -> float:
    """The configured threshold, or the highest that keeps enough."""
    if config.beta is not None:
        if not curve.kept[:, curve.betas.index(config.beta)].sum():
            raise nothing_kept(config.beta, f"no node at {curve.num_positions} positions")
        return config.beta
    index = curve.index_of_recall(config.recall)
    if index is None:
        most = curve.accepted[:, 0].sum() / max(1, curve.longest.sum())
        raise UsageError(
            f"no beta keeps a share of {config.recall:g} of accepted tokens (--recall): beta "
            f"{curve.betas[0]:.1g} keeps {most:.4f}",
            hint="lower it, raise --second-top-k, or fit other features",
        )
    return curve.betas[index]


# --------------------------------------------------------------------------- the report's record


class SideCounts(Record):
    """One side of the split; counts are of labelled nodes."""

    num_prompts: int
    num_positions: int
    num_accepted: int
    num_rejected: int
    num_unknown: int  # nodes of unknown fate
    kept_frac: float  # share of rejected nodes that were sampled


class LabelQuality(Record):
    """A scorer's prediction of its own label, on held-out nodes."""

    log_loss: float  # nats per node
    auc: float  # of accepted against rejected
    base_rate: float  # share accepted


class RecallRow(Record):
    """Nodes per position, root counted, at equal recall; interpolated between thresholds."""

    recall: float
    num_tokens: float | None = None  # null if the curve does not reach the recall
    joint_num_tokens: float | None = None  # of the plain threshold on the path's probability
    change: float | None = None  # relative
    change_interval: Interval | None = None  # prompts resampled

    @property
    def found_change(self) -> Interval | float | None:
        """The change, with its interval if known."""
        return self.change_interval or self.change


class ScoredReport(Record):
    """`report.json` of a fitted node scorer."""

    config: ScoredConfig
    beta: float
    support: float | None  # as in `choose`
    sides: dict[str, SideCounts]  # `train` and `held_out`
    train: CurvePoint  # at beta
    held_out: CurvePoint  # at beta
    held_out_interval: dict[str, Interval]
    comparisons: tuple[RecallRow, ...]  # with the plain threshold, held out
    label: LabelQuality
    references: dict[str, LabelQuality]  # of boosted trees, and of the drafter's own probability
    auc: float  # of scores of all nodes
    joint_auc: float
    missing_per_position: float  # expansions that the log lacked, held out
    calibration: tuple[DepthCalibration, ...]  # of scores of whole paths, held out
    curve: tuple[CurvePoint, ...]  # all thresholds, held out
    joint_curve: tuple[CurvePoint, ...]


Scored = TypeVar("Scored", bound=ScoredReport)


def scored_figures(scorer: Scorer, sides: Sides, judged: Judged) -> dict[str, Any]:
    """The fields of a `ScoredReport`."""
    config, curve, control = judged.config, judged.curve, judged.control
    at = curve.betas.index(judged.beta)
    pairs = {"train": (sides.train, judged.chosen), "held_out": (sides.held_out, curve)}
    return {
        "config": config,
        "beta": judged.beta,
        "support": judged.support,
        "sides": {
            name: SideCounts(
                num_prompts=found.num_prompts,
                num_positions=found.num_positions,
                num_accepted=rows.num_positives,
                num_rejected=rows.num_negatives,
                num_unknown=rows.num_unknown,
                kept_frac=rows.kept_frac,
            )
            for name, (rows, found) in pairs.items()
        },
        "train": judged.chosen.point(at),
        "held_out": curve.point(at),
        "held_out_interval": curve.intervals(at, config.seed),
        "comparisons": compared(curve, control, config.seed),
        "label": label_quality(log_odds(scorer, sides.held_out), sides.held_out),
        "references": references(config, sides),
        "auc": curve.calibration.auc(),
        "joint_auc": control.calibration.auc(),
        "missing_per_position": curve.missing_per_position,
        "calibration": curve.calibration.by_depth(),
        "curve": curve.points(),
        "joint_curve": control.points(),
    }


def compared(curve: Curve, control: Curve, seed: int) -> tuple[RecallRow, ...]:
    """Two curves over the same prompts at all recalls, empty where the log is too narrow."""
    is_narrow = curve.missing_per_position > MOST_MISSING
    return tuple(
        RecallRow(recall=recall)
        if is_narrow and recall in TOO_WIDE
        else _compare(curve, control, recall, seed)
        for recall in RECALLS
    )


def _compare(curve: Curve, control: Curve, recall: float, seed: int) -> RecallRow:
    """Two curves over the same prompts at one recall."""
    resamples = curve.resamples(seed)
    ours, theirs = (side.tokens_at_recall(recall, resamples) for side in (curve, control))
    low, high = resamples.bounds(ours[1:] / theirs[1:] - 1)
    figures = ours[0], theirs[0], ours[0] / theirs[0] - 1
    own, other, change = (float(x) if np.isfinite(x) else None for x in figures)
    return RecallRow(
        recall=recall,
        num_tokens=own,
        joint_num_tokens=other,
        change=change,
        change_interval=None if change is None else Interval(change, low, high),
    )


def log_odds(scorer: Scorer, rows: NodeRows) -> Floats:
    """`[M]` log-odds of rows, by the runtime's own code."""
    # In parts, since a network's activations are larger than the rows.
    score, parts = build_log_odds(scorer), torch.from_numpy(rows.features).split(1 << 14)
    with torch.inference_mode():
        return torch.cat([score(part) for part in parts]).double().numpy()


def label_quality(logit: Floats, rows: NodeRows) -> LabelQuality:
    """Quality of log-odds `[M]` as predictions; sampled negatives are weighted up."""
    from sklearn.metrics import roc_auc_score

    weight = rows.weight
    loss = np.logaddexp(0.0, np.where(rows.accepted, -logit, logit))
    return LabelQuality(
        log_loss=float((weight * loss).sum() / weight.sum()),
        auc=float(roc_auc_score(rows.accepted, logit, sample_weight=weight)),
        base_rate=rows.num_positives / (rows.num_positives + rows.num_negatives),
    )


def references(config: ScoredConfig, sides: Sides) -> dict[str, LabelQuality]:
    """The label's quality by boosted trees, and by the drafter's own probability."""
    train, rows, names = sides.train, sides.held_out, config.nodes.features
    trees = boosted_trees(train.features, train.accepted, weight=train.weight, seed=config.seed)
    probs = {TREES: trees(rows.features)}
    for name in {*DRAFTED[config.nodes.predicts]} & {*names}:
        column = rows.features[:, names.index(name)].astype(np.float64)
        probs[DRAFTER] = column if name.endswith("_prob") else np.exp(column)
    inside = {name: np.clip(prob, 1e-12, 1 - 1e-12) for name, prob in probs.items()}
    return {name: label_quality(np.log(p) - np.log1p(-p), rows) for name, p in inside.items()}


# --------------------------------------------------------------------------- what is shown


def scored_fit(
    data: Scored,
    scorer: Scorer,
    sides: Sides,
    kind: str,
    title: str,
    what: str,
    tables: Sequence[Table] = (),
) -> Fit[Scored]:
    """The policy of a scorer, with its report and the check of its twin.

    Args:
        what: the scorer in words, such as "A network of 48 hidden units".
        tables: after the common ones.
    """
    config, nodes = data.config, data.config.nodes
    label = {
        "joint": "whether the whole path to a node will be accepted (the paper's label)",
        "conditional": "whether a node will be accepted once its parent is, multiplied along the "
        "path",
    }[nodes.predicts]
    names = ", ".join(f"`{name}`" for name in nodes.features)
    recalls = Table.of(
        "Against the plain threshold",
        data.comparisons,
        {
            "recall": "recall:.2f",
            "nodes": "num_tokens:.1f",
            "plain": "joint_num_tokens:.1f",
            "difference": "found_change:+.1%",
        },
        "recall: share of accepted tokens kept; nodes: kept per position, root counted; plain: by "
        "a threshold on the path's probability; a negative difference is a gain; held out, "
        f"{intervals_over(data.sides['held_out'].num_prompts)}",
    )
    quality = {kind: data.label, **data.references}
    label_table = Table(
        "The label, held out",
        ("by", "log-loss", "AUC"),
        [(name, f"{found.log_loss:.5f}", f"{found.auc:.4f}") for name, found in quality.items()],
        "log-loss in nats a node; boosted trees: LightGBM on the same nodes and features, which "
        "shows what this scorer leaves; drafter: its own probability",
        is_detail=True,
    )
    report = FitReport(
        kind=kind,
        title=title,
        what=f"{what} reads {names} of every draft token and predicts {label}"
        f". While a tree of at most {nodes.depth} levels grows, what scores "
        f"below beta = {data.beta:.4g} is neither expanded nor verified.",
        config=config.model_dump(mode="json"),
        data=data,
        splits={side: (c.num_prompts, c.num_positions) for side, c in data.sides.items()},
        metrics={
            **{f"held_out_{name}": found for name, found in data.held_out_interval.items()},
            "held_out_auc": data.auc,
            "held_out_joint_auc": data.joint_auc,
            "held_out_ece": data.calibration[0].ece,
            "held_out_label_log_loss": data.label.log_loss,
            **{f"change_at_recall_{row.recall:g}": row.found_change for row in data.comparisons},
        },
        verdict=verdict_on(data),
        summary=_summary(data),
        tables=(recalls, label_table, *tables),
        limits=(
            "Figures are means over logged positions, each taken as a start. A run visits some. "
            "`specctl replay` walks the log as a run would: compare there before you trust it.",
            "It was fitted to nodes drafted by joint probability; the policy drafts by its own "
            "scores. Nodes that it asks for and the traces lack count as not accepted: "
            f"{data.missing_per_position:.2f} expansions a position without a threshold.",
        ),
        twin="Other runtimes can evaluate `policy.onnx`: `features` float32 `[n, F]` to "
        "`log_odds` and `prob`.",
    )
    rows = torch.from_numpy(sides.held_out.features[:MOST_CHECKED])
    with torch.inference_mode():
        wanted = {SCORER: build_log_odds(scorer)(rows)}
    check = functools.partial(check_twin, rows=rows, wanted=wanted, tolerance=TWIN_TOLERANCE)
    policy = Policy(shape=shape_of(scorer, config, data.beta))
    return Fit(policy, report, sides.split.train, check)


def verdict_on(data: ScoredReport) -> str:
    """The threshold's recall and nodes, and its largest sure differences from plain thresholds."""
    kept = (
        f"Keeps {data.held_out.recall:.0%} of accepted tokens (of training prompts "
        f"{data.train.recall:.0%}) in {data.held_out.num_tokens:.1f} nodes, on "
        f"{count(data.sides['held_out'].num_prompts, 'held-out prompt')}"
    )
    changes = [row.change_interval for row in data.comparisons if row.change_interval is not None]
    sides = {
        "below": [-found.value for found in changes if found.high < 0],
        "above": [found.value for found in changes if found.low > 0],
    }
    found = [f"up to {max(sure):.0%} {side}" for side, sure in sides.items() if sure]
    return f"{kept}; {' and '.join(found) or 'not told apart from'} the plain threshold."


def _summary(data: ScoredReport) -> tuple[str, ...]:
    ends = data.held_out_interval
    lines = [
        f"beta {data.beta:.3g} keeps {ends['recall'].text('.2f')} of the accepted tokens in "
        f"{ends['num_tokens'].text('.1f')} nodes.",
        Detail(
            f"AUC {data.auc:.4f}, of the joint probability {data.joint_auc:.4f}; ECE "
            f"{data.calibration[0].ece:.4f}; log-loss of the label {data.label.log_loss:.4f} nats"
        ),
    ]
    if data.support is not None:
        most = count(data.config.nodes.second_top_k or 0, "node")
        lines.append(
            f"Expands at most {most} a level; the traces hold {data.support:.1%} of what it drafts."
        )
        if data.support < MARKED_BELOW:
            lines.append(
                "Replay gives ranges for it: collect with a larger --width, or lower --recall."
            )
    if data.missing_per_position > MOST_MISSING:
        rows = " and ".join(f"{recall:.2f}" for recall in TOO_WIDE)
        lines.append(
            "The log is narrower than this scorer would draft, by "
            f"{data.missing_per_position:.2g} expansions a position: rows {rows} are left out."
        )
    return tuple(lines)
