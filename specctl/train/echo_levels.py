"""Which levels can tell, from the drafter's confidence, whether their draft will be accepted.

confidence of a level    the probability of its likeliest path (ECHO, Eq. 6)
label of a level         the accepted length reaches it
sweet spot               the area under the ROC curve is above δ (ECHO, section 3.2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specctl.stats import UNKNOWN, Floats, Interval, Resamples, auc, auc_of

Bools = NDArray[np.bool_]
NUM_RESAMPLES = 1000
NUM_STEPS = 512
"""Steps of confidence in resampled curves: two rows that share one count half, which moves an
area by less than 1 / 512. The area itself is exact."""


@dataclass(frozen=True)
class LevelRows:
    """R positions, as if no gate ever closed.

    Attributes:
        level_logp: `[R, D]` float32, nats, of the likeliest path to each level.
        accepted: `[R]` int64, draft tokens accepted.
        prompt: `[R]` int64, code of the prompt.
    """

    level_logp: NDArray[np.float32]
    accepted: NDArray[np.int64]
    prompt: NDArray[np.int64]

    @property
    def depth(self) -> int:
        """D."""
        return self.level_logp.shape[1]

    def of(self, rows: Bools) -> LevelRows:
        """Some rows."""
        return LevelRows(self.level_logp[rows], self.accepted[rows], self.prompt[rows])

    def confidence(self, level: int) -> Floats:
        """`[R]` probability of the likeliest path to a level, 1-based."""
        return np.exp(self.level_logp[:, level - 1].astype(np.float64))

    def reached(self, level: int) -> Bools:
        """`[R]` bool: the accepted length reaches the level."""
        return self.accepted >= level


@dataclass(frozen=True)
class Gate:
    """One gate of a set, given the shallower ones.

    Attributes:
        threshold: probability below which it closes.
        auc: among the rows that pass the gates before it.
    """

    level: int
    threshold: float
    auc: Interval


def area_by_prompt(rows: LevelRows, level: int, *, min_rows: int, seed: int) -> Interval:
    """The area of a level, with a bootstrap interval over prompts.

    Args:
        min_rows: fewest rows of each class; with fewer the area is not known.
    """
    score, label = rows.confidence(level), rows.reached(level)
    if min(int(label.sum()), int((~label).sum())) < min_rows:
        return UNKNOWN
    low, high = _resampled(score, label, rows.prompt, seed)
    return Interval(auc_of(score, label), low, high)


def _resampled(score: Floats, label: Bools, prompt: Floats, seed: int) -> tuple[float, float]:
    """Percentile interval over resampled prompts."""
    codes, owner = np.unique(prompt, return_inverse=True)
    step = np.searchsorted(np.quantile(score, np.arange(1, NUM_STEPS) / NUM_STEPS), score)
    shape, cell = (len(codes), NUM_STEPS), owner * NUM_STEPS + step
    hits, misses = (
        np.bincount(cell[side], minlength=shape[0] * shape[1]).reshape(shape).astype(np.float64)
        for side in (label, ~label)
    )
    resamples = Resamples.draw(len(codes), seed=seed, num=NUM_RESAMPLES)
    hits, misses = resamples.weights @ hits, resamples.weights @ misses
    return resamples.bounds(auc(hits, misses))


def youden_threshold(score: Floats, label: Bools) -> float:
    """The cut that maximises true less false positive rate (Youden's J).

    Midway between two neighbouring confidences, so that no rounding moves a row across it; 0
    where no cut is better than none.
    """
    from sklearn.metrics import roc_curve

    false_rate, true_rate, cuts = roc_curve(label, score, drop_intermediate=False)
    gain = true_rate - false_rate
    best = int(np.argmax(gain))
    if gain[best] <= 0:
        return 0.0
    return float(cuts[best] + cuts[best + 1]) / 2  # below the last cut the gain is 0


def gates_at(levels: Sequence[int], rows: LevelRows, *, min_rows: int, seed: int) -> list[Gate]:
    """Gates at given levels, each fitted to the rows that pass those before it."""
    gates: list[Gate] = []
    for level in sorted(levels):
        found = area_by_prompt(rows, level, min_rows=min_rows, seed=seed)
        if not found.known:
            gates.append(Gate(level, 0.0, found))
            continue
        score = rows.confidence(level)
        threshold = youden_threshold(score, rows.reached(level))
        gates.append(Gate(level, threshold, found))
        rows = rows.of(score >= threshold)
    return gates


def choose_gates(
    rows: LevelRows,
    areas: Sequence[Interval],
    *,
    delta: float,
    max_gates: int,
    min_rows: int,
    seed: int,
) -> list[Gate]:
    """Sweet spots: the root's level, then the deepest, then the others by falling area.

    A level joins if its area is above δ over all rows, and if in the set that it makes every
    gate's area is above δ among the rows that reach it. A gate behind others judges only what
    they let pass, which is harder to tell apart.
    """
    chosen: list[Gate] = []
    for level in _by_priority(areas, delta):
        levels = [*(gate.level for gate in chosen), level]
        gates = gates_at(levels, rows, min_rows=min_rows, seed=seed)
        if all(_above(gate.auc, delta) for gate in gates):
            chosen = gates
        if len(chosen) == max_gates:
            break
    return chosen


def _by_priority(areas: Sequence[Interval], delta: float) -> list[int]:
    levels = [level for level, found in enumerate(areas, 1) if _above(found, delta)]
    last = len(areas)
    return sorted(levels, key=lambda level: (level != 1, level != last, -areas[level - 1].value))


def _above(found: Interval, delta: float) -> bool:
    return found.value > delta


def stop_levels(rows: LevelRows, gates: Sequence[Gate]) -> NDArray[np.int64]:
    """`[R]` the level of the first gate that closes, 0 for none."""
    stopped = np.zeros(len(rows.accepted), np.int64)
    for gate in gates:
        closed = (rows.confidence(gate.level) < gate.threshold) & (stopped == 0)
        stopped[closed] = gate.level
    return stopped
