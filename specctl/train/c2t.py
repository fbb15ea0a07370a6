"""`fit c2t`: a two-layer network that prunes draft trees (arXiv:2502.13652).

    logged nodes ─sample_nodes─► rows of training prompts ─train_ffn─► scorer
    scorer ─trace_curve─► what every threshold keeps ─► beta (training prompts), report (held out)

Readings of the paper follow notes/state-of-the-art.md, section 6: split by prompt, all positives
and a share of the negatives with the bias corrected for it, acceptance given the parent's
multiplied along the path. `predicts="joint"` is the paper's label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from specctl.errors import UsageError
from specctl.policy import build_shape
from specctl.policy.records import FfnScorer, JointThreshold, Policy, ScoredTree, Scorer
from specctl.policy.scored import nothing_kept
from specctl.splits import Split, split_prompts
from specctl.train.c2t_config import C2TConfig
from specctl.train.c2t_report import C2TReport, Material, build_report
from specctl.train.curves import BETAS, Curve, trace_curve
from specctl.train.ffn import train_ffn
from specctl.train.node_sample import sample_nodes
from specctl.train.nodes import NodeConfig, NodeRows, NodeSource

__all__ = ["C2TConfig", "C2TFit", "fit_c2t"]
OnStage = Callable[[str], Any]
NUM_PASSES = 5
"""Over the log: rows and thresholds of both sides, and the control."""


@dataclass(frozen=True)
class C2TFit:
    """A fitted policy and what is known of it.

    Attributes:
        split: prompts on both sides.
        train: rows that it was fitted to.
        held_out: rows of held-out prompts; the ONNX twin is checked on these.
        curve: what thresholds keep on held-out prompts. control: the same of the path's
            probability.
    """

    policy: Policy
    config: C2TConfig
    report: C2TReport
    split: Split
    train: NodeRows
    held_out: NodeRows
    curve: Curve
    control: Curve

    @property
    def scorer(self) -> Scorer:
        """The network."""
        assert isinstance(self.policy.shape, ScoredTree)
        return self.policy.shape.scorer


def fit_c2t(
    source: NodeSource,
    prompt_ids: Iterable[str],
    config: C2TConfig,
    *,
    on_stage: OnStage | None = None,
    on_epoch: Callable[[int], None] | None = None,
) -> C2TFit:
    """Fits the network on training prompts, chooses beta there, reports on held-out ones.

    Reads the log `NUM_PASSES` times.

    Args:
        on_stage: told what begins.

    Raises:
        UsageError: options that contradict each other or the log's support, a beta that keeps
            nothing, a recall that no beta reaches, training that diverged.
        TraceSchemaError: features that are not finite in the log.
        TraceEmptyError: too few prompts, or labels of one kind.
    """
    say = on_stage or (lambda stage: None)
    check_support(source, config.nodes)
    split = split_prompts(prompt_ids, held_out_frac=config.held_out_frac, seed=config.seed)
    say("sampling nodes")
    train = sample_nodes(source, config.nodes, split.train)
    held_out = sample_nodes(source, config.nodes, split.held_out)
    say("training the network")
    scorer = fit_scorer(train, config, on_epoch=on_epoch)
    say("choosing beta")
    betas = with_beta(config.beta)
    chosen = trace_curve(source, rule_of(scorer, config), split.train, betas=betas)
    beta = choose_beta(chosen, config)
    say("judging on held-out prompts")
    curve = trace_curve(source, rule_of(scorer, config), split.held_out, betas=betas)
    control = trace_curve(source, joint_rule(config), split.held_out, betas=betas)
    policy = Policy(shape=shape_of(scorer, config, beta))
    material = Material(scorer, train, held_out, chosen, curve, control)
    report = build_report(config, beta, material)
    return C2TFit(policy, config, report, split, train, held_out, curve, control)


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


def fit_scorer(
    rows: NodeRows,
    config: C2TConfig,
    *,
    start: FfnScorer | None = None,
    on_epoch: Callable[[int], None] | None = None,
) -> FfnScorer:
    """The network for some rows."""
    return train_ffn(
        rows.features,
        rows.accepted,
        config.nodes.features,
        config.ffn,
        log_kept=rows.log_kept,
        start=start,
        on_epoch=on_epoch,
    )


def shape_of(scorer: Scorer, config: C2TConfig, beta: float) -> ScoredTree:
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


def rule_of(scorer: Scorer, config: C2TConfig) -> Any:
    """The rule that keeps everything, with its scores closed along paths.

    A cap on nodes plays no part in the curve, and a threshold reaches a node only through its
    ancestors, so the running minimum tells what is kept whether the policy takes it or not.
    """
    shape = shape_of(scorer, config, 0.0)
    return build_shape(shape.model_copy(update={"running_min": True, "num_tokens": None}))


def joint_rule(config: C2TConfig) -> Any:
    """The control: the path's probability, thresholded; no second Top-K other than the first."""
    nodes = config.nodes
    return build_shape(JointThreshold(depth=nodes.depth, top_k=nodes.first_top_k, min_prob=0.0))


def with_beta(beta: float | None) -> tuple[float, ...]:
    """The grid of thresholds, with one more where it was asked for."""
    return BETAS if beta is None else tuple(sorted({*BETAS, beta}))


def choose_beta(curve: Curve, config: C2TConfig) -> float:
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
