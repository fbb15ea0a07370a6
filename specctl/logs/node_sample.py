"""Logged nodes as a fit meets them, and rows sampled from a log of any size in bounded memory.

A shape grows its trees from the log through the runtime's own code, so features and scores of
the nodes are those that a live round would see. Positions of dense logs and rounds of live ones
are alike here; a live log holds what its policy drafted, so any other shape meets gaps in it.

**Which nodes.** Those that a run would score if it ranked by joint probability: `first_top_k`
children of every node that was expanded, the `second_top_k` likeliest of each level expanded. A
fitted scorer ranks otherwise, so its own frontier differs a little; drafting again with the
fitted scorer is not done.

**Labels.** Joint: the whole path to the node was accepted, where the log tells (null is not
false). Conditional: the node was accepted, among children of accepted nodes.

**Negatives.** All positives stay, as far as memory is allowed (`max_rows`), and of the negatives a
uniform share r. That multiplies the odds by 1/r, so a model fitted to these rows says logit +
log(1/r), and the true logit is its own plus log r (below 0): `NodeRows.log_kept`. A threshold found
without that correction, as the paper's, is not comparable with ours: beta' = beta r / (1 - beta +
beta r). Where positives are sampled too, r is the negatives' share over the positives'.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.errors import TraceEmptyError, TraceSchemaError, UsageError, did_you_mean
from specctl.features import NODE_FEATURES, needs_text, node_features
from specctl.logs import logged_draft as drafting
from specctl.logs.logged_draft import logged_draft
from specctl.logs.positions import Bools, Floats, Ints, Singles
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import TEXT_COLUMNS, DenseLog, LiveLog, Support, open_log
from specctl.policy.pruning import PrunedPlan
from specctl.policy.rules import BaseShape, ShapeRule
from specctl.tree import DraftPool, gather

LEAST_ROOM = 1 << 20
"""Negatives kept while reading, at least: early shares of positives say little about the final."""
SPARE, SLACK = 2.0, 1.5
"""Negatives kept over those wanted so far, and rows held over those kept before they are cut."""
ROW_COLUMNS = ("features", "accepted", "prompt")
Names = NDArray[np.object_]


@dataclass(frozen=True)
class NodeBatch:
    """The drafts of a shape at B positions.

    Attributes:
        pool: candidates, `[B, P]`.
        scores: `[B, P]` float32 that a pruning shape gave them, along the path; None of others.
        submitted: `[B, N]` int64 pool indices, -1 padded.
        accepted: `[B, P]` bool, the path is a prefix of the text; the root's is.
        known: `[B, P]` bool, the log tells whether it is; false in empty slots.
        longest: `[B]` int64, draft tokens of the longest path accepted that the log holds.
        num_missing: `[B]` int64, expansions that the shape wanted and the log lacks.
        prompt_id: `[B]` text.
    """

    pool: DraftPool
    scores: Tensor | None
    submitted: Tensor
    accepted: Tensor
    known: Tensor
    longest: Tensor
    num_missing: Tensor
    prompt_id: Names

    @property
    def labelled(self) -> Tensor:
        """`[B, P]` bool: the parent was accepted and the node's own fate is known."""
        return self.known & gather(self.accepted, self.pool.parent, 0)


@dataclass(frozen=True)
class LoggedNodes:
    """The nodes of a log, as often as they are read."""

    log: DenseLog | LiveLog
    num_positions: int
    on_positions: Callable[[int], None] | None = None

    @property
    def support(self) -> Support:
        """The nodes that the log holds at every position."""
        return self.log.support

    @torch.inference_mode()
    def batches(
        self, rule: ShapeRule, prompt_ids: Iterable[str] | None = None
    ) -> Iterator[NodeBatch]:
        """The drafts of a shape at all positions, in the order of the log.

        Args:
            rule: grows and selects as in a request's first round.
            prompt_ids: only these; None for all.
        """
        wanted = None if prompt_ids is None else frozenset(prompt_ids)
        for chunk in self.log.chunks(extra=TEXT_COLUMNS if rule.needs_text else ()):
            prompts = chunk.positions.row_prompts
            longest = torch.from_numpy(np.minimum(chunk.matched, chunk.positions.remaining)).long()
            rows = np.arange(len(prompts))
            if wanted is not None:
                rows = np.flatnonzero([name in wanted for name in prompts])
            for part in drafting.batches(len(rows), drafting.BATCH_POSITIONS):
                index = torch.from_numpy(rows[part])
                draft = logged_draft(rule, chunk, index)
                tree, plan = draft.pool, draft.plan
                known = chunk.known[draft.node.clamp(min=0)] & (draft.node >= 0) & tree.valid
                yield NodeBatch(
                    pool=draft.pool,
                    scores=plan.scores if isinstance(plan, PrunedPlan) else None,
                    submitted=draft.submitted,
                    accepted=draft.candidates_on_path & known,
                    known=known,
                    longest=longest[index],
                    num_missing=draft.expansions.missing,
                    prompt_id=prompts[rows[part]],
                )
            if self.on_positions is not None:
                self.on_positions(len(prompts))


