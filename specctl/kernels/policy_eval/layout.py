"""The parameter buffer: what a policy learned, as one flat tensor that can be overwritten in place.

    words 0..31     int32 header: kind, counts, flags, and from word 16 on a column for each feature
    words 32..      float32 tables of the kind, and int32 ones as bits

A captured graph reads the buffer when it is replayed. So whatever stands in it may change between
two rounds without a new capture, number of bins, hidden size and features included: room is kept
for the largest. Two policies whose `Layout` is equal fit the same buffer; another layout means
other launches. What is no parameter at all (widths, levels, sizes) is the launcher's, not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.errors import UsageError

Kind = Literal["bins", "gates", "pruned"]
Own = Literal["joint", "network", "given"]
Combine = Literal["none", "min", "add"]
COLUMNS = (
    "joint_prob", "joint_logp", "draft_logp", "parent_entropy", "parent_topk_entropy", "depth",
    "sibling_rank",
)  # fmt: skip
"""Node features that the kernel computes from a pool, by `specctl.features` name; any other comes
as a column of its own."""
MAX_EDGES, MAX_LEVELS, MAX_FEATURES, MAX_HIDDEN = 255, 64, 16, 64

# Words of the header.
KIND, FIRST_DEPTH, NUM_EDGES, CONDITIONAL = 0, 1, 2, 3
NUM_FEATURES, NUM_HIDDEN, COMBINE, KEEP_LEAVES = 4, 5, 6, 7
FEATURES, HEADER_WORDS = 16, 32
# Words of the tables.
EDGES = HEADER_WORDS
BIN_DEPTHS = EDGES + MAX_EDGES + 1
BIN_TOKENS = BIN_DEPTHS + MAX_EDGES + 1
BARS = HEADER_WORDS
MIN_SCORE = HEADER_WORDS
W1 = MIN_SCORE + 1
B1 = W1 + MAX_FEATURES * MAX_HIDDEN
W2 = B1 + MAX_HIDDEN
B2 = W2 + MAX_HIDDEN
SIZES: dict[Kind, int] = {
    "bins": BIN_TOKENS + MAX_EDGES + 1,
    "gates": BARS + MAX_LEVELS + 1,
    "pruned": B2 + 1,
}
KINDS: tuple[Kind, ...] = ("bins", "gates", "pruned")
COMBINES: tuple[Combine, ...] = ("none", "min", "add")


@dataclass(frozen=True)
class BinTable:
    """HeteroSpec's bins of Φ."""

    edges: Sequence[float]
    """E ascending float32, nats; bin i holds what is above i of them, an edge itself going
    left."""
    depths: Sequence[int]
    tokens: Sequence[int]  # `depths`, `tokens`: `E + 1` each, levels and size of every bin
    first_depth: int  # levels after which the bin is chosen
    conditional: bool = False
    """Φ is read where the best conditional probability ends, not the best joint one."""


@dataclass(frozen=True)
class GateTable:
    """ECHO's gates."""

    bars: Mapping[int, float]  # level to float32, nats, below which its gate closes
    first_depth: int  # levels at most


@dataclass(frozen=True)
class Network:
    """`w2 · relu(w1 · x + b1) + b2`, a log-odds."""

    columns: tuple[str, ...]  # F names of what it reads, in order
    w1: NDArray[Any]  # `[F, H]`
    b1: NDArray[Any]
    w2: NDArray[Any]  # `b1`, `w2`: `[H]`
    b2: float  # a number

    @property
    def extra(self) -> tuple[str, ...]:
        """Names that the kernel cannot compute."""
        return tuple(name for name in self.columns if name not in COLUMNS)


@dataclass(frozen=True)
class PruneTable:
    """A score that prunes while the tree grows: C2T, or a plain threshold."""

    min_score: float  # float32; below it a node is neither expanded nor submitted
    own: Own = "joint"
    """Whose score: the path's log-probability, a network's, or one that comes from elsewhere."""
    combine: Combine = "none"  # with the parent's: not at all, the lesser, or the sum
    keep_leaves: bool = True  # a node that is not among the best of its level may be submitted
    network: Network | None = None


Table = BinTable | GateTable | PruneTable


@dataclass(frozen=True)
class Layout:
    """The properties of the buffer that a captured graph relies on."""

    kind: Kind
    own: Own = "joint"  # see `PruneTable`; `joint` for other kinds
    extra: tuple[str, ...] = ()  # columns that come from outside


