"""What a ladder is made of: everything that is read from the log, in a few passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specctl.logs.node_table import sample_labelled
from specctl.logs.positions import Bools, Ints, Positions
from specctl.logs.tree_log import DenseLog, Support
from specctl.policy.records import Policy, RootOnly
from specctl.replay.config import Tick
from specctl.replay.ladder.config import LadderConfig
from specctl.replay.ladder.estimates import Estimate, Estimates, fit_estimates
from specctl.replay.ladder.ranking import Ranked, rank_log
from specctl.replay.ladder.static import swept_widths
from specctl.replay.rounds import Rounds, replay
from specctl.replay.summary import Summary, summarise
from specctl.stats import Split

PLAIN = Policy(shape=RootOnly())


@dataclass(frozen=True)
class Material:
    """What was read from the log, whole."""

    summaries: dict[int, Summary]
    ranked: dict[tuple[str, int], Ranked]
    matched: Ints
    runs: list[tuple[str, Rounds]]
    estimates: Estimates
    train: Bools
    support: Support

    @property
    def positions(self) -> Positions:
        return next(iter(self.summaries.values())).positions


def read_material(
    log: DenseLog,
    policies: Sequence[tuple[str, Policy]],
    sides: Split,
    config: LadderConfig,
    tick: Tick,
    *,
    is_sampled: bool,
) -> Material:
    """All passes over the log."""
    widths = swept_widths(log.support)
    sample = sample_labelled(log, num_nodes=config.num_nodes, seed=config.seed, on_positions=tick)
    estimates = fit_estimates(
        sample,
        frozenset(sides.train),
        num_folds=config.num_folds,
        is_sampled=is_sampled,
        seed=config.seed,
    )
    named: dict[str, Estimate] = {"features": estimates.features, "oracle": estimates.oracle}
    ranked, matched = rank_log(log, named, widths, num_kept=config.num_kept, on_positions=tick)
    summaries = {
        width: summarise(log, top_k=width, num_kept=config.num_kept, on_positions=tick)
        for width in widths
    }
    all_of = [PLAIN, *(policy for _, policy in policies)]
    runs = replay(log, all_of, with_bounds=False, on_positions=tick)
    labels = ["ar", *(label for label, _ in policies)]
    positions = summaries[widths[0]].positions
    train = np.isin(np.array(positions.prompt_ids)[positions.prompt], sides.train)
    pairs = list(zip(labels, runs, strict=True))
    return Material(summaries, ranked, matched, pairs, estimates, train, log.support)


def num_reads(log: DenseLog) -> int:
    """Positions that `read_material` reports, over all its passes."""
    return log.num_positions * (3 + len(swept_widths(log.support)))
