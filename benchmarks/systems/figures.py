"""Figures of families of policies, fitted several times, over prompts that nothing was fitted to.

Everything is a ratio of sums over the same resamples of prompts. The figure of several fits is
their mean; a resample then draws prompts, and fits, both with replacement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import (
    Chain,
    EntropyBins,
    EntropyStop,
    JointThreshold,
    Policy,
    RootOnly,
    ScoredTree,
    Shape,
    SparseGates,
    StaticTree,
    build_shape,
)
from specctl.replay.cost.model import CostModel
from specctl.replay.held_out import logged_prompts
from specctl.replay.metrics import LoadClock, by_prompt, expansion_support, request_sums
from specctl.replay.rounds import Rounds, replay, walk_outcomes
from specctl.replay.static import static_submissions
from specctl.replay.tune.candidates import STATIC, static_settings
from specctl.runtime.words import words_of
from specctl.stats import Resamples

Floats = NDArray[np.float64]
Row = dict[str, Any]
DEPTH, TOP_K, BASE_TOKENS = 6, 10, (8, 16, 32)
"""Levels and width of the trees that are compared at equal depth, and sizes of the static ones at
whose mean acceptance length they are."""
SIZES = (7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)
PROBS = (0.006, 0.018, 0.03, 0.05, 0.08, 0.13, 0.2, 0.3, 0.45, 0.65)
BETAS = (0.006, 0.015, 0.03, 0.06, 0.12, 0.22, 0.38, 0.6)
OFFICIAL = StaticTree(depth=8, top_k=10, num_tokens=60)
"""EAGLE-3's tree, which HeteroSpec, ECHO and C2T start from."""
SUMS = ("calls", "tokens", "accepted", "verified", "wanted", "missing")

# --------------------------------------------------------------------------- settings


def static(depth: int) -> list[Shape]:
    """EAGLE-2's tree of a depth by size."""
    of = {"depth": depth, "top_k": TOP_K}
    return [StaticTree(**of, num_tokens=n) for n in SIZES if depth < n <= 1 + TOP_K * depth]


def every_static(log: DenseLog) -> list[Shape]:
    """Plain decoding, and the chains and trees that `tune` and `ladder` search on this log."""
    found = [one.policy.shape for word in STATIC for one in static_settings(word, log.support)]
    return [RootOnly(), *(shape for shape in found if not isinstance(shape, RootOnly))]


def turned(shape: Shape, depth: int | None = None) -> list[Shape]:
    """The knob of a shape turned: a threshold, or the size of its tree.

    Args:
        depth: of shapes whose fit leaves it open; None leaves it as it was fitted.
    """
    if isinstance(shape, JointThreshold):
        of = {"depth": depth or shape.depth, "top_k": TOP_K}
        return [JointThreshold(**of, min_prob=one) for one in PROBS]
    if isinstance(shape, ScoredTree):
        change = {"depth": depth or shape.depth, "num_tokens": None, "min_level_prob": 0.0}
        return [shape.model_copy(update=change | {"beta": one}) for one in BETAS]
    if isinstance(shape, EntropyBins):
        sizes = [n for n in (*SIZES, 60) if n > shape.base.depth]
        bases = [shape.base.model_copy(update={"num_tokens": n}) for n in sizes]
        return [EntropyBins.model_validate({**dict(shape), "base": base}) for base in bases]
    if isinstance(shape, SparseGates):
        sizes = [n for n in SIZES if shape.depth < n]
        return [shape.model_copy(update={"num_tokens": n}) for n in sizes]
    assert isinstance(shape, EntropyStop), f"no knob for {shape.kind}"
    return [shape.model_copy(update={"window": n}) for n in (2, 3, 4, 6, 8, 11)]


def drafting_less(shapes: Sequence[Shape]) -> list[Shape]:
    """The same, and where the rule of levels is known also with it."""
    ruled = [one for one in shapes if isinstance(one, JointThreshold | ScoredTree)]
    return [*shapes, *(one.model_copy(update={"min_level_prob": 0.5}) for one in ruled)]


# --------------------------------------------------------------------------- sums