@dataclass(frozen=True)
class PolicyBuffer:
    """A policy's parameters on a device."""

    layout: Layout
    storage: Tensor  # `[words]` float32, see the module

    @property
    def header(self) -> Tensor:
        """The same memory as int32."""
        return self.storage.view(torch.int32)

    @property
    def min_score(self) -> Tensor:
        """`[1]` float32 of a `pruned` buffer, a part of it: a graph sees the next policy's."""
        return self.storage[MIN_SCORE : MIN_SCORE + 1]

    def write(self, packed: PolicyBuffer) -> None:
        """Overwrites the parameters in place, in stream order."""
        if packed.layout != self.layout:
            raise UsageError(
                f"the parameter buffer is of layout {self.layout}, the policy of {packed.layout}",
                hint="capture the graphs again with a buffer for this policy",
            )
        self.storage.copy_(packed.storage, non_blocking=True)

    def to(self, device: torch.device | str) -> PolicyBuffer:
        """A copy on the device."""
        return PolicyBuffer(self.layout, self.storage.to(device, copy=True))


def layout_of(table: Table) -> Layout:
    """The layout that a policy needs."""
    if isinstance(table, BinTable):
        return Layout("bins")
    if isinstance(table, GateTable):
        return Layout("gates")
    return Layout("pruned", table.own, table.network.extra if table.network else ())


def pack(table: Table) -> PolicyBuffer:
    """The buffer of a policy, on the CPU."""
    layout = layout_of(table)
    words = np.zeros(SIZES[layout.kind], np.float32)
    header = words.view(np.int32)
    header[KIND] = KINDS.index(layout.kind)
    if isinstance(table, BinTable):
        _pack_bins(table, header, words)
    elif isinstance(table, GateTable):
        _pack_gates(table, header, words)
    else:
        _pack_pruning(table, header, words)
    return PolicyBuffer(layout, torch.from_numpy(words))


def _pack_bins(table: BinTable, header: NDArray[np.int32], words: NDArray[np.float32]) -> None:
    edges, size = _exact("edges", table.edges), len(table.edges)
    _require("edges", 1 <= size <= MAX_EDGES, f"1 to {MAX_EDGES}", size)
    _require("edges", bool((np.diff(edges) > 0).all()), "ascending ones", table.edges)
    found = (len(table.depths), len(table.tokens))
    _require("bins", found == (size + 1, size + 1), f"{size + 1} depths and tokens", found)
    header[FIRST_DEPTH], header[NUM_EDGES] = table.first_depth, size
    header[CONDITIONAL] = table.conditional
    words[EDGES : EDGES + size] = edges
    header[BIN_DEPTHS : BIN_DEPTHS + size + 1] = table.depths
    header[BIN_TOKENS : BIN_TOKENS + size + 1] = table.tokens


def _pack_gates(table: GateTable, header: NDArray[np.int32], words: NDArray[np.float32]) -> None:
    levels = list(table.bars)
    fits = all(1 <= level <= MAX_LEVELS for level in (*levels, table.first_depth))
    _require("gates", fits, f"levels of 1 to {MAX_LEVELS}", (*levels, table.first_depth))
    header[FIRST_DEPTH] = table.first_depth
    words[BARS:] = -np.inf  # nothing is below it: no gate
    words[[BARS + level for level in levels]] = _exact("gates", list(table.bars.values()))


def _pack_pruning(table: PruneTable, header: NDArray[np.int32], words: NDArray[np.float32]) -> None:
    has_network = table.network is not None
    _require("own", has_network == (table.own == "network"), "a network iff it scores", table.own)
    header[COMBINE], header[KEEP_LEAVES] = COMBINES.index(table.combine), table.keep_leaves
    words[MIN_SCORE] = _exact("min_score", [table.min_score])[0]
    if table.network is None:
        return
    network, (features, hidden) = table.network, table.network.w1.shape
    _require("features", 1 <= features <= MAX_FEATURES, f"1 to {MAX_FEATURES}", features)
    _require("hidden units", 1 <= hidden <= MAX_HIDDEN, f"1 to {MAX_HIDDEN}", hidden)
    found = (len(network.columns), len(network.b1), len(network.w2))
    _require("network", found == (features, hidden, hidden), "arrays that fit w1", found)
    header[NUM_FEATURES], header[NUM_HIDDEN] = features, hidden
    columns = (*COLUMNS, *network.extra)
    header[FEATURES : FEATURES + features] = [columns.index(name) for name in network.columns]
    rows = words[W1:B1].reshape(MAX_FEATURES, MAX_HIDDEN)
    rows[:features, :hidden] = network.w1
    words[B1 : B1 + hidden], words[W2 : W2 + hidden] = network.b1, network.w2
    words[B2] = network.b2


def _exact(what: str, values: Sequence[float]) -> NDArray[np.float32]:
    """float32 of thresholds that are float32 already; another rounding would move decisions."""
    rounded = np.array(values, np.float32)
    same = bool((rounded.astype(np.float64) == np.array(values, np.float64)).all())
    _require(what, same, "float32 numbers, rounded as the rules do", values)
    return rounded


def _require(what: str, holds: bool, expected: str, found: object) -> None:  # noqa: FBT001
    if not holds:
        raise UsageError(
            f"parameter buffer, {what}: expected {expected}, found {found}",
            hint="decide by the torch rule, or correct the policy",
        )
