"""The statistics of a quality contract: p-values of losses, fixed-sequence tests, prompts needed.

Settings are tested in a fixed order, from the strictest on, each at the full level, until one
fails (Learn-then-Test with fixed-sequence testing, arXiv:2110.01052). The chance that any certified
setting loses more than promised is then at most 1 - confidence, also if losses are not monotone
along the order.

The unit is the prompt: tokens of one text are dependent, and one relaxed token changes all that
follow. The kind of loss is fixed before the data is seen; `p_value_of` has a test for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from specctl.errors import EvidenceError, UsageError
from specctl.records import Record
from specctl.stats import Floats
from specctl.train.configs import Contract, LossKind

POWER = 0.8


class Trial(Record):
    """One setting's test."""

    num_prompts: int
    mean_loss: float
    p_value: float  # of "loses more than max_loss"
    max_certifiable: float  # the smallest max_loss that these losses would certify alone
    certified: bool  # this setting and all stricter ones passed
    is_tested: bool  # all stricter settings passed


@dataclass(frozen=True)
class Certificate:
    """The outcome of a contract over settings, strictest first."""

    contract: Contract
    trials: tuple[Trial, ...]
    needed: int | None
    """Prompts that would certify the first setting with 80 % power at the observed loss; None if
    it passed, or if no number would do."""

    @property
    def num_certified(self) -> int:
        return sum(trial.certified for trial in self.trials)

    def require_any(self, names: Sequence[str]) -> None:
        """Raises `EvidenceError` if not even the strictest of these settings passed."""
        if self.num_certified:
            return
        first, contract = self.trials[0], self.contract
        least = zero_loss_prompts(contract.max_loss, contract.confidence)
        fix = "no number of prompts certifies such a loss: raise --max-loss, or test stricter ones"
        if self.needed is not None:
            fix = f"decide again on about {self.needed} fresh prompts ({POWER:.0%} power at such a "
            fix += f"loss; {least} if none is lost), or raise --max-loss"
        raise EvidenceError(
            f"{names[0]} does not keep the contract, a mean loss of at most {contract.max_loss:g} "
            f"at confidence {contract.confidence:g}: it lost {first.mean_loss:.4g} over "
            f"{first.num_prompts} prompts, p-value {first.p_value:.3g}",
            hint=fix,
        )


def certify(losses: Sequence[Floats], contract: Contract) -> Certificate:
    """Fixed-sequence testing of settings.

    Args:
        losses: `[n]` per prompt for each setting, strictest first. The order must not depend on
            the losses. Settings may be dropped from the end.

    Raises:
        UsageError: no setting, no prompt, or a loss outside the kind's range.
    """
    p_values = [p_value_of(found, contract.max_loss, contract.kind) for found in losses]
    num_passed = count_passing(p_values, contract)
    trials = tuple(
        Trial(
            num_prompts=len(found),
            mean_loss=float(found.mean()),
            p_value=p_value,
            max_certifiable=max_certifiable(found, contract.confidence, contract.kind),
            certified=place < num_passed,
            is_tested=place <= num_passed,
        )
        for place, (found, p_value) in enumerate(zip(losses, p_values, strict=True))
    )
    return Certificate(
        contract, trials, None if num_passed else prompts_needed(losses[0], contract)
    )


def count_passing(p_values: Sequence[float], contract: Contract) -> int:
    """The number of settings before the first that fails."""
    if not p_values:
        raise UsageError("a quality contract needs settings to test")
    failing = (place for place, p in enumerate(p_values) if p > contract.level)
    return next(failing, len(p_values))


def max_certifiable(losses: Floats, confidence: float, kind: LossKind) -> float:
    """The smallest `max_loss` whose p-value is at most 1 - confidence; 1 if there is none.

    For binary losses this is the upper Clopper-Pearson bound.
    """
    low, high = max(0.0, float(losses.mean())), 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if p_value_of(losses, middle, kind) <= 1 - confidence:
            high = middle
        else:
            low = middle
    return high


def zero_loss_prompts(max_loss: float, confidence: float) -> int:
    """Fewest prompts that certify a binary contract without any loss."""
    return _fewest(lambda size: binomial_cdf(0, size, max_loss) <= 1 - confidence, 1)


