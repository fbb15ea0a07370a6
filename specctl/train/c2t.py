"""`fit c2t`: a two-layer network that prunes draft trees (arXiv:2502.13652).

Readings of the paper follow notes/state-of-the-art.md, section 6: split by prompt, all positives
and a share of the negatives with the bias corrected for it, acceptance given the parent's
multiplied along the path. `predicts="joint"` is the paper's label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from specctl.logs.node_sample import LoggedNodes, NodeRows
from specctl.policy import FfnScorer
from specctl.train.configs import C2TConfig
from specctl.train.ffn import train_ffn
from specctl.train.publish import Fit
from specctl.train.scored import (
    ScoredReport,
    judge,
    read_sides,
    scored_figures,
    scored_fit,
    scored_report,
)


def fit_c2t(
    source: LoggedNodes,
    prompt_ids: Iterable[str],
    config: C2TConfig,
    *,
    on_epoch: Callable[[int], None] | None = None,
) -> Fit[ScoredReport]:
    """Fits the network on training prompts, chooses beta there, reports on held-out ones.

    Reads the log `scored.NUM_PASSES` times.

    Raises:
        UsageError: options that contradict each other or the log's support, a beta that keeps
            nothing, a recall that no beta reaches, training that diverged.
        TraceSchemaError: features that are not finite in the log.
        TraceEmptyError: too few prompts, or labels of one kind.
    """
    sides = read_sides(source, prompt_ids, config)
    scorer = fit_network(sides.train, config, on_epoch=on_epoch)
    judged = judge(source, scorer, config, sides.split)
    data = ScoredReport(**scored_figures(config, scorer, sides, judged))
    train, nodes = data.sides["train"], config.nodes
    first = (
        f"{nodes.predicts} acceptance from {', '.join(nodes.features)}; hidden {config.ffn.hidden};"
        f" {train.num_accepted} accepted nodes and {train.kept_frac:.1%} of {train.num_rejected} "
        f"rejected ones from {train.num_prompts} prompts"
    )
    network = f"A network of {config.ffn.hidden} hidden units"
    report = scored_report(
        data, kind="c2t", title="C2T policy", scorer=network, first=(first,), tables=()
    )
    return scored_fit(scorer, config, judged.beta, sides, report)


def fit_network(
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
