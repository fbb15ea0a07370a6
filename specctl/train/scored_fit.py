"""What every fit of a node scorer does besides fitting: read both sides, choose beta, judge."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from specctl.errors import UsageError
from specctl.policy import build_shape
from specctl.policy.records import JointThreshold, ScoredTree, Scorer
from specctl.policy.scored import nothing_kept
from specctl.stats import Split, split_prompts
from specctl.train.curves import BETAS, Curve, trace_curve
from specctl.train.node_sample import sample_nodes
from specctl.train.nodes import NodeConfig, NodeRows, NodeSource

NUM_PASSES = 5
"""Over the log: rows and thresholds of both sides, and the control."""


class ScoredConfig(Protocol):
    """What the configuration of such a fit says; `C2TConfig` is one."""

    @property
    def nodes(self) -> NodeConfig: ...
    @property
    def beta(self) -> float | None: ...
    @property
    def recall(self) -> float: ...
    @property
    def num_tokens(self) -> int | None: ...
    @property
    def keep_leaves(self) -> bool: ...
    @property
    def running_min(self) -> bool: ...
    @property
    def held_out_frac(self) -> float: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True)
class Sides:
    """Prompts and sampled rows of both sides."""

    split: Split
    train: NodeRows
    held_out: NodeRows


@dataclass(frozen=True)
class Judged:
    """What thresholds keep.

    Attributes:
        beta: the chosen one. chosen: on training prompts, where it was chosen.
        curve: on held-out prompts. control: of the path's probability, on the same.
    """

    beta: float
    chosen: Curve
    curve: Curve
    control: Curve


def read_sides(source: NodeSource, prompt_ids: Iterable[str], config: ScoredConfig) -> Sides:
    """Rows of training and of held-out prompts.

    Raises:
        UsageError, TraceSchemaError, TraceEmptyError: see `sample_nodes`, `split_prompts`.
    """
    check_support(source, config.nodes)
    split = split_prompts(prompt_ids, held_out_frac=config.held_out_frac, seed=config.seed)
    train = sample_nodes(source, config.nodes, split.train)
    return Sides(split, train, sample_nodes(source, config.nodes, split.held_out))


def judge(source: NodeSource, scorer: Scorer, config: ScoredConfig, split: Split) -> Judged:
    """Chooses beta on the training prompts, then looks at the held-out ones.

    Raises:
        UsageError: a beta that keeps nothing, or a recall that none reaches.
    """
    betas, rule = with_beta(config.beta), rule_of(scorer, config)
    chosen = trace_curve(source, rule, split.train, betas=betas)
    beta = choose_beta(chosen, config)
    curve = trace_curve(source, rule, split.held_out, betas=betas)
    control = trace_curve(source, joint_rule(config), split.held_out, betas=betas)
    return Judged(beta, chosen, curve, control)


def check_support(source: NodeSource, config: NodeConfig) -> None:
    """Refuses to fit to what the log does not hold."""
    support = source.support
    asked = {
        "--depth": (config.depth, support.depth),
        "--first-top-k": (config.first_top_k, support.top_k),
        "--second-top-k": (config.second_top_k, support.width),
    }
    for option, (wanted, held) in asked.items():
        if wanted > held:
            raise UsageError(
                option,
                expected=f"at most {held}, which the traces hold",
                found=str(wanted),
                fix="lower it, or collect larger trees",
            )


def shape_of(scorer: Scorer, config: ScoredConfig, beta: float) -> ScoredTree:
    """The record of a policy; pydantic's own refusal where options contradict each other."""
    return ScoredTree(
        scorer=scorer,
        predicts=config.nodes.predicts,
        beta=beta,
        depth=config.nodes.depth,
        first_top_k=config.nodes.first_top_k,
        second_top_k=config.nodes.second_top_k,
        keep_leaves=config.keep_leaves,
        num_tokens=config.num_tokens,
        running_min=config.running_min,
    )


def rule_of(scorer: Scorer, config: ScoredConfig) -> Any:
    """The rule that keeps everything, with its scores closed along paths.

    A cap on nodes plays no part in the curve, and a threshold reaches a node only through its
    ancestors, so the running minimum tells what is kept whether the policy takes it or not.
    """
    shape = shape_of(scorer, config, 0.0)
    return build_shape(shape.model_copy(update={"running_min": True, "num_tokens": None}))


def joint_rule(config: ScoredConfig) -> Any:
    """The control: the path's probability, thresholded; no second Top-K other than the first."""
    nodes = config.nodes
    return build_shape(JointThreshold(depth=nodes.depth, top_k=nodes.first_top_k, min_prob=0.0))


def with_beta(beta: float | None) -> tuple[float, ...]:
    """The grid of thresholds, with one more where it was asked for."""
    return BETAS if beta is None else tuple(sorted({*BETAS, beta}))


def choose_beta(curve: Curve, config: ScoredConfig) -> float:
    """The threshold asked for, or the highest that keeps enough.

    Raises:
        UsageError: it keeps nothing, or none keeps enough.
    """
    if config.beta is not None:
        kept = int(curve.kept[:, curve.index_of(config.beta)].sum())
        if kept == 0:
            raise nothing_kept(config.beta, f"no node at {curve.num_positions} positions")
        return config.beta
    index = curve.index_of_recall(config.recall)
    if index is None:
        most = curve.accepted[:, 0].sum() / max(1, curve.longest.sum())
        raise UsageError(
            f"--recall {config.recall:g}",
            expected="a share of accepted tokens that some beta keeps",
            found=f"at most {most:.4f}, at beta {curve.betas[0]:.1g}",
            fix="lower it, raise --second-top-k, or fit other features",
        )
    return curve.betas[index]
