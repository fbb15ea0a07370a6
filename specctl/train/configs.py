"""Settings of the fit of each family. A field with a description is an option of `specctl fit ...`.

`specctl.cli.verbs` makes the command line from these models, so name, type, bounds, default and
help of an option are defined here only. Does not import torch.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from specctl.errors import UsageError
from specctl.policy import (
    AcceptanceTable,
    Budget,
    ElasticBudget,
    JensenShannon,
    PerRequest,
    SparseGates,
    StaticTree,
)
from specctl.policy.family import MAX_DEPTH, Acceptance, Depth, NumTokens, TopK
from specctl.policy.mars import Mars
from specctl.records import (
    HELD_OUT,
    MAX_POSITIONS,
    PositiveInt,
    Probability,
    Record,
    option,
    require,
)
from specctl.runtime.config import DecodingConfig

Seed = Annotated[int, Field(ge=0, lt=2**32)]
SEED: int = option(0, "Seed of the split by prompt and of all that draws")


class FitConfig(Record):
    """Settings of a fit to traces."""

    max_positions: int = MAX_POSITIONS
    held_out_frac: float = HELD_OUT
    seed: Seed = SEED

    @classmethod
    def fields_for(cls, support: Any, seed: int, predicts: str = "conditional") -> dict[str, Any]:
        """Fields that depend on the traces' support, on the seed and on the label."""
        return {}


def check_sizes(*sizes: tuple[str, int, int]) -> None:
    """Raises `UsageError` for an option larger than the traces' support."""
    for flag, wanted, held in sizes:
        if wanted > held:
            raise UsageError(
                f"{flag} {wanted} is more than the traces hold, {held}",
                hint="lower it, or collect deeper or wider (--depth, --children)",
            )


# --------------------------------------------------------------------------- HeteroSpec's bins


class CartConfig(FitConfig):
    """Settings for fitting HeteroSpec's bins; see also `EntropyBins`."""

    base: StaticTree = StaticTree()
    """The tree that the traces were drafted with and that the policy extends."""
    label: Literal["tcr", "accepted"] = option(
        "tcr",
        "Label: tcr, rank of the deepest accepted node (paper), or accepted, draft tokens",
    )
    filter: Literal["fully_accepted", "all"] = option(
        "fully_accepted", "Rounds to fit to: fully_accepted (paper) or all"
    )
    algorithm: Literal["cart", "printed"] = option(
        "cart",
        "How bins are cut, greedily: cart, or printed (by the paper's Eq. 2, which weighs a side's "
        "squared error by its share once more)",
    )
    path: Literal["cumulative", "conditional"] = option(
        "cumulative",
        "End of the path that Φ is summed along: the node of the deepest level with the highest "
        "cumulative, or highest own (conditional, paper), probability",
    )
    max_leaf_depth: int = option(
        3, "Tree levels; 3 give 8 bins (paper)", ge=1, le=5, group="common"
    )
    gammas: tuple[Annotated[float, Field(gt=0.0, le=4.0)], ...] = option(
        (0.3, 0.6, 1.0), "Size factor of each low-entropy bin, comma-separated", group="common"
    )
    alpha: Annotated[int, Field(ge=0, le=MAX_DEPTH)] | None = option(
        None, "Extra levels of the first bin", default="ceil(depth / 2)"
    )
    index_base: Literal[0, 1] = option(
        0, "Extra levels of the first bin: alpha (0) or alpha - 1 (1)"
    )
    cap_tokens: bool = option(False, "Never submit more than the base size")
    min_rows: PositiveInt = option(5, "Fewest rounds in a bin")


# --------------------------------------------------------------------------- node scorers

DEFAULT_FEATURES = {
    "joint": ("joint_prob", "parent_entropy", "depth"),
    "conditional": ("draft_logp", "parent_entropy", "depth"),
}
"""By label: the paper's three, and for acceptance given the parent the token's own probability,
since the path's hardly differs between siblings far from the root."""


