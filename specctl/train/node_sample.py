"""Sampling logged nodes in bounded memory: all positives, a uniform share of the negatives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.errors import TraceEmptyError, TraceSchemaError, UsageError
from specctl.features import node_features
from specctl.train.nodes import (
    Bools,
    Codes,
    NodeBatch,
    NodeConfig,
    NodeRows,
    NodeSource,
    Singles,
    check_features,
    frontier_rule,
)

LEAST_ROOM = 1 << 20
"""Negatives kept while reading, at least: early shares of positives say little about the final."""
SPARE, SLACK = 2.0, 1.5
"""Negatives kept over those wanted so far, and held over those kept before they are cut."""


def sample_nodes(
    source: NodeSource, config: NodeConfig, prompt_ids: Iterable[str] | None = None
) -> NodeRows:
    """Reads a log once and keeps what a fit needs.

    Args:
        prompt_ids: the prompts to read; None for all.

    Raises:
        UsageError: unknown features, or more positives than `max_rows`.
        TraceSchemaError: features that are not finite: the log lacks their columns.
        TraceEmptyError: no nodes, or labels of one kind only.
    """
    check_features(config.features)
    sample = _Sample(config)
    for batch in source.batches(frontier_rule(config), prompt_ids):
        sample.add(batch)
    return sample.rows()


@dataclass
class _Names:
    """Codes of prompts and categories in order of appearance."""

    prompts: dict[str, int] = field(default_factory=dict)
    categories: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Block:
    """Rows of one batch, or of several.

    Attributes:
        order: `[m]` int64, place in the log. key: `[m]` float64, random; 0 for positives.
    """

    features: Singles
    accepted: Bools
    depth: Codes
    prompt: Codes
    category: Codes
    order: NDArray[np.int64]
    key: NDArray[np.float64]

    def take(self, chosen: Any) -> _Block:
        return _Block(*(getattr(self, f.name)[chosen] for f in fields(self)))

    @staticmethod
    def join(parts: list[_Block]) -> _Block:
        names = [f.name for f in fields(_Block)]
        return _Block(*(np.concatenate([getattr(part, n) for part in parts]) for n in names))


class _Sample:
    """All positives and the negatives of the smallest random keys.

    At any time these are a uniform sample of the negatives seen so far, and larger than the one
    that will be wanted unless positives grow much more frequent late in the log. Then fewer are
    kept than were asked for, and the share kept says so.
    """

    def __init__(self, config: NodeConfig) -> None:
        self.config, self.names = config, _Names()
        self._random = np.random.default_rng(config.seed)
        self._positives: list[_Block] = []
        self._negatives: list[_Block] = []
        self._below = 1.0
        self._held = self._num_positives = self._num_negatives = self._num_unknown = 0

    def add(self, batch: NodeBatch) -> None:
        """Takes from a batch; the root is nobody's decision."""
        wanted = (batch.known if self.config.predicts == "joint" else batch.labelled).clone()
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
        self._check_room()
        self._keep(block)

    def _block(self, batch: NodeBatch, place: Tensor, order: Any, key: Any) -> _Block:
        features = node_features(batch.pool, self.config.features).flatten(0, 1)[place].numpy()
        _check_finite(features, self.config)
        row = torch.div(place, batch.accepted.shape[1], rounding_mode="floor").numpy()
        return _Block(
            features,
            batch.accepted.flatten()[place].numpy(),
            batch.pool.tree.depth.flatten()[place].int().numpy(),
            _codes(batch.prompt_id, self.names.prompts)[row],
            _codes(batch.category, self.names.categories)[row],
            order,
            key,
        )

    def _keep(self, block: _Block) -> None:
        self._positives.append(block.take(block.accepted))
        self._negatives.append(block.take(~block.accepted))
        self._held += len(self._negatives[-1].order)
        likely = int(SPARE * self.config.negatives * self._num_positives)
        room = self._room(max(LEAST_ROOM, likely))
        if self._held > SLACK * room:
            self._cut(room)

    def _room(self, wanted: int) -> int:
        """For negatives: what is wanted, or all, and never beyond `max_rows`."""
        room = self.config.max_rows - self._num_positives
        return room if self.config.negatives == 0 else min(room, wanted)

    def _cut(self, size: int) -> _Block:
        """Drops all but the `size` negatives of the smallest keys."""
        block = _Block.join(self._negatives)
        if len(block.key) > size:
            chosen = np.argpartition(block.key, size)[: size + 1]
            self._below = float(block.key[chosen].max())
            block = block.take(chosen[block.key[chosen] < self._below])
        self._negatives, self._held = [block], len(block.key)
        return block

    def _check_room(self) -> None:
        if self._num_positives >= self.config.max_rows:
            raise UsageError(
                "--max-rows",
                expected="room for all accepted nodes and for others",
                found=f"{self._num_positives} accepted nodes and more",
                fix="raise it, or give fewer traces",
            )

    def rows(self) -> NodeRows:
        """What was kept, in the order of the log."""
        wanted = round(self.config.negatives * self._num_positives)
        negatives = self._cut(self._room(wanted)) if self._negatives else None
        if self._num_positives == 0 or negatives is None or len(negatives.key) == 0:
            raise _one_kind(self._num_positives, self._num_negatives, self._num_unknown)
        both = _Block.join([*self._positives, negatives])
        both = both.take(np.argsort(both.order))
        return NodeRows(
            features=both.features,
            accepted=both.accepted,
            depth=both.depth,
            prompt=both.prompt,
            category=both.category,
            prompt_ids=tuple(self.names.prompts),
            categories=tuple(self.names.categories),
            num_positives=self._num_positives,
            num_negatives=self._num_negatives,
            num_unknown=self._num_unknown,
            kept_frac=len(negatives.key) / self._num_negatives,
        )


def _codes(values: Any, known: dict[str, int]) -> Codes:
    return np.array([known.setdefault(value, len(known)) for value in values], np.int32)


def _check_finite(features: Singles, config: NodeConfig) -> None:
    bad = ~np.isfinite(features).all(0)
    if bad.any():
        found = ", ".join(name for name, is_bad in zip(config.features, bad, strict=True) if is_bad)
        raise TraceSchemaError(
            "node features",
            expected="finite values in every logged node",
            found=f"others in {found}",
            fix="leave these features out, or collect traces that hold them",
        )


def _one_kind(num_positives: int, num_negatives: int, num_unknown: int) -> Exception:
    return TraceEmptyError(
        "node labels",
        expected="accepted and rejected draft tokens",
        found=f"{num_positives} accepted, {num_negatives} rejected, {num_unknown} unknown",
        fix="collect traces of more prompts, or with another drafter",
    )
