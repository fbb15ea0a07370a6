"""Logged nodes for fits, and their labelled rows as one table.

A shape grows its trees from the log by the runtime's own code, so the nodes have the features and
scores of a live round. Positions of dense logs and rounds of live ones are treated alike; a live
log holds the drafts of one policy, so other shapes find gaps in it.

**Nodes.** The nodes that a run would score if it ranked by joint probability: `first_top_k`
children of every expanded node, with the `second_top_k` likeliest of each level expanded. A fitted
scorer ranks otherwise, so its own frontier differs a little.

**Labels.** Joint: the whole path to the node was accepted; null is unknown. Conditional: the node
was accepted, among children of accepted nodes.

**Negatives.** All positives are kept, and a uniform share r of the negatives. This multiplies the
odds by 1/r, so the true logit is that of a model fitted to these rows plus log r (below 0):
`NodeRows.log_kept`. The paper's threshold lacks this correction; it compares with ours by
beta' = beta r / (1 - beta + beta r).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.errors import TraceEmptyError, TraceSchemaError, UsageError, check_choice
from specctl.features import NODE_FEATURES, needs_text, node_features
from specctl.logs.logged_draft import logged_drafts
from specctl.logs.parquet import read_columns
from specctl.logs.positions import Bools, Floats, Ints, Singles
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import (
    ENTROPIES,
    TEXT_COLUMNS,
    DenseLog,
    LiveLog,
    Support,
    open_log,
    sampled,
)
from specctl.policy.growing import pool_capacity
from specctl.policy.pruning import PrunedPlan
from specctl.policy.rules import BaseShape, ShapeRule
from specctl.progress import advance
from specctl.records import MAX_POSITIONS_READ
from specctl.tree import DraftPool, gather

SPARE = 2.0
"""Negatives held while reading, over the expected number of wanted ones."""
Names = NDArray[np.object_]


@dataclass(frozen=True)
class NodeBatch:
    """The drafts of a shape at B positions."""

    pool: DraftPool  # candidates, `[B, P]`
    scores: Tensor | None  # `[B, P]` float32 along the path, of a pruning shape; None of others
    submitted: Tensor  # `[B, N]` int64 pool indices, -1 padded
    accepted: Tensor  # `[B, P]` bool, the path is a prefix of the text; true at roots
    known: Tensor  # `[B, P]` bool, `accepted` is known; false in empty slots
    longest: Tensor  # `[B]` int64, draft tokens of the longest accepted path in the log
    num_missing: Tensor  # `[B]` int64, wanted expansions that the log lacks
    prompt_id: Names  # `[B]` text

    @property
    def labelled(self) -> Tensor:
        """`[B, P]` bool: the parent was accepted and the node's acceptance is known."""
        return self.known & gather(self.accepted, self.pool.parent, 0)


@dataclass(frozen=True)
class LoggedNodes:
    """The nodes of a log, read again at each call; `positions` progress."""

    log: DenseLog | LiveLog

    @property
    def support(self) -> Support:
        """The nodes at every position of the log."""
        return self.log.support

    def sizes(self, prompt_ids: Iterable[str] | None = None) -> tuple[int, int]:
        """Positions of some prompts, and the draft tokens accepted there."""
        wanted = None if prompt_ids is None else frozenset(prompt_ids)
        positions = accepted = 0
        for files in self.log.files:
            table = read_columns(files["rounds"], ("prompt_id", "num_accepted"))
            names, counts = table["prompt_id"].to_pylist(), table["num_accepted"].to_numpy()
            inside = np.array([wanted is None or name in wanted for name in names], np.bool_)
            positions += int(inside.sum())
            accepted += int(counts[inside].sum())
        return positions, accepted

    @torch.inference_mode()
    def batches(
        self, rule: ShapeRule, prompt_ids: Iterable[str] | None = None
    ) -> Iterator[NodeBatch]:
        """The drafts of a shape at all positions, in the order of the log.

        Args:
            rule: grows and selects as in a request's first round.
            prompt_ids: prompts to read; None for all.
        """
        log = self.log if prompt_ids is None else self.log.only(prompt_ids)
        for chunk in log.chunks(ENTROPIES + (TEXT_COLUMNS if rule.needs_text else ())):
            prompts = chunk.positions.row_prompts
            for draft in logged_drafts(rule, chunk):
                plan, is_node = draft.plan, draft.pool.valid & (draft.node >= 0)
                known = chunk.known[draft.node.clamp(min=0)] & is_node
                yield NodeBatch(
                    pool=draft.pool,
                    scores=plan.scores if isinstance(plan, PrunedPlan) else None,
                    submitted=draft.submitted,
                    accepted=draft.candidates_on_path & known,
                    known=known,
                    longest=torch.minimum(draft.matched, draft.remaining).long(),
                    num_missing=draft.expansions.missing,
                    prompt_id=prompts[draft.rows],
                )
            advance("positions", len(prompts))


def logged_nodes(
    traces: TraceSet, max_positions: int = MAX_POSITIONS_READ, seed: int = 0
) -> LoggedNodes:
    """The nodes of dense or live traces; of a seeded sample of prompts above `max_positions`.

    Raises:
        TraceError, TraceMismatchError, TraceEmptyError: see `DenseLog.open` and `LiveLog.support`.
    """
    log = sampled(open_log(traces), max_positions, seed)
    _ = log.support  # raises early if the number of children varies
    return LoggedNodes(log)