class NodeConfig(Record):
    """The logged nodes to fit to, and their features."""

    features: tuple[str, ...] = option(
        DEFAULT_FEATURES["conditional"],
        "Node features, comma-separated",
        default="draft_logp,parent_entropy,depth; joint_prob for draft_logp if joint (paper)",
        min_length=1,
        group="common",
    )
    predicts: Literal["joint", "conditional"] = option(
        "conditional",
        "conditional (given the parent, multiplied along paths) or joint (paper)",
        group="common",
    )
    depth: Depth = option(
        11, "Levels to draft at most", default="the traces', at most 11", group="common"
    )
    first_top_k: TopK = option(
        10, "Likeliest children scored per node", default="the traces', at most 10"
    )
    second_top_k: TopK | None = option(
        None,
        "Nodes expanded per level",
        default="10, or fewer, so that the traces hold what the policy drafts",
    )
    negatives: float = option(
        10.0, "Rejected nodes sampled per accepted one; 0 takes all", ge=0.0, le=1000000.0
    )
    seed: Seed = 0  # of the sample

    @classmethod
    def defaults(cls, support: Any, predicts: str) -> dict[str, Any]:
        """Fields that depend on the label, and on the traces' support."""
        held = {"depth": support.depth, "first_top_k": support.top_k}
        sizes = {name: min(cls.model_fields[name].default, most) for name, most in held.items()}
        features = DEFAULT_FEATURES.get(predicts, DEFAULT_FEATURES["conditional"])
        return {**sizes, "features": list(features)}

    def widths(self, held: int) -> list[int]:
        """Nodes expanded per level to try, the most first: the given number, or the held one, at
        most 10, and its halves."""
        if self.second_top_k is not None:
            return [self.second_top_k]
        most = min(10, held)
        return [most >> halvings for halvings in range(most.bit_length())]


class FfnConfig(Record):
    """Settings for training C2T's network.

    A network that was stopped too early would look like a failing method, so training takes at
    least `min_steps` steps. The learning rate falls along a cosine.
    """

    hidden: int = option(48, "Hidden units", ge=2, le=48)
    epochs: PositiveInt = option(10, "Passes over the sampled nodes")
    min_steps: int = option(
        10_000, "Steps at least; few nodes are passed over more often", ge=1, le=10000000
    )
    batch_size: PositiveInt = option(1024, "Nodes a training step", name="--nodes-per-step")
    lr: float = option(1e-2, "Learning rate of Adam at the start", gt=0.0, le=1.0)
    seed: Seed = 0  # of weights and of the order of rows
    threads: PositiveInt = option(1, "CPU threads of torch; more than 1 is rarely faster")

    def num_epochs(self, num_rows: int) -> int:
        """Passes over this many rows."""
        steps = math.ceil(num_rows / self.batch_size)
        return max(self.epochs, math.ceil(self.min_steps / steps))


class ScoredConfig(FitConfig):
    """Settings of every fit of a node scorer; see also `ScoredTree`."""

    nodes: NodeConfig = NodeConfig()
    beta: Probability | None = option(
        None, "Acceptance probability to prune below", default="by --recall", group="common"
    )
    recall: float = option(
        0.8,
        "Share of accepted tokens that beta keeps on the training prompts",
        gt=0.0,
        lt=1.0,
        group="common",
    )
    num_tokens: NumTokens | None = option(
        None, "Most tokens to verify, root counted", default="no cap"
    )
    keep_leaves: bool = option(
        True, "Verify also nodes that reach beta beyond the second Top-K; without: the paper"
    )
    min_level_prob: Probability = option(
        0.0, "Of all nodes together that a level would expand, below which drafting stops"
    )

    @classmethod
    def fields_for(cls, support: Any, seed: int, predicts: str = "conditional") -> dict[str, Any]:
        kind = type(cls.model_fields["nodes"].default)
        return {"nodes": {**kind.defaults(support, predicts), "seed": seed}}


class C2TConfig(ScoredConfig):
    """Settings for fitting C2T, whose network is `ffn`."""

    ffn: FfnConfig = FfnConfig()

    @classmethod
    def fields_for(cls, support: Any, seed: int, predicts: str = "conditional") -> dict[str, Any]:
        return {**super().fields_for(support, seed, predicts), "ffn": {"seed": seed}}


