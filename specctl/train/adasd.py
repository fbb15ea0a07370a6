"""`fit adasd`, the stop: where its threshold starts, from the tokens of dense traces.

AdaSD needs no fit, but it starts blind: a request of a hundred tokens is half over before it has
seen eight rejections. The fit measures both means on the training prompts and gives a request that
many tokens of them to start with; how many, and between what the threshold lies, is chosen by what
replay says of the training prompts, and reported on the prompts held out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from specctl.errors import EvidenceError
from specctl.policy.records import Chain, EntropyStop, Policy, Record, SignalStop
from specctl.stats import (
    Floats,
    Interval,
    Split,
    auc_of,
    ratio_of_ratios,
    ratio_of_sums,
    split_prompts,
)

Between = Literal["midpoint", "rejected"]
CONFIDENCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
FEWEST = 30
"""Tokens of each class below which a mean is not a start."""


class AdasdConfig(Record):
    """How the stop is fitted.

    Attributes:
        window, min_samples, half_life, keep_last: of the fitted `EntropyStop`.
        between: tried ones. weights: of the warm start, tokens, tried ones; 0 is a cold start.
        held_out_frac, seed: of the split by prompt.
        cost: the unit of costs, in words.
    """

    window: Annotated[int, Field(ge=1, le=64)] = 20
    min_samples: Annotated[int, Field(ge=0)] = 8
    half_life: Annotated[float, Field(gt=0)] | None = None
    keep_last: bool = True
    between: Annotated[tuple[Between, ...], Field(min_length=1)] = ("midpoint", "rejected")
    weights: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1)] = (
        0.0,
        4.0,
        8.0,
        16.0,
        64.0,
        256.0,
    )
    held_out_frac: Annotated[float, Field(gt=0, lt=1)] = 0.2
    seed: int = 0
    cost: str = "target steps"


class Tested(Protocol):
    """M tokens that strict verification accepted or rejected first, along chains."""

    @property
    def prompt_id(self) -> Any: ...
    @property
    def accepted(self) -> Any: ...
    @property
    def entropy(self) -> Floats: ...
    @property
    def distance(self) -> Floats: ...


class Costs(Protocol):
    """What a policy spends on P prompts, `[P]` each."""

    @property
    def prompt_ids(self) -> tuple[str, ...]: ...
    @property
    def calls(self) -> Floats: ...
    @property
    def tokens(self) -> Floats: ...
    @property
    def levels(self) -> Floats: ...
    @property
    def verified(self) -> Floats: ...
    @property
    def time(self) -> Floats: ...
    @property
    def support(self) -> float: ...


Measure = Callable[[Sequence[Policy]], Sequence[Costs]]
"""Replays policies over all prompts of the traces."""


class Signal(Record):
    """How one value tells accepted from rejected tokens, on the training prompts.

    Attributes:
        auc: chance that a rejected token has the larger value than an accepted one.
        bounds, accepted, rejected: a histogram, `len(bounds) - 1` counts of each class.
    """

    accepted_mean: float
    rejected_mean: float
    accepted_std: float
    rejected_std: float
    auc: float
    bounds: tuple[float, ...]
    accepted: tuple[int, ...]
    rejected: tuple[int, ...]

    @property
    def midpoint(self) -> float:
        return (self.accepted_mean + self.rejected_mean) / 2


class StopRow(Record):
    """One way of stopping, on both sides of the split.

    Attributes:
        train_cost, held_out_cost: per token. against: held-out cost per token over that of the
            best fixed chain, paired by prompt. The rest is held out.
        support: share of all its rounds that the traces tell whole.
    """

    name: str
    train_cost: float
    held_out_cost: Interval
    against: Interval
    tokens_per_call: float
    levels_per_call: float
    verified_per_call: float
    support: float


class StopFit(Record):
    """A fitted stop and what is known of it.

    Attributes:
        num_prompts, num_tokens: by side of the split; tokens that were tested.
        rows: the paper's fixed chain of 5, the best fixed chain and confidence stop, AdaSD cold,
            then the chosen one.
    """

    config: AdasdConfig
    shape: EntropyStop
    entropy: Signal
    distance: Signal
    num_prompts: dict[str, int]
    num_tokens: dict[str, int]
    rows: tuple[StopRow, ...]


def fit_stop(tested: Tested, measure: Measure, config: AdasdConfig) -> StopFit:
    """Measures, tries, chooses.

    Raises:
        TraceEmptyError: fewer than two prompts. EvidenceError: too few tokens of either class.
    """
    split = split_prompts(tested.prompt_id, held_out_frac=config.held_out_frac, seed=config.seed)
    training = np.isin(tested.prompt_id, split.train)
    accepted = np.asarray(tested.accepted)
    entropy = signal_of(tested.entropy[training], accepted[training])
    distance = signal_of(tested.distance[training], accepted[training])
    tried = _candidates(config, entropy)
    found = dict(zip(tried, measure(list(tried.values())), strict=True))
    judged = _Judged(tried, found, split)
    shape = tried[judged.best("AdaSD")].shape
    assert isinstance(shape, EntropyStop)
    return StopFit(
        config=config,
        shape=shape,
        entropy=entropy,
        distance=distance,
        num_prompts={"train": len(split.train), "held_out": len(split.held_out)},
        num_tokens={"train": int(training.sum()), "held_out": int((~training).sum())},
        rows=judged.rows(),
    )


def signal_of(values: Floats, accepted: NDArray[np.bool_]) -> Signal:
    """Means, spreads and separation of a value over accepted and rejected tokens.

    Raises:
        EvidenceError: too few of either.
    """
    known = ~np.isnan(values)
    good, bad = values[known & accepted], values[known & ~accepted]
    if min(len(good), len(bad)) < FEWEST:
        raise EvidenceError(
            "fit adasd",
            expected=f"at least {FEWEST} accepted and {FEWEST} rejected tokens",
            found=f"{len(good)} and {len(bad)} on the training prompts",
            fix="collect dense traces of more prompts",
        )
    bounds = np.histogram_bin_edges(np.concatenate([good, bad]), 40)
    return Signal(
        accepted_mean=float(good.mean()),
        rejected_mean=float(bad.mean()),
        accepted_std=float(good.std()),
        rejected_std=float(bad.std()),
        auc=auc_of(values[known], ~accepted[known]),
        bounds=tuple(bounds.tolist()),
        accepted=tuple(np.histogram(good, bounds)[0].tolist()),
        rejected=tuple(np.histogram(bad, bounds)[0].tolist()),
    )


def _candidates(config: AdasdConfig, entropy: Signal) -> dict[str, Policy]:
    """Every policy that is tried, by name: `family: setting`."""
    shapes: dict[str, Any] = {
        f"chain: {size}": Chain(num_draft_tokens=size) for size in range(1, config.window + 1)
    }
    for least in CONFIDENCES:
        stop = SignalStop(signal="confidence", threshold=least, window=config.window)
        shapes[f"confidence: {least:g}"] = stop
    for between in config.between:
        for weight in config.weights:
            start = "cold" if weight == 0 else f"warm {weight:g}"
            shapes[f"AdaSD: {between}, {start}"] = stop_of(config, between, weight, entropy)
    return {name: Policy(shape=shape) for name, shape in shapes.items()}


def stop_of(config: AdasdConfig, between: Between, weight: float, entropy: Signal) -> EntropyStop:
    """The record of one setting."""
    warm = bool(weight)
    return EntropyStop(
        window=config.window,
        between=between,
        min_samples=config.min_samples,
        half_life=config.half_life,
        keep_last=config.keep_last,
        prior_accepted=max(0.0, entropy.accepted_mean) if warm else None,
        prior_rejected=max(0.0, entropy.rejected_mean) if warm else None,
        prior_weight=weight,
    )


@dataclass(frozen=True)
class _Judged:
    """What was tried, and which prompts may choose."""

    tried: dict[str, Policy]
    found: dict[str, Costs]
    split: Split

    def best(self, family: str) -> str:
        """The setting of least cost per training token, the first of equal ones."""
        names = [name for name in self.tried if name.startswith(f"{family}: ")]
        return min(names, key=self._train_cost)

    def rows(self) -> tuple[StopRow, ...]:
        """The rivals and AdaSD's settings, the chosen one last."""
        chosen = self.best("AdaSD")
        paper = [name for name in ("chain: 5",) if name in self.tried]
        others = [name for name in self.tried if name.startswith("AdaSD: ") and name != chosen]
        names = [*paper, self.best("chain"), self.best("confidence"), *others, chosen]
        return tuple(self._row(name) for name in dict.fromkeys(names))

    def _row(self, name: str) -> StopRow:
        found, rival = self.found[name], self.found[self.best("chain")]
        held = self._of(found, self.split.held_out)
        ours = (found.time[held], found.tokens[held])
        theirs = (rival.time[held], rival.tokens[held])
        calls = float(found.calls[held].sum())
        return StopRow(
            name=name,
            train_cost=self._train_cost(name),
            held_out_cost=ratio_of_sums(*ours),
            against=ratio_of_ratios(ours, theirs),
            tokens_per_call=float(found.tokens[held].sum()) / calls,
            levels_per_call=float(found.levels[held].sum()) / calls,
            verified_per_call=float(found.verified[held].sum()) / calls,
            support=found.support,
        )

    def _train_cost(self, name: str) -> float:
        found = self.found[name]
        rows = self._of(found, self.split.train)
        return float(found.time[rows].sum() / found.tokens[rows].sum())

    @staticmethod
    def _of(found: Costs, prompts: tuple[str, ...]) -> NDArray[np.bool_]:
        wanted = set(prompts)
        return np.array([name in wanted for name in found.prompt_ids])
