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

from specctl.policy.records import FfnScorer, Policy, ScoredTree, Scorer
from specctl.train.c2t_config import C2TConfig
from specctl.train.c2t_report import C2TReport, build_report
from specctl.train.ffn import train_ffn
from specctl.train.nodes import NodeRows, NodeSource
from specctl.train.scored_fit import Judged, Sides, judge, read_sides, shape_of

__all__ = ["C2TConfig", "C2TFit", "fit_c2t"]
OnStage = Callable[[str], Any]


@dataclass(frozen=True)
class C2TFit:
    """A fitted policy and what is known of it.

    Attributes:
        sides: prompts and sampled rows; the ONNX twin is checked on the held-out ones.
        judged: what thresholds keep.
    """

    policy: Policy
    config: C2TConfig
    report: C2TReport
    sides: Sides
    judged: Judged

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

    Reads the log `scored_fit.NUM_PASSES` times.

    Args:
        on_stage: told what begins.

    Raises:
        UsageError: options that contradict each other or the log's support, a beta that keeps
            nothing, a recall that no beta reaches, training that diverged.
        TraceSchemaError: features that are not finite in the log.
        TraceEmptyError: too few prompts, or labels of one kind.
    """
    say = on_stage or (lambda stage: None)
    say("sampling nodes")
    sides = read_sides(source, prompt_ids, config)
    say("training the network")
    scorer = fit_scorer(sides.train, config, on_epoch=on_epoch)
    say("choosing beta, judging on held-out prompts")
    judged = judge(source, scorer, config, sides.split)
    policy = Policy(shape=shape_of(scorer, config, judged.beta))
    return C2TFit(policy, config, build_report(config, scorer, sides, judged), sides, judged)


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