# ----------------------------------------------------------------- rows


@dataclass(frozen=True)
class NodeRows:
    """M nodes, in the order of the log."""

    features: Singles  # `[M, F]` float32
    accepted: Bools  # `[M]` bool, by the chosen label
    prompt: Ints  # `[M]` int32, codes into the ids
    prompt_ids: tuple[str, ...]
    # num_positives, num_negatives: in the log, before sampling
    num_positives: int
    num_negatives: int
    num_unknown: int  # nodes without a label
    kept_frac: float  # r, the kept share of the negatives

    @property
    def log_kept(self) -> float:
        """log r, to add to the logit of a model fitted to these rows."""
        return math.log(self.kept_frac)

    @property
    def weight(self) -> Floats:
        """`[M]` nodes of the log that each row represents."""
        return np.where(self.accepted, 1.0, 1 / self.kept_frac)

    def take(self, chosen: Bools | NDArray[np.int64]) -> NodeRows:
        """Some rows; counts and `kept_frac` stay."""
        rows = {name: getattr(self, name)[chosen] for name in ("features", "accepted", "prompt")}
        return replace(self, **rows)


def sample_nodes(
    source: LoggedNodes,
    prompt_ids: Iterable[str] | None = None,
    *,
    features: tuple[str, ...],
    predicts: Literal["joint", "conditional"],
    depth: int,
    first_top_k: int,
    second_top_k: int,
    negatives: float,
    seed: int,
) -> NodeRows:
    """Reads a log once and keeps the rows of a fit.

    Args:
        prompt_ids: prompts to read; None for all.
        features: registry names, in the order of the scorer.
        predicts: acceptance of the whole path, or of the node given its parent.
        depth: levels. first_top_k: children of an expanded node. second_top_k: nodes expanded
            per level.
        negatives: per positive; 0 keeps all.

    Raises:
        UsageError: unknown or repeated features.
        TraceSchemaError: features with infinite or missing values, whose columns the log lacks.
        TraceEmptyError: no nodes, or labels of one kind.
    """
    for name in features:
        check_choice("--features", name, sorted(NODE_FEATURES))
    if len(set(features)) < len(features):
        raise UsageError(f"--features names one twice: {', '.join(features)}")
    # Expands by joint probability and submits the root alone.
    text = needs_text(features)
    rule = BaseShape(depth, first_top_k, second_top_k, max_tokens=1, needs_text=text)
    random, counts, prompts = np.random.default_rng(seed), Counter[str](), dict[str, int]()
    below = 1.0  # rejected nodes are kept if their random number is smaller
    if predicts == "joint" and negatives:  # most nodes are below a rejected one
        positions, accepted_tokens = source.sizes(prompt_ids)
        num_nodes = positions * (pool_capacity(rule) - 1)
        below = min(1.0, SPARE * negatives * accepted_tokens / max(1, num_nodes))
    parts: list[tuple[Any, ...]] = []
    for batch in source.batches(rule, prompt_ids):
        wanted = (batch.known if predicts == "joint" else batch.labelled).clone()
        wanted[:, 0] = False  # roots are always submitted
        place = wanted.flatten().nonzero()[:, 0]
        accepted = batch.accepted.flatten()[place].numpy()
        key = random.random(len(place))
        chosen = accepted | (key < below)
        place = place[torch.from_numpy(chosen)]
        row = torch.div(place, wanted.shape[1], rounding_mode="floor").numpy()
        codes = codes_of(batch.prompt_id, prompts)[row]
        parts.append((_features(batch, place, features), accepted[chosen], codes, key[chosen]))
        counts["accepted"] += int(accepted.sum())
        counts["rejected"] += int((~accepted).sum())
        counts["unknown"] += int((batch.pool.valid & ~batch.known).sum())
    size = counts["rejected"]
    if negatives:
        size = min(size, round(negatives * counts["accepted"]))
    if counts["accepted"] == 0 or size == 0:
        found = ", ".join(f"{counts[name]} {name}" for name in ("accepted", "rejected", "unknown"))
        raise TraceEmptyError(
            f"a fit needs accepted and rejected draft tokens; these traces hold {found}",
            hint="collect traces of more prompts, or with another drafter",
        )
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    table, accepted, prompt, key = columns
    rejected = key[~accepted]
    kept = np.ones(len(key), np.bool_)
    if size < len(rejected):
        kept = accepted | (key < np.partition(rejected, size)[size])
    return NodeRows(
        table[kept],
        accepted[kept],
        prompt[kept],
        prompt_ids=tuple(prompts),
        num_positives=counts["accepted"],
        num_negatives=counts["rejected"],
        num_unknown=counts["unknown"],
        kept_frac=int((~accepted[kept]).sum()) / counts["rejected"],
    )


def _features(batch: NodeBatch, place: Tensor, names: tuple[str, ...]) -> Singles:
    features: Singles = node_features(batch.pool, names).flatten(0, 1)[place].numpy()
    if (bad := ~np.isfinite(features).all(0)).any():
        raise TraceSchemaError(
            f"some nodes have no finite value of {', '.join(np.array(names)[bad])}",
            hint="leave these features out, or collect traces that hold them",
        )
    return features


def codes_of(values: Any, known: dict[str, int]) -> Ints:
    """`[M]` codes of names; new names are added to `known`."""
    return np.array([known.setdefault(value, len(known)) for value in values], np.int32)
