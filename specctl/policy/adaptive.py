"""Shapes that decide while they draft how far to go, by nothing but what the drafter says."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from specctl.policy.base import (
    MAX_TOKENS,
    Depth,
    NumTokens,
    Record,
    TopK,
    increasing,
    require,
)
from specctl.policy.means import RunningMeans


class EntropyStop(RunningMeans):
    """AdaSD's drafting rule: stop behind a token whose draft entropy exceeds an online threshold.

    The threshold is the request's own, in nats, from the entropies that verification accepted and
    rejected in its earlier rounds; it is infinite until `min_samples` of each were seen.

    Attributes:
        window: draft levels at most (the paper: 20).
        top_k: 1 for chains. More grows an EAGLE-2 tree, whose rows stop by the entropy that the
            best node of a level was drawn with.
        num_tokens: nodes submitted, root counted; all of a chain, and needed by a tree.
        between: `midpoint` of mean accepted and mean rejected entropy, or `rejected`, the mean
            rejected entropy itself (the paper's section 4.3).
        keep_last: submit the uncertain token too and stop behind it (paper text); false leaves it
            out, but never the first token of a round.
    """

    kind: Literal["adasd_stop"] = "adasd_stop"
    window: Depth = 20
    top_k: TopK = 1
    num_tokens: NumTokens | None = None
    between: Literal["midpoint", "rejected"] = "midpoint"
    keep_last: bool = True

    @model_validator(mode="after")
    def _sized(self) -> Self:
        chain, size = self.top_k == 1, self.num_tokens
        require(chain == (size is None), "num_tokens goes with top_k above 1, and needs it")
        require(size is None or size > self.window, "num_tokens must exceed window")
        return self


class SignalStop(Record):
    """A chain that stops on one signal of the drafter; the static rivals of adaptive length.

    A token is uncertain where its signal passes the threshold:

    - `confidence`: its probability given its parent is below (transformers' assistant, 0.4);
    - `survival`: the probability of the whole path is below (DDD with a beam of one);
    - `entropy`: the entropy of the distribution that it was drawn from is above, nats;
    - `sqrt_entropy`: the square root of that is above (SVIP, arXiv:2411.18462, Eq. 7, 0.3);
    - `entropy_bound`: 1 - sqrt(entropy_factor · entropy) is below (AdaEDL, arXiv:2410.18351,
      with a fixed λ).

    Attributes:
        threshold: as above.
        window: draft tokens at most (transformers: 20).
        entropy_factor: AdaEDL's γ, 0.2 in all its experiments; read by `entropy_bound` alone.
        keep_last: submit the uncertain token and stop after it, as transformers does; false
            stops before it and leaves the first token untested, as SVIP's Algorithm 1 does.
    """

    kind: Literal["stop"] = "stop"
    signal: Literal["confidence", "survival", "entropy", "sqrt_entropy", "entropy_bound"]
    threshold: Annotated[float, Field(ge=0)]
    window: Depth = 20
    entropy_factor: Annotated[float, Field(gt=0)] = 0.2
    keep_last: bool = True

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        unbounded = self.signal in ("entropy", "sqrt_entropy")
        require(unbounded or self.threshold <= 1, f"a {self.signal} threshold is at most 1")
        return self


class DynamicDepth(Record):
    """DDD: an EAGLE-2 tree that goes on while its beam is likely (arXiv:2409.00142, Alg. 1).

    The heuristic H is the log of the summed path probabilities of the beam, the nodes that
    would be expanded next. All that was drafted may be submitted.

    Attributes:
        depth: drafted levels at most (the paper's n).
        top_k: children per expanded node and nodes expanded per level (its w).
        num_tokens: nodes submitted, root counted.
        check_levels: levels after which H is compared (its S); each check waits for the device.
        min_beam_logp: nats; drafting stops where H is below it (its x).
    """

    kind: Literal["ddd"] = "ddd"
    depth: Depth = 11
    top_k: TopK = 10
    num_tokens: NumTokens = 60
    check_levels: tuple[Depth, ...] = (5, 7, 9)
    min_beam_logp: Annotated[float, Field(le=0)] = -0.3

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require(self.num_tokens > self.depth, "num_tokens counts the root and must exceed depth")
        require(increasing(self.check_levels), "check_levels must be strictly increasing")
        return self


class OptTree(Record):
    """OPT-Tree: the tree of highest expected acceptance under a node budget (arXiv:2406.17276).

    After every level the best tree of what is drafted is known, the `num_tokens` nodes of
    highest path probability, and so is its expected acceptance length, their sum. Drafting goes
    on while the last level raised it by more than `min_gain`.

    Attributes:
        depth: drafted levels at most (the released code: 10).
        top_k: children per expanded node and nodes expanded per level. The paper's is
            `num_tokens - 1`, which leaves out nothing; a log holds less.
        num_tokens: nodes submitted, root counted.
        min_gain: δ, tokens; the paper suggests about the cost of a draft step over that of a
            target step, between 0 and 1.
    """

    kind: Literal["opt_tree"] = "opt_tree"
    depth: Depth = 10
    top_k: TopK = 10
    num_tokens: NumTokens = 51
    min_gain: Annotated[float, Field(ge=0)] = 0.5


class JointThreshold(Record):
    """Every node whose path is likely enough, and none else: a tree without a fixed size.

    A node is expanded and submitted iff its joint probability is at least `min_prob`. One
    threshold over all rounds spends nodes where the drafter is sure; any learned pruning has to
    beat it at the same depth (notes/pair.md, 4a).

    Attributes:
        depth: drafted levels at most.
        top_k: children per expanded node and nodes expanded per level.
        min_prob: of the whole path.
        num_tokens: cap on submitted nodes, root counted; none leaves it to `min_prob`.
    """

    kind: Literal["threshold"] = "threshold"
    depth: Depth = 8
    top_k: TopK = 10
    min_prob: Annotated[float, Field(ge=0, lt=1)] = 0.05
    num_tokens: NumTokens | None = None

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        require(
            self.num_tokens is not None or self.most_tokens <= MAX_TOKENS,
            f"may submit {self.most_tokens} nodes, more than {MAX_TOKENS}: give num_tokens",
        )
        return self

    @property
    def most_tokens(self) -> int:
        """Nodes that can reach `min_prob`, root counted: those of a level sum to 1 at most."""
        # A little more than 1, because probabilities are rounded.
        likely = math.floor(1.001 / self.min_prob) if self.min_prob else MAX_TOKENS**2
        deeper = min(self.top_k**2, likely)
        return 1 + min(self.top_k, likely) + (self.depth - 1) * deeper