class SurvivalNodeConfig(NodeConfig):
    """All children of accepted nodes, by the two features that the table reads."""

    features: tuple[str, ...] = AcceptanceTable.model_fields["features"].default
    negatives: float = 0.0

    @classmethod
    def defaults(cls, support: Any, predicts: str) -> dict[str, Any]:
        """Sizes from the traces' support; the table fixes its features."""
        fixed = {name: cls.model_fields[name].default for name in ("features", "negatives")}
        return {**super().defaults(support, predicts), **fixed}


class SurvivalConfig(ScoredConfig):
    """Settings for fitting a table of acceptance.

    Half of the bins of draft probability are quantiles of accepted nodes, half of all nodes.
    """

    nodes: SurvivalNodeConfig = SurvivalNodeConfig()
    beta: Probability = option(0.05, "Acceptance probability to prune below", group="common")
    min_level_prob: Probability = option(
        0.5,
        "Of all nodes together that a level would expand, below which drafting stops",
        group="common",
    )
    num_bins: int = option(32, "Bins of draft probability", ge=2, le=128)
    weight: float = option(
        20.0, "Nodes that the estimate of a larger group counts as in a cell", gt=0.0, le=10000.0
    )


# --------------------------------------------------------------------------- ECHO's gates


class EchoConfig(FitConfig):
    """Settings for fitting ECHO's gates; sizes: see `SparseGates`."""

    depth: Depth = option(
        8, "Levels drafted at most", default="the traces', at most 8", group="common"
    )
    width: TopK = option(
        3, "W_dflt, nodes kept per level", default="3, or the traces' children", group="common"
    )
    max_width: TopK = option(
        10,
        "W_max, nodes of a level whose gate closed; children per node",
        default="the traces', at most 10",
    )
    num_tokens: NumTokens = option(
        48, "Nodes a request submits at most, root counted", group="common"
    )
    rerank: bool = option(
        False, "Submit the likeliest of all drafted nodes, as EAGLE-3 does (paper, batch 1)"
    )
    max_tokens: PositiveInt | None = option(
        None,
        "K_max, nodes a batch verifies per round, roots counted: adds ECHO's budget",
        default="none",
        group="common",
    )
    batch_size: PositiveInt | None = option(
        None,
        "Requests together for which K_max is fitted to the cost model (Eq. 2)",
        default="no K_max is fitted",
    )
    delta: Probability = option(0.8, "Area under the ROC curve that makes a level a sweet spot")
    max_gates: PositiveInt = option(3, "Gates at most")
    thresholds: Literal["youden", "cost"] = option(
        "youden", "youden, or cost: the least predicted time on the training prompts"
    )
    min_rows: PositiveInt = option(50, "Positions of each class that a level needs to be judged")

    @classmethod
    def fields_for(cls, support: Any, seed: int, predicts: str = "conditional") -> dict[str, Any]:
        most = {"depth": support.depth, "width": support.top_k, "max_width": support.top_k}
        return {name: min(cls.model_fields[name].default, held) for name, held in most.items()}

    def check_support(self, support: Any) -> None:
        """Raises `UsageError` for a tree deeper or wider than the traces hold."""
        check_sizes(
            ("--depth", self.depth, support.depth),
            ("--width", self.width, support.top_k),
            ("--max-width", self.max_width, support.top_k),
        )

    def shape(self, levels: tuple[int, ...], thresholds: tuple[float, ...]) -> SparseGates:
        """The tree with gates at these levels."""
        sizes = self.model_dump(include={"depth", "width", "max_width", "num_tokens", "rerank"})
        return SparseGates(gate_levels=levels, thresholds=thresholds, **sizes)

    @property
    def open_shape(self) -> SparseGates:
        """The tree with one gate that never closes."""
        return self.shape((1,), (0.0,))

    @property
    def budget(self) -> Budget:
        """ECHO's budget if K_max is given."""
        if self.max_tokens is None:
            return PerRequest()
        return ElasticBudget(
            max_tokens=self.max_tokens, default_width=self.width, max_width=self.max_width
        )

    @model_validator(mode="after")
    def _describes_a_tree(self) -> Self:
        _ = self.open_shape
        return self