def logged_nodes(
    traces: TraceSet, on_positions: Callable[[int], None] | None = None
) -> LoggedNodes:
    """The nodes of dense or live traces.

    Raises:
        TraceError, TraceMismatchError, TraceEmptyError: see `DenseLog.open` and `LiveLog.support`.
    """
    nodes = LoggedNodes(open_log(traces), traces.num_rows("rounds"), on_positions)
    _ = nodes.support  # refused now where the number of children varies
    return nodes


# ----------------------------------------------------------------- samples

Columns = dict[str, Any]
"""Arrays by name, a row each."""


def _pick(rows: Columns, chosen: Any) -> Columns:
    return {name: values[chosen] for name, values in rows.items()}


class SmallestKeys:
    """The rows of the smallest random numbers: at any time a uniform sample of those added.

    They stand in arrays that grow by doubling: many small ones would leave holes where they were.

    Attributes:
        below: rows need a smaller key than this, or they are cut again.
        num_rows: rows held.
    """

    def __init__(self) -> None:
        """Begins with no rows."""
        self.below, self.num_rows = 1.0, 0
        self._columns: Columns = {}

    def add(self, rows: Columns, most: int) -> None:
        """Adds rows with a column `key`, float64; cuts to `most` where there are many more."""
        size = self.num_rows + len(rows["key"])
        for name, values in rows.items():
            held = self._columns.get(name, values[:0])
            if size > len(held):
                wider = np.empty((2 * size, *values.shape[1:]), values.dtype)
                wider[: self.num_rows] = held[: self.num_rows]
                self._columns[name] = held = wider
            held[self.num_rows : size] = values
        self.num_rows = size
        if size > SLACK * most:
            self.cut(most)

    def cut(self, size: int) -> Columns:
        """Drops all but `size` rows.

        Returns:
            What is kept.
        """
        keys = self._columns["key"][: self.num_rows]
        if self.num_rows > size:
            self.below = float(np.partition(keys, size)[size])
            chosen = np.flatnonzero(keys < self.below)
            for held in self._columns.values():
                held[: len(chosen)] = held[chosen]
            self.num_rows = len(chosen)
        return _pick(self._columns, slice(self.num_rows))


@dataclass(frozen=True)
class NodeRows:
    """M nodes, in the order of the log.

    Attributes:
        features: `[M, F]` float32. accepted: `[M]` bool, by the chosen label.
        prompt: `[M]` int32, codes into the ids.
        num_positives, num_negatives: in the log, before sampling.
        num_unknown: nodes that were left out because the log does not tell.
        kept_frac, accepted_frac: shares of the negatives and of the positives that were kept.
    """

    features: Singles
    accepted: Bools
    prompt: Ints
    prompt_ids: tuple[str, ...]
    num_positives: int
    num_negatives: int
    num_unknown: int
    kept_frac: float
    accepted_frac: float = 1.0

    @property
    def log_kept(self) -> float:
        """log r, to be added to the logit of a model that was fitted to these rows."""
        return math.log(self.kept_frac / self.accepted_frac)

    @property
    def weight(self) -> Floats:
        """`[M]` nodes of the log that a row stands for."""
        return np.where(self.accepted, 1 / self.accepted_frac, 1 / self.kept_frac)

    def take(self, chosen: Bools | NDArray[np.int64]) -> NodeRows:
        """Some rows; what was left out and the share kept stay those of the whole."""
        return replace(self, **_pick({name: getattr(self, name) for name in ROW_COLUMNS}, chosen))


