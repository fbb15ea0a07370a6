"""The parameter buffer: a policy's parameters as one flat tensor, overwritten in place.

    words 0..31     int32 header: kind, counts, flags, and from word 16 on a column for each feature
    words 32..      float32 tables of the kind, and int32 ones as bits

A captured graph reads the buffer at every replay, so its content may change between two rounds
without a new capture. Number of bins, hidden size and features may change too, as the buffer has
room for the largest. Policies of one `Layout` fit one buffer; another layout needs other launches.
Widths, levels and sizes are arguments of the launches.
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
Combine = Literal["none", "min", "add"]
COLUMNS = (
    "joint_prob", "joint_logp", "draft_logp", "parent_entropy", "parent_topk_entropy", "depth",
    "sibling_rank",
)  # fmt: skip
"""Node features that the kernel computes from a pool, by `specctl.features` name."""
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
    """E ascending float32, nats; bin i holds values above edge i - 1 up to edge i."""
    depths: Sequence[int]  # `E + 1`, levels of every bin
    tokens: Sequence[int]  # `E + 1`, size of every bin
    first_depth: int  # levels after which the bin is chosen
    conditional: bool = False  # Φ of the best conditional probability, not of the best joint one


@dataclass(frozen=True)
class GateTable:
    """ECHO's gates."""

    bars: Mapping[int, float]  # level to float32, nats, below which its gate closes
    first_depth: int  # levels at most


@dataclass(frozen=True)
class Network:
    """`w2 · relu(w1 · x + b1) + b2`, a log-odds."""

    columns: tuple[str, ...]  # names of its F features, of `COLUMNS`, in order
    w1: NDArray[Any]  # `[F, H]`
    b1: NDArray[Any]  # `[H]`
    w2: NDArray[Any]  # `[H]`
    b2: float


@dataclass(frozen=True)
class PruneTable:
    """A score that prunes while the tree grows: C2T, or a plain threshold."""

    min_score: float  # float32; below it a node is neither expanded nor submitted
    combine: Combine = "none"  # with the parent's score: none, the minimum, or the sum
    keep_leaves: bool = True  # nodes outside the best of their level may be submitted
    network: Network | None = None  # of a node's score; else it is its path's log-probability


Table = BinTable | GateTable | PruneTable


@dataclass(frozen=True)
class Layout:
    """The properties of a buffer that a captured graph depends on."""

    kind: Kind
    has_network: bool = False


@dataclass(frozen=True)
class PolicyBuffer:
    """A policy's parameters on a device."""

    layout: Layout
    storage: Tensor  # `[words]` float32, see the module

    @property
    def header(self) -> Tensor:
        """Views the memory as int32."""
        return self.storage.view(torch.int32)

    @property
    def min_score(self) -> Tensor:
        """`[1]` float32 view of a `pruned` buffer, so that a graph reads the next policy's."""
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
        return PolicyBuffer(self.layout, self.storage.to(device, copy=True))


def layout_of(table: Table) -> Layout:
    if isinstance(table, BinTable):
        return Layout("bins")
    if isinstance(table, GateTable):
        return Layout("gates")
    return Layout("pruned", has_network=table.network is not None)


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
    _require(1 <= size <= MAX_EDGES, f"{size} edges, not 1 to {MAX_EDGES}")
    _require(bool((np.diff(edges) > 0).all()), f"edges do not ascend: {table.edges}")
    num_depths, num_tokens = len(table.depths), len(table.tokens)
    fits = num_depths == num_tokens == size + 1
    _require(fits, f"{num_depths} depths and {num_tokens} tokens for {size + 1} bins")
    header[FIRST_DEPTH], header[NUM_EDGES] = table.first_depth, size
    header[CONDITIONAL] = table.conditional
    words[EDGES : EDGES + size] = edges
    header[BIN_DEPTHS : BIN_DEPTHS + size + 1] = table.depths
    header[BIN_TOKENS : BIN_TOKENS + size + 1] = table.tokens


def _pack_gates(table: GateTable, header: NDArray[np.int32], words: NDArray[np.float32]) -> None:
    levels = list(table.bars)
    fits = all(1 <= level <= MAX_LEVELS for level in (*levels, table.first_depth))
    _require(fits, f"a level of {(*levels, table.first_depth)} is not 1 to {MAX_LEVELS}")
    header[FIRST_DEPTH] = table.first_depth
    words[BARS:] = -np.inf  # nothing is below it: no gate
    words[[BARS + level for level in levels]] = _exact("gates", list(table.bars.values()))


def _pack_pruning(table: PruneTable, header: NDArray[np.int32], words: NDArray[np.float32]) -> None:
    header[COMBINE], header[KEEP_LEAVES] = COMBINES.index(table.combine), table.keep_leaves
    words[MIN_SCORE] = _exact("min_score", [table.min_score])[0]
    if table.network is None:
        return
    network, (features, hidden) = table.network, table.network.w1.shape
    _require(1 <= features <= MAX_FEATURES, f"{features} features, not 1 to {MAX_FEATURES}")
    _require(1 <= hidden <= MAX_HIDDEN, f"{hidden} hidden units, not 1 to {MAX_HIDDEN}")
    found = (len(network.columns), len(network.b1), len(network.w2))
    _require(found == (features, hidden, hidden), f"arrays of {found} entries do not fit w1")
    header[NUM_FEATURES], header[NUM_HIDDEN] = features, hidden
    header[FEATURES : FEATURES + features] = [COLUMNS.index(name) for name in network.columns]
    rows = words[W1:B1].reshape(MAX_FEATURES, MAX_HIDDEN)
    rows[:features, :hidden] = network.w1
    words[B1 : B1 + hidden], words[W2 : W2 + hidden] = network.b1, network.w2
    words[B2] = network.b2


def _exact(what: str, values: Sequence[float]) -> NDArray[np.float32]:
    """float32 thresholds, which must be exact: rounding here would change decisions."""
    rounded = np.array(values, np.float32)
    same = bool((rounded.astype(np.float64) == np.array(values, np.float64)).all())
    _require(same, f"{what} are not float32: {values}")
    return rounded


def _require(holds: bool, problem: str) -> None:  # noqa: FBT001
    if not holds:
        raise UsageError(
            f"policy without a parameter buffer: {problem}",
            hint="decide by the torch rule, or correct the policy",
        )