FITS: dict[str, type[FitConfig]] = {
    "hetero": CartConfig,
    "c2t": C2TConfig,
    "survival": SurvivalConfig,
    "echo": EchoConfig,
}
"""Fits to traces that `fit auto` tries and `recalibrate` repeats."""


# --------------------------------------------------------------------------- paired runs


class Contract(Record):
    """The promise of a lossy acceptance; the confidence is for all tested settings together."""

    max_loss: float = option(
        0.02, "Mean loss per prompt that may not be exceeded", gt=0, lt=1, group="common"
    )
    confidence: float = option(0.9, "Confidence of that promise", gt=0, lt=1)

    @property
    def level(self) -> float:
        """The largest p-value that certifies."""
        return 1 - self.confidence


class PairedConfig(DecodingConfig):
    """Settings for answering prompts under each acceptance."""

    runs: Path | None = option(
        None, "Folder that keeps every answer", default="OUT with .runs behind"
    )
    resume: bool = option(False, "Go on with a folder of the same runs")


DENIED: Any = option(
    (), "Token ids never relaxed, comma-separated", name="--deny", default="special ones alone"
)
THETAS = {
    "ratio": (0.96, 0.94, 0.92, 0.90, 0.88, 0.86, 0.84),
    "margin": (0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0),
    "prob_ratio": (0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1),
}
"""Strictest first. `ratio` is the paper's sweep; the others relax about as much."""


class RelaxedConfig(Record):
    """The settings of a lossy acceptance to try, and the contract."""

    deny_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = DENIED
    contract: Contract = Contract()

    @property
    def settings(self) -> tuple[float, ...]:
        """Strictest first."""
        raise NotImplementedError

    def acceptance(self, setting: float) -> Acceptance:
        """The acceptance of one setting."""
        raise NotImplementedError


class MarsConfig(RelaxedConfig):
    """The thresholds of relaxed acceptance."""

    mode: Literal["alg1", "sound"] = option("sound", "sound or alg1 (greedy, the paper)")
    form: Literal["ratio", "margin", "prob_ratio"] = option(
        "ratio", "ratio (paper), margin (nats) or prob_ratio"
    )
    thetas: tuple[float, ...] = option(
        THETAS["ratio"],
        "Thresholds, strictest first, comma-separated",
        default="by the form",
        min_length=1,
        group="common",
    )

    @model_validator(mode="after")
    def _strictest_first(self) -> Self:
        from specctl.policy.mars import bound

        bounds = [bound(self.acceptance(theta)) for theta in self.thetas]
        in_order = all(strict > lax for strict, lax in pairwise(bounds))
        require(in_order, "thetas go from the strictest on, each once")
        return self

    @property
    def settings(self) -> tuple[float, ...]:
        return self.thetas

    def acceptance(self, setting: float) -> Mars:
        return Mars(
            mode=self.mode, form=self.form, theta=setting, deny_token_ids=self.deny_token_ids
        )


class AdasdConfig(RelaxedConfig):
    """The clips of AdaSD's acceptance, square roots of bits; the rest: see `JensenShannon`."""

    clips: tuple[Probability, ...] = option(
        (0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
        "Clips of the threshold, smallest first, comma-separated",
        default="0.1 to 0.6",
        min_length=1,
        group="common",
    )
    min_samples: int = option(8, "Accepted and rejected tokens before the threshold acts", ge=0)

    @model_validator(mode="after")
    def _smallest_first(self) -> Self:
        rising = all(low < high for low, high in pairwise((0.0, *self.clips)))
        require(rising, "clips rise from above 0, each once")
        return self

    @property
    def settings(self) -> tuple[float, ...]:
        return self.clips

    def acceptance(self, setting: float) -> JensenShannon:
        rest = self.model_dump(exclude={"clips", "contract"})
        return JensenShannon(max_threshold=setting, **rest)
