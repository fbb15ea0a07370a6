"""P-values of "the mean loss is at least so high", for three kinds of loss.

- `binary`, 0 or 1: exact binomial, the tightest there is;
- `bounded`, in [0, 1]: Hoeffding-Bentkus (Bates et al., arXiv:2101.02703, Theorem 4);
- `net`, in [-1, 1] (gains offset losses): betting on a fixed grid of stakes, averaged
  (Waudby-Smith and Ramdas, arXiv:2010.09686); it profits from a small variance.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specctl.errors import UsageError

LossKind = Literal["binary", "bounded", "net"]
Losses = NDArray[np.float64]
RANGES = {"binary": (0.0, 1.0), "bounded": (0.0, 1.0), "net": (-1.0, 1.0)}
NUM_STAKES = 60


def p_value_of(losses: Losses, max_loss: float, kind: LossKind) -> float:
    """P-value of "the mean loss is at least `max_loss`": small where that is hard to believe."""
    _check(losses, kind)
    if kind == "binary":
        return binomial_cdf(float(losses.sum()), len(losses), max_loss)
    if kind == "bounded":
        return _hoeffding_bentkus(float(losses.mean()), len(losses), max_loss)
    return _betting(losses, max_loss)


def binomial_cdf(lost: float, size: int, chance: float) -> float:
    """P(Bin(size, chance) <= lost)."""
    from scipy.special import bdtr

    return float(bdtr(lost, size, chance))


def _hoeffding_bentkus(mean: float, size: int, max_loss: float) -> float:
    if mean >= max_loss:
        return 1.0
    divergence = _entropy_term(mean, max_loss) + _entropy_term(1 - mean, 1 - max_loss)
    # Up to rounding of the mean, which must not lift a whole number to the next.
    bentkus = np.e * binomial_cdf(np.ceil(size * mean - 1e-9), size, max_loss)
    return float(min(1.0, np.exp(-size * divergence), bentkus))


def _entropy_term(share: float, expected: float) -> float:
    return 0.0 if share == 0 else share * float(np.log(share / expected))


def _betting(losses: Losses, max_loss: float) -> float:
    """One over the wealth of a gambler who bets that losses fall short of `max_loss`.

    Each stake s gives wealth Π (1 + s (max_loss - loss)); its mean is at most 1 where the losses
    are as high as feared, hence so is that of the average over stakes (Markov's inequality). No
    stake depends on the data, so the order of the prompts does not matter.
    """
    stakes = np.linspace(0, 1 / (1 - max_loss), NUM_STAKES + 2)[1:-1]
    # Distinct losses are few: 0, 1 and -1 unless there are several seeds a prompt.
    values, counts = np.unique(losses, return_counts=True)
    growth = np.log1p(stakes[:, None] * (max_loss - values)) @ counts
    top = growth.max()
    wealth = np.log(np.exp(growth - top).mean()) + top
    return float(np.exp(min(0.0, -wealth)))


def _check(losses: Losses, kind: LossKind) -> None:
    low, high = RANGES[kind]
    if not len(losses):
        raise no_losses("prompts with a loss")
    is_whole = kind != "binary" or bool(np.isin(losses, (0.0, 1.0)).all())
    if not (is_whole and bool(((losses >= low) & (losses <= high)).all())):
        raise UsageError(
            f"{kind} losses",
            expected="0 or 1" if kind == "binary" else f"numbers from {low:g} to {high:g}",
            found=f"from {losses.min():g} to {losses.max():g}",
            fix="state the kind of loss that they are",
        )


def no_losses(what: str) -> UsageError:
    return UsageError("quality contract", expected=what, found="none", fix="give at least one")
