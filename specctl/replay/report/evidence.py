"""Everything that a report says of traces, read a part at a time.

rounds ──────────────────────────► acceptance by depth and category
nodes ───────────────────────────► confidence of accepted and rejected
trees, replayed (dense) or lived ► TCR, Φ
trees, summarised (dense) ───────► static settings
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from specctl.errors import TraceEmptyError
from specctl.logs.trace_columns import Traces
from specctl.logs.tree_log import DenseLog, Support, support_of
from specctl.policy.records import StaticTree
from specctl.replay.report.confidence import Confidence, count_confidence
from specctl.replay.report.depths import DepthAcceptance, acceptance_by_depth
from specctl.replay.report.heterogeneity import (
    Concentration,
    PhiAcceptance,
    concentration,
    mean_tcr,
    phi_acceptance,
    tau_of,
)
from specctl.replay.report.reference import (
    ReferenceRounds,
    live_reference,
    reference_tree,
    replayed_reference,
)
from specctl.replay.report.rows import NodeBlock, RoundRows, node_blocks, read_rounds
from specctl.replay.report.statics import StaticPoint, settings_of, sweep
from specctl.stats import Interval, Resamples

OnPositions = Callable[[int], None]


@dataclass(frozen=True)
class CategoryFigures:
    """One category of prompts.

    Attributes:
        num_rounds: of the reference. tau: tokens. mean_tcr: rank.
        depths: acceptance of what was drafted in its rounds (dense: at its positions).
    """

    name: str
    num_prompts: int
    num_rounds: int
    tau: Interval
    mean_tcr: Interval
    depths: tuple[DepthAcceptance, ...]


@dataclass(frozen=True)
class Evidence:
    """Figures of one trace set.

    Attributes:
        num_rows: rounds, or positions of dense traces. num_nodes: drafted, roots excluded.
        num_tokens: output tokens of the rounds, or positions.
        support, tree, statics: of dense traces; None or empty for live ones.
        num_reference, num_unsupported: rounds of the reference, and those of which the log lacks
            an expansion.
        concentration, phi: None where no round tells.
    """

    kind: str
    header: Any
    digest: str
    num_prompts: int
    num_rows: int
    num_nodes: int
    support: Support | None
    tree: StaticTree | None
    num_reference: int
    num_unsupported: int
    tau: Interval
    depths: tuple[DepthAcceptance, ...]
    categories: tuple[CategoryFigures, ...]
    concentration: Concentration | None
    phi: PhiAcceptance | None
    confidence: Confidence
    statics: tuple[StaticPoint, ...]


def gather_evidence(
    traces: Traces, *, seed: int = 0, on_positions: OnPositions = lambda _: None
) -> Evidence:
    """Reads a trace set.

    Args:
        seed: of the resamples of prompts behind every interval.
        on_positions: called with the positions of each finished part; see `num_passes`.

    Raises:
        TraceError: see `specctl.errors`.
    """
    rounds = read_rounds(traces)
    depth = _offered_depth(rounds)
    resamples = Resamples.draw(rounds.num_prompts, seed=seed)
    log = DenseLog.open(traces) if rounds.kind == "dense" else None
    tree = None if log is None else reference_tree(log.support)
    if log is None or tree is None:
        reference = live_reference(rounds)
    else:
        reference = replayed_reference(log, tree, rounds, on_positions)
    blocks = _ticked(node_blocks(traces, rounds), on_positions)
    confidence = count_confidence(blocks, rounds.num_prompts, depth, resamples)
    return Evidence(
        kind=rounds.kind,
        header=traces.header,
        digest=traces.digest,
        num_prompts=rounds.num_prompts,
        num_rows=len(rounds.prompt),
        num_nodes=int(rounds.num_drafted.sum(dtype=np.int64)),
        support=None if log is None else log.support,
        tree=tree,
        num_reference=len(reference.accepted),
        num_unsupported=int(reference.is_unsupported.sum()),
        tau=tau_of(reference, rounds.num_prompts, resamples),
        depths=acceptance_by_depth(rounds, resamples),
        categories=tuple(_categories(rounds, reference, resamples)),
        concentration=concentration(reference, rounds.num_prompts, resamples),
        phi=phi_acceptance(reference, rounds.num_prompts, resamples),
        confidence=confidence,
        statics=()
        if log is None
        else tuple(sweep(log, resamples, rounds.prompt_ids, on_positions)),
    )


def num_passes(traces: Traces) -> int:
    """How often `gather_evidence` reports every position: once a pass over the trees."""
    if traces.header.collect.get("dense") is None:
        return 1
    swept = {top_k for top_k, _, _ in settings_of(support_of(traces.header))}
    return 2 + len(swept)


def _offered_depth(rounds: RoundRows) -> int:
    depth = int(rounds.offered_depth.max())
    if depth == 0:
        raise TraceEmptyError(
            "traces",
            expected="rounds with a draft",
            found="plain decoding alone",
            fix="collect with a drafter and a policy that drafts",
        )
    return depth


def _ticked(blocks: Iterator[NodeBlock], on_positions: OnPositions) -> Iterator[NodeBlock]:
    for block in blocks:
        yield block
        on_positions(int((block.depth == 0).sum()))


def _categories(
    rounds: RoundRows, reference: ReferenceRounds, resamples: Resamples
) -> Iterator[CategoryFigures]:
    """By name; prompts without a category go by the empty name."""
    for name, code in sorted((name, code) for code, name in enumerate(rounds.categories)):
        inside = rounds.category == code
        chosen = reference.pick(reference.category == code)
        yield CategoryFigures(
            name,
            len(np.unique(rounds.prompt[inside])),
            len(chosen.accepted),
            tau_of(chosen, rounds.num_prompts, resamples),
            mean_tcr(chosen, rounds.num_prompts, resamples),
            acceptance_by_depth(rounds, resamples, inside),
        )
