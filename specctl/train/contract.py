"""The statistics of a quality contract: p-values of losses, fixed-sequence tests, prompts needed.

Settings are tested in a fixed order, from the strictest on, each at the full level, until one
fails (Learn-then-Test with fixed-sequence testing, arXiv:2110.01052). The chance that any certified
setting loses more than promised is then at most 1 - confidence, also if losses are not monotone
along the order.

The unit is the prompt: tokens of one text are dependent, and one relaxed token changes all that
follow. Its loss is 1 if the strict answer is right and the relaxed one wrong, else 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from specctl.errors import EvidenceError
from specctl.records import Record
from specctl.stats import Floats
from specctl.train.configs import Contract

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
        losses: `[n]` 0 or 1 per prompt for each setting, strictest first. The order must not depend
            on the losses. Settings may be dropped from the end.
    """
    p_values = [p_value_of(found, contract.max_loss) for found in losses]
    num_passed = count_passing(p_values, contract)
    trials = tuple(
        Trial(
            num_prompts=len(found),
            mean_loss=float(found.mean()),
            p_value=p_value,
            max_certifiable=max_certifiable(found, contract.confidence),
            certified=place < num_passed,
            is_tested=place <= num_passed,
        )
        for place, (found, p_value) in enumerate(zip(losses, p_values, strict=True))
    )
    return Certificate(
        contract,
        trials,
        None
        if num_passed
        else binomial_prompts(contract.max_loss, float(losses[0].mean()), contract.confidence),
    )


def count_passing(p_values: Sequence[float], contract: Contract) -> int:
    """The number of settings before the first that fails."""
    failing = (place for place, p in enumerate(p_values) if p > contract.level)
    return next(failing, len(p_values))


def max_certifiable(losses: Floats, confidence: float) -> float:
    """The smallest `max_loss` whose p-value is at most 1 - confidence: the upper Clopper-Pearson
    bound; 1 if there is none."""
    low, high = max(0.0, float(losses.mean())), 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if p_value_of(losses, middle) <= 1 - confidence:
            high = middle
        else:
            low = middle
    return high


def check_enough(num_checked: int, contract: Contract) -> None:
    """Refuses prompts that are too few for a contract before any is decoded.

    Raises:
        EvidenceError: they could not certify it if none were lost.
    """
    least = zero_loss_prompts(contract.max_loss, contract.confidence)
    if num_checked < least:
        raise EvidenceError(
            f"{num_checked} prompts with a checkable answer are too few to promise a mean loss of "
            f"at most {contract.max_loss:g} at confidence {contract.confidence:g}: at least "
            f"{least} can, if none is lost",
            hint="give more prompts, or raise --max-loss",
        )


def zero_loss_prompts(max_loss: float, confidence: float) -> int:
    """Fewest prompts that certify a contract without any loss."""
    return _fewest(lambda size: binomial_cdf(0, size, max_loss) <= 1 - confidence, 1)


def binomial_prompts(max_loss: float, true_loss: float, confidence: float) -> int | None:
    """Fewest prompts that certify a contract with 80 % power; None if no number does.

    For each count of losses only the fewest prompts that certify it are checked: they have the most
    power.
    """
    if true_loss >= max_loss:
        return None
    for lost in count():

        def certifies(size: int, lost: int = lost) -> bool:
            return binomial_cdf(lost, size, max_loss) <= 1 - confidence

        size = _fewest(certifies, lost + 1)
        if binomial_cdf(lost, size, true_loss) >= POWER:
            return size
    raise AssertionError("some number of prompts has the power")


def _fewest(holds: Callable[[int], bool], start: int) -> int:
    """The smallest size that holds, found by doubling from `start` and bisection."""
    high = start
    while not holds(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def p_value_of(losses: Floats, max_loss: float) -> float:
    """P-value of "the mean loss is at least `max_loss`": exact binomial."""
    return binomial_cdf(float(losses.sum()), len(losses), max_loss)


def binomial_cdf(lost: float, size: int, chance: float) -> float:
    """P(Bin(size, chance) <= lost)."""
    from scipy.special import bdtr

    return float(bdtr(lost, size, chance))