@dataclass
class Side:
    """The prompts that settings are chosen on, or measured on; each policy is replayed once."""

    traces: TraceSet
    log: DenseLog
    clocks: Mapping[str, CostModel]
    known: dict[str, Floats] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, clocks: Mapping[str, CostModel]) -> Side:
        traces = TraceSet.open(folder, verify=False)
        return cls(traces, DenseLog.open(traces), clocks)

    @cached_property
    def prompts(self) -> tuple[str, ...]:
        return tuple(logged_prompts(self.traces))

    @property
    def names(self) -> tuple[str, ...]:
        """Columns of `sums`: counts, then us on every clock."""
        return (*SUMS, *self.clocks)

    def sums(self, shapes: Sequence[Shape]) -> Floats:
        """`[N, P, S]`, a row for every prompt."""
        policies = {one.model_dump_json(): Policy(shape=one) for one in shapes}
        new = {key: one for key, one in policies.items() if key not in self.known}
        keys, wanted = [*new], [*new.values()]
        for place, run in self._runs(wanted):
            columns = {name: request_sums(run)[name] for name in SUMS}
            for name, model in self.clocks.items():
                columns[name] = request_sums(run, LoadClock(model))["time_us"]
            self.known[keys[place]] = by_prompt(run.positions, columns).select(self.prompts).table
        return np.stack([self.known[key] for key in policies])

    def _runs(self, policies: Sequence[Policy]) -> Iterator[tuple[int, Rounds]]:
        """The rounds of each policy, with its place; static ones share their work."""
        left = dict(enumerate(policies))
        for place, of in static_submissions(self.log, policies):
            del left[place]
            yield place, walk_outcomes(of.policy, of.positions, of.outcomes, of.max_tokens)
        yield from zip(left, replay(self.log, [*left.values()], with_bounds=False), strict=True)

    def column(self, sums: Floats, name: str) -> Floats:
        return np.asarray(sums[..., self.names.index(name)])

    def tau(self, sums: Floats) -> Floats:
        return 1 + self.column(sums, "accepted") / self.column(sums, "calls")

    def tokens_a_call(self, sums: Floats) -> Floats:
        return self.column(sums, "verified") / self.column(sums, "calls")

    def time(self, sums: Floats, clock: str) -> Floats:
        """us a token."""
        return self.column(sums, clock) / self.column(sums, "tokens")

    def support(self, sums: Floats) -> float:
        """The least share of what a setting asked for that the log holds."""
        totals = [dict(zip(self.names, one.sum(0), strict=True)) for one in sums]
        return float(min(map(expansion_support, totals)))