def frontier_rule(
    depth: int, first_top_k: int, second_top_k: int, features: tuple[str, ...] = ()
) -> BaseShape:
    """Expands by joint probability and submits nothing but the root, which nobody looks at."""
    return BaseShape(
        depth, first_top_k, second_top_k, max_tokens=1, needs_text=needs_text(features)
    )


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
    max_rows: int,
    seed: int,
) -> NodeRows:
    """Reads a log once and keeps what a fit needs.

    Args:
        prompt_ids: the prompts to read; None for all.
        features: registry names, in the order that the scorer reads.
        predicts: acceptance of the whole path, or of the node given its parent's.
        depth: levels. first_top_k: children of an expanded node. second_top_k: nodes expanded
            per level.
        negatives: per positive; 0 keeps all.
        max_rows: rows of the sample at most, positives up to half of them or where negatives leave
            room; while reading up to 2.25 times as many are held.

    Raises:
        UsageError: unknown or repeated features.
        TraceSchemaError: features that are not finite: the log lacks their columns.
        TraceEmptyError: no nodes, or labels of one kind only.
    """
    unknown = [name for name in features if name not in NODE_FEATURES]
    if unknown or len(set(features)) < len(features):
        raise UsageError(
            f"--features: expected different names among {', '.join(sorted(NODE_FEATURES))}, "
            f"found {', '.join(unknown or features)}",
            hint=did_you_mean(unknown[0], NODE_FEATURES, "name some of these")
            if unknown
            else "name each once",
        )
    rule = frontier_rule(depth, first_top_k, second_top_k, features)
    random = np.random.default_rng(seed)
    positives, kept, seen = SmallestKeys(), SmallestKeys(), Counter[str]()
    prompts = dict[str, int]()

    def wanted_of(number: float) -> int:
        """Negatives: as many, or all, and never beyond `max_rows`."""
        return max_rows if negatives == 0 else min(max_rows, round(number))

    def most_accepted() -> int:
        """Positives that may still be wanted; it falls as more is seen."""
        size = min(seen["rejected"], wanted_of(negatives * seen["accepted"]))
        return max(max_rows // 2, max_rows - size)

    for batch in source.batches(rule, prompt_ids):
        wanted = (batch.known if predicts == "joint" else batch.labelled).clone()
        wanted[:, 0] = False  # the root is nobody's decision
        place = wanted.flatten().nonzero()[:, 0]
        accepted = batch.accepted.flatten()[place].numpy()
        key = random.random(len(place))
        chosen = key < np.where(accepted, positives.below, kept.below)
        place = place[torch.from_numpy(chosen)]
        row = torch.div(place, wanted.shape[1], rounding_mode="floor").numpy()
        found = {
            "features": _features(batch, place, features),
            "accepted": accepted[chosen],
            "prompt": codes_of(batch.prompt_id, prompts)[row],
            "order": seen["accepted"] + seen["rejected"] + np.flatnonzero(chosen),
            "key": key[chosen],
        }
        seen["accepted"] += int(accepted.sum())
        seen["rejected"] += int((~accepted).sum())
        seen["unknown"] += int((batch.pool.valid & ~batch.known).sum())
        least = wanted_of(max(LEAST_ROOM, int(SPARE * negatives * seen["accepted"])))
        least = min(least, max_rows - min(seen["accepted"], max_rows // 2))
        positives.add(_pick(found, found["accepted"]), most_accepted())
        kept.add(_pick(found, ~found["accepted"]), least)
    size = min(seen["rejected"], wanted_of(negatives * seen["accepted"]))
    if seen["accepted"] == 0 or size == 0:
        counts = ", ".join(f"{seen[name]} {name}" for name in ("accepted", "rejected", "unknown"))
        raise TraceEmptyError(
            f"node labels: expected accepted and rejected draft tokens, found {counts}",
            hint="collect traces of more prompts, or with another drafter",
        )
    num_accepted = min(seen["accepted"], most_accepted())
    parts = [positives.cut(num_accepted), kept.cut(min(size, max_rows - num_accepted))]
    together = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    together = _pick(together, np.argsort(together["order"]))
    return NodeRows(
        **{name: together[name] for name in ROW_COLUMNS},
        prompt_ids=tuple(prompts),
        num_positives=seen["accepted"],
        num_negatives=seen["rejected"],
        num_unknown=seen["unknown"],
        kept_frac=len(parts[1]["key"]) / seen["rejected"],
        accepted_frac=len(parts[0]["key"]) / seen["accepted"],
    )


def _features(batch: NodeBatch, place: Tensor, names: tuple[str, ...]) -> Singles:
    features: Singles = node_features(batch.pool, names).flatten(0, 1)[place].numpy()
    if (bad := ~np.isfinite(features).all(0)).any():
        raise TraceSchemaError(
            "node features: expected finite values in every logged node, found others in "
            f"{', '.join(np.array(names)[bad])}",
            hint="leave these features out, or collect traces that hold them",
        )
    return features


def codes_of(values: Any, known: dict[str, int]) -> Ints:
    """`[M]` codes of names, of which new ones join the known."""
    return np.array([known.setdefault(value, len(known)) for value in values], np.int32)