def binomial_prompts(
    max_loss: float, true_loss: float, confidence: float, power: float = POWER
) -> int | None:
    """Fewest prompts that certify a binary contract with that power; None if no number does.

    For each count of losses only the fewest prompts that certify it are checked: they have the most
    power.
    """
    if true_loss >= max_loss:
        return None
    for lost in count():

        def certifies(size: int, lost: int = lost) -> bool:
            return binomial_cdf(lost, size, max_loss) <= 1 - confidence

        size = _fewest(certifies, lost + 1)
        if binomial_cdf(lost, size, true_loss) >= power:
            return size
    raise AssertionError("some number of prompts has the power")


def prompts_needed(losses: Floats, contract: Contract) -> int | None:
    """Prompts that would certify losses like these with 80 % power; None if no number does."""
    if losses.mean() >= contract.max_loss:
        return None
    if contract.kind == "binary":
        return binomial_prompts(contract.max_loss, float(losses.mean()), contract.confidence)

    def has_power(size: int, num: int = 200) -> bool:
        """By resamples of that size from the observed losses."""
        generator = np.random.default_rng(0)
        drawn = (generator.choice(losses, size) for _ in range(num))
        passed = [
            p_value_of(found, contract.max_loss, contract.kind) <= contract.level for found in drawn
        ]
        return sum(passed) / num >= POWER

    return _fewest(has_power, len(losses), precision=50)


def _fewest(holds: Callable[[int], bool], start: int, precision: int | None = None) -> int:
    """The smallest size that holds, found by doubling from `start` and bisection.

    Exact, or to one part in `precision`.
    """
    high = start
    while not holds(high):
        high *= 2
    low = high // 2
    while high - low > max(1, high // precision if precision else 1):
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


# --------------------------------------------------------------------------- p-values

LOSS_RANGES = {"binary": (0.0, 1.0), "bounded": (0.0, 1.0), "net": (-1.0, 1.0)}
NUM_STAKES = 60


def p_value_of(losses: Floats, max_loss: float, kind: LossKind) -> float:
    """P-value of "the mean loss is at least `max_loss`".

    - `binary`, 0 or 1: exact binomial;
    - `bounded`, in [0, 1]: Hoeffding-Bentkus (Bates et al., arXiv:2101.02703, Theorem 4);
    - `net`, in [-1, 1] (gains offset losses): betting on a fixed grid of stakes, averaged
      (Waudby-Smith and Ramdas, arXiv:2010.09686); it profits from a small variance.
    """
    low, high = LOSS_RANGES[kind]
    if not len(losses):
        raise UsageError("a quality contract needs prompts with a loss")
    is_whole = kind != "binary" or bool(np.isin(losses, (0.0, 1.0)).all())
    if not (is_whole and bool(((losses >= low) & (losses <= high)).all())):
        raise UsageError(
            f"{kind} losses are {'0 or 1' if kind == 'binary' else f'from {low:g} to {high:g}'}, "
            f"not from {losses.min():g} to {losses.max():g}"
        )
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
    terms = ((mean, max_loss), (1 - mean, 1 - max_loss))
    divergence = sum(p * float(np.log(p / q)) for p, q in terms if p > 0)
    # Rounding of the mean must not lift a whole number to the next.
    bentkus = np.e * binomial_cdf(np.ceil(size * mean - 1e-9), size, max_loss)
    return float(min(1.0, np.exp(-size * divergence), bentkus))


def _betting(losses: Floats, max_loss: float) -> float:
    """One over the wealth of a gambler who bets that losses fall short of `max_loss`.

    Each stake s gives wealth Π (1 + s (max_loss - loss)). Its mean is at most 1 if the mean loss is
    at least `max_loss`, and so is that of the average over stakes; Markov's inequality bounds the
    p-value. Stakes do not depend on the data, so the order of prompts does not matter.
    """
    stakes = np.linspace(0, 1 / (1 - max_loss), NUM_STAKES + 2)[1:-1]
    # Distinct losses are few: 0, 1 and -1 unless prompts have several seeds.
    values, counts = np.unique(losses, return_counts=True)
    growth = np.log1p(stakes[:, None] * (max_loss - values)) @ counts
    top = growth.max()
    wealth = np.log(np.exp(growth - top).mean()) + top
    return float(np.exp(min(0.0, -wealth)))