# --------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Figures:
    """Figures of the measured prompts."""

    side: Side
    choice: Side  # prompts that settings are chosen on
    resamples: Resamples

    @classmethod
    def of(cls, choice: Side, side: Side) -> Figures:
        return cls(side, choice, Resamples.draw(len(side.prompts)))

    def drawn(self, shapes: Sequence[Shape]) -> Floats:
        """`[1 + B, N, S]`: all prompts, then every resample."""
        sums = self.side.sums(shapes)
        flat = self.resamples.drawn(np.moveaxis(sums, 0, 1).reshape(sums.shape[1], -1))
        return flat.reshape(-1, len(sums), sums.shape[2])

    def over_fits(self, drawn: Sequence[Floats]) -> Row:
        """The interval of a figure of every fit, `[1 + B]` each, and the figures by fit; null if
        one of these is undefined."""
        table = np.stack(drawn)
        number, num_resamples = len(table), table.shape[1] - 1
        random = np.random.default_rng(1)
        times = random.multinomial(number, np.full(number, 1 / number), num_resamples)
        weights = np.concatenate([np.ones((1, number)), times]).T / number
        if not np.isfinite(table[:, 0]).all():
            return {"value": None, "low": None, "high": None, "by_fit": None}
        found = self.resamples.read((weights * table).sum(0))
        return found.to_json() | {"by_fit": table[:, 0].tolist()}

    def fastest(self, shapes: Sequence[Shape], clock: str) -> Shape:
        """The setting with the least time a token on the prompts of the choice."""
        sums = self.choice.sums(shapes).sum(1)
        return shapes[int(np.argmin(self.choice.time(sums, clock)))]

    def presets(self, fits: Mapping[str, Sequence[Shape]]) -> Iterator[Row]:
        """Systems as their papers set them, over what they start from."""
        for name, shapes in fits.items():
            base: Shape = OFFICIAL
            if isinstance(shapes[0], EntropyStop):
                base = Chain(num_draft_tokens=5)
            theirs = self.drawn([base])[:, 0]
            ours = [self.drawn([shape])[:, 0] for shape in shapes]
            readings = {
                "tau": self.side.tau,
                "calls": lambda sums: self.side.column(sums, "calls"),
                "verified": lambda sums: self.side.column(sums, "verified"),
            } | {clock: lambda s, of=clock: self.side.time(s, of) for clock in self.side.clocks}
            yield {
                "system": name,
                "baseline": words_of(Policy(shape=base)),
                "support": min(self.side.support(self.side.sums([one])) for one in shapes),
                "value": self.over_fits([self.side.tau(one) for one in ours]),
                "change": {
                    key: self.over_fits([read(one) / read(theirs) - 1 for one in ours])
                    for key, read in readings.items()
                },
            }

    def equal_depth(self, fits: Mapping[str, Sequence[Shape]]) -> Iterator[Row]:
        """Verified tokens a call over static trees of as many levels, at the mean acceptance
        lengths that these reach with so many tokens."""
        for name, shapes in fits.items():
            curves = [turned(shape, DEPTH) for shape in shapes]
            depth = build_shape(curves[0][0]).max_depth
            ours = [self.drawn(curve) for curve in curves]
            of_size = {}
            for size in BASE_TOKENS:
                if size > depth:
                    control = StaticTree(depth=depth, top_k=TOP_K, num_tokens=size)
                    theirs = self.drawn([control])[:, 0]
                    wanted, spent = self.side.tau(theirs), self.side.tokens_a_call(theirs)
                    ratios = [self._tokens_at(one, wanted) / spent - 1 for one in ours]
                    of_size[str(size)] = self.over_fits(ratios)
            support = min(self.side.support(self.side.sums(curve)) for curve in curves)
            yield {"shape": name, "levels": depth, "support": support, "tokens": of_size}

    def _tokens_at(self, drawn: Floats, wanted: Floats) -> Floats:
        """`[1 + B]` fewest tokens a call for a mean acceptance length `[1 + B]`, between two
        settings linear in their logarithm; NaN where the curve does not reach it."""
        found = np.full(len(drawn), np.nan)
        rows = (self.side.tau(drawn), np.log(self.side.tokens_a_call(drawn)), wanted)
        for place, (tau, tokens, at) in enumerate(zip(*rows, strict=True)):
            order = np.lexsort((tokens, tau))
            least = np.minimum.accumulate(tokens[order][::-1])[::-1]
            levels, first = np.unique(tau[order], return_index=True)
            found[place] = np.exp(np.interp(at, levels, least[first], left=np.nan, right=np.nan))
        return found

    def times(self, families: Mapping[str, Sequence[Shape]]) -> Iterator[Row]:
        """Time a token over the fastest static setting's, every setting chosen on other prompts."""
        for clock in self.side.clocks:
            base = self.fastest(every_static(self.choice.log), clock)
            theirs = self.side.time(self.drawn([base])[:, 0], clock)
            plain = self.side.time(self.drawn([RootOnly()])[:, 0], clock)
            over_plain = self.over_fits([plain / theirs - 1])
            yield {"clock": clock, "family": "static", "setting": words_of(Policy(shape=base))} | {
                "over_plain": over_plain
            }
            for name, shapes in families.items():
                grids = [drafting_less(turned(shape)) for shape in shapes]
                best = [self.fastest(grid, clock) for grid in grids]
                ours = [self.side.time(self.drawn([one])[:, 0], clock) for one in best]
                yield {
                    "clock": clock,
                    "family": name,
                    "setting": _setting(best[0]),
                    "time": self.over_fits([one / theirs - 1 for one in ours]),
                    "support": min(self.side.support(self.side.sums([one])) for one in best),
                }


def _setting(shape: Shape) -> str:
    """A shape in words, of a fitted one what was chosen beside the fit."""
    if isinstance(shape, ScoredTree):
        return f"beta {shape.beta:g}, of levels {shape.min_level_prob:g}"
    if isinstance(shape, EntropyBins | SparseGates):
        size = shape.base.num_tokens if isinstance(shape, EntropyBins) else shape.num_tokens
        return f"{size} tokens"
    return str(words_of(Policy(shape=shape)))
