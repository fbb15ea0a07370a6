"""Rows to fit a node scorer to, sampled from a log of any size in bounded memory.

**Which nodes.** Those that a run would score if it ranked by joint probability: `first_top_k`
children of every node that was expanded, the `second_top_k` likeliest of each level expanded. A
fitted scorer ranks otherwise, so its own frontier differs a little; drafting again with the
fitted scorer is not done.

**Labels.** Joint: the whole path to the node was accepted, where the log tells (null is not
false). Conditional: the node was accepted, among children of accepted nodes.

**Negatives.** All positives stay, and of the negatives a uniform share r. That multiplies the
odds by 1/r, so a model fitted to these rows says logit + log(1/r), and the true logit is its own
plus log r (below 0): `NodeRows.log_kept`. A threshold found without that correction, as the
paper's, is not comparable with ours: beta' = beta r / (1 - beta + beta r).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from specctl.errors import TraceEmptyError, TraceSchemaError, UsageError
from specctl.features import NODE_FEATURES, needs_text, node_features
from specctl.logs.logged_nodes import LoggedNodes, NodeBatch
from specctl.logs.positions import Bools, Ints
from specctl.policy.rules import BaseShape

Singles = NDArray[np.float32]
LEAST_ROOM = 1 << 20
"""Negatives kept while reading, at least: early shares of positives say little about the final."""
SPARE, SLACK = 2.0, 1.5
"""Negatives kept over those wanted so far, and held over those kept before they are cut."""
ROW_COLUMNS = ("features", "accepted", "depth", "prompt", "category")


@dataclass(frozen=True)
class NodeRows:
    """M nodes, in the order of the log.

    Attributes:
        features: `[M, F]` float32. accepted: `[M]` bool, by the chosen label.
        depth: `[M]` int32. prompt, category: `[M]` int32 codes into the names.
        num_positives, num_negatives: in the log, before sampling.
        num_unknown: nodes that were left out because the log does not tell.
        kept_frac: r, share of the negatives that was kept.
    """

    features: Singles
    accepted: Bools
    depth: Ints
    prompt: Ints
    category: Ints
    prompt_ids: tuple[str, ...]
    categories: tuple[str, ...]
    num_positives: int
    num_negatives: int
    num_unknown: int
    kept_frac: float

    @property
    def log_kept(self) -> float:
        """log r, to be added to the logit of a model that was fitted to these rows."""
        return math.log(self.kept_frac)

    def take(self, chosen: Bools | NDArray[np.int64]) -> NodeRows:
        """Some rows; what was left out and the share kept stay those of the whole."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in ROW_COLUMNS})


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
        max_rows: rows held in memory at most.

    Raises:
        UsageError: unknown or repeated features, or more positives than `max_rows`.
        TraceSchemaError: features that are not finite: the log lacks their columns.
        TraceEmptyError: no nodes, or labels of one kind only.
    """
    unknown = [name for name in features if name not in NODE_FEATURES]
    if unknown or len(set(features)) < len(features):
        raise UsageError(
            "--features",
            expected=f"different names among {', '.join(sorted(NODE_FEATURES))}",
            found=", ".join(unknown or features),
            fix="correct it",
        )
    sample = _Sample(features, predicts, negatives, max_rows, seed)
    rule = frontier_rule(depth, first_top_k, second_top_k, features)
    for batch in source.batches(rule, prompt_ids):
        sample.add(batch)
    return sample.rows()


Columns = dict[str, Any]
"""`ROW_COLUMNS`, `order` (`[m]` int64, place in the log) and `key` (`[m]` float64, random; 0 for
positives) of some rows."""


def _join(parts: list[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _take(block: Columns, chosen: Any) -> Columns:
    return {name: values[chosen] for name, values in block.items()}


class _Sample:
    """All positives and the negatives of the smallest random keys.

    At any time these are a uniform sample of the negatives seen so far, and larger than the one
    that will be wanted unless positives grow much more frequent late in the log. Then fewer are
    kept than were wanted, and the share kept says so.
    """

    def __init__(
        self, features: tuple[str, ...], predicts: str, negatives: float, max_rows: int, seed: int
    ) -> None:
        self.features, self.predicts = features, predicts
        self.negatives, self.max_rows = negatives, max_rows
        self._random = np.random.default_rng(seed)
        self._prompts: dict[str, int] = {}
        self._categories: dict[str, int] = {}
        self._positives: list[Columns] = []
        self._kept: list[Columns] = []
        self._below = 1.0
        self._held = self._num_positives = self._num_negatives = self._num_unknown = 0

    def add(self, batch: NodeBatch) -> None:
        """Takes from a batch; the root is nobody's decision."""
        wanted = (batch.known if self.predicts == "joint" else batch.labelled).clone()
        wanted[:, 0] = False
        place = wanted.flatten().nonzero()[:, 0]
        accepted = batch.accepted.flatten()[place].numpy()
        key = self._random.random(len(place)) * ~accepted
        chosen = key < self._below
        order = self._num_positives + self._num_negatives + np.flatnonzero(chosen)
        block = self._block(batch, place[torch.from_numpy(chosen)], order, key[chosen])
        self._num_positives += int(accepted.sum())
        self._num_negatives += int((~accepted).sum())
        self._num_unknown += int((batch.pool.tree.valid & ~batch.known).sum())
        if self._num_positives >= self.max_rows:
            raise UsageError(
                "--max-rows",
                expected="room for all accepted nodes and for others",
                found=f"{self._num_positives} accepted nodes and more",
                fix="raise it, or give fewer traces",
            )
        self._positives.append(_take(block, block["accepted"]))
        self._kept.append(_take(block, ~block["accepted"]))
        self._held += len(self._kept[-1]["order"])
        room = self._room(max(LEAST_ROOM, int(SPARE * self.negatives * self._num_positives)))
        if self._held > SLACK * room:
            self._cut(room)

    def _block(self, batch: NodeBatch, place: torch.Tensor, order: Any, key: Any) -> Columns:
        features = node_features(batch.pool, self.features).flatten(0, 1)[place].numpy()
        if (bad := ~np.isfinite(features).all(0)).any():
            names = (name for name, is_bad in zip(self.features, bad, strict=True) if is_bad)
            raise TraceSchemaError(
                "node features",
                expected="finite values in every logged node",
                found=f"others in {', '.join(names)}",
                fix="leave these features out, or collect traces that hold them",
            )
        row = torch.div(place, batch.accepted.shape[1], rounding_mode="floor").numpy()
        return {
            "features": features,
            "accepted": batch.accepted.flatten()[place].numpy(),
            "depth": batch.pool.tree.depth.flatten()[place].int().numpy(),
            "prompt": _codes(batch.prompt_id, self._prompts)[row],
            "category": _codes(batch.category, self._categories)[row],
            "order": order,
            "key": key,
        }

    def _room(self, wanted: int) -> int:
        """For negatives: as many as are wanted, or all, and never beyond `max_rows`."""
        room = self.max_rows - self._num_positives
        return room if self.negatives == 0 else min(room, wanted)

    def _cut(self, size: int) -> Columns:
        """Drops all but the `size` negatives of the smallest keys."""
        block = _join(self._kept)
        if len(block["key"]) > size:
            chosen = np.argpartition(block["key"], size)[: size + 1]
            self._below = float(block["key"][chosen].max())
            block = _take(block, chosen[block["key"][chosen] < self._below])
        self._kept, self._held = [block], len(block["key"])
        return block

    def rows(self) -> NodeRows:
        """What was kept, in the order of the log."""
        wanted = round(self.negatives * self._num_positives)
        negatives = self._cut(self._room(wanted)) if self._kept else None
        if self._num_positives == 0 or negatives is None or len(negatives["key"]) == 0:
            raise TraceEmptyError(
                "node labels",
                expected="accepted and rejected draft tokens",
                found=f"{self._num_positives} accepted, {self._num_negatives} rejected, "
                f"{self._num_unknown} unknown",
                fix="collect traces of more prompts, or with another drafter",
            )
        both = _join([*self._positives, negatives])
        both = _take(both, np.argsort(both["order"]))
        return NodeRows(
            **{name: both[name] for name in ROW_COLUMNS},
            prompt_ids=tuple(self._prompts),
            categories=tuple(self._categories),
            num_positives=self._num_positives,
            num_negatives=self._num_negatives,
            num_unknown=self._num_unknown,
            kept_frac=len(negatives["key"]) / self._num_negatives,
        )


def _codes(values: Any, known: dict[str, int]) -> Ints:
    return np.array([known.setdefault(value, len(known)) for value in values], np.int32)
