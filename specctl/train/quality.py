"""The quality contract: how much a lossy setting may lose, decided on finitely many prompts.

Settings are tested in a fixed order, from the strictest on, each at the full level, until one
fails (Learn-then-Test with fixed-sequence testing, arXiv:2110.01052). Whatever the losses do
along the order, the chance that any certified setting loses more than promised is then at most
1 - confidence. Nothing is assumed monotone: quality need not fall with the threshold.

The unit is the prompt: tokens of one text are dependent, and one relaxed token changes all that
follow. The kind of loss is stated before the data is seen; `stats.p_value_of` has a test for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specctl.errors import EvidenceError, UsageError
from specctl.records import Record
from specctl.stats import Floats, LossKind, binomial_cdf, p_value_of
from specctl.train.configs import Contract

POWER = 0.8


class Trial(Record):
    """One setting's test.

    Attributes:
        num_prompts: n. mean_loss: over them.
        p_value: of "loses more than max_loss"; max_certifiable: the smallest max_loss that these
            losses would certify alone, at this confidence.
        certified: it and all stricter settings passed.
        is_tested: the sequence had not ended before it.
    """

    num_prompts: int
    mean_loss: float
    p_value: float
    max_certifiable: float
    certified: bool
    is_tested: bool


@dataclass(frozen=True)
class Certificate:
    """The outcome of a contract over settings, strictest first.

    Attributes:
        needed: prompts that would certify the first setting with 80 % power at the loss seen;
            None where it passed, or where no number would do.
    """

    contract: Contract
    trials: tuple[Trial, ...]
    needed: int | None

    @property
    def num_certified(self) -> int:
        return sum(trial.certified for trial in self.trials)

    def require_any(self, names: Sequence[str]) -> None:
        """Refuses when not even the strictest setting passed.

        Args:
            names: of the settings, for the message.

        Raises:
            EvidenceError: with the number of prompts it would need.
        """
        if self.num_certified:
            return
        first, contract = self.trials[0], self.contract
        raise EvidenceError(
            f"quality contract of {names[0]}",
            expected=f"a mean loss of at most {contract.max_loss:g} at confidence "
            f"{contract.confidence:g}",
            found=f"{first.mean_loss:.4g} over {first.num_prompts} prompts, p-value "
            f"{first.p_value:.3g}",
            fix=self.advice(),
        )

    def advice(self) -> str:
        """What a refused contract would need."""
        contract = self.contract
        least = zero_loss_prompts(contract.max_loss, contract.confidence)
        if self.needed is None:
            return (
                "no number of prompts certifies it at the loss seen: raise --max-loss, or test "
                "stricter settings"
            )
        return (
            f"decide again on about {self.needed} fresh prompts ({POWER:.0%} power at the loss "
            f"seen; {least} at the least, with no loss at all), or raise --max-loss"
        )


def certify(losses: Sequence[Floats], contract: Contract) -> Certificate:
    """Fixed-sequence testing of settings.

    Args:
        losses: `[n]` per prompt for each setting, strictest first. The order must not depend on
            the losses; dropping settings from the end is always allowed, since it only loses
            certificates.

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
    """How many settings pass, from the first on, before one fails."""
    if not p_values:
        raise UsageError(
            "quality contract", expected="settings to test", found="none", fix="give at least one"
        )
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
    """Fewest prompts that certify a binary contract when none of them loses."""
    return _smallest_certifying(0, max_loss, 1 - confidence)


def binomial_prompts(
    max_loss: float, true_loss: float, confidence: float, power: float = POWER
) -> int | None:
    """Fewest prompts that certify a binary contract with that power; None if no number does.

    For each count of losses c, the fewest prompts that still certify c are the most powerful
    ones, so only those sizes need a look.
    """
    if true_loss >= max_loss:
        return None
    lost = 0
    while True:
        size = _smallest_certifying(lost, max_loss, 1 - confidence)
        if binomial_cdf(lost, size, true_loss) >= power:
            return size
        lost += 1


def prompts_needed(losses: Floats, contract: Contract) -> int | None:
    """Prompts that would certify losses like these with 80 % power; None if no number does."""
    if losses.mean() >= contract.max_loss:
        return None
    if contract.kind == "binary":
        return binomial_prompts(contract.max_loss, float(losses.mean()), contract.confidence)
    size = len(losses)
    while _resampled_power(losses, size, contract) < POWER:
        size *= 2
    low, high = size // 2, size
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        enough = _resampled_power(losses, middle, contract) >= POWER
        low, high = (low, middle) if enough else (middle, high)
    return high


def _resampled_power(losses: Floats, size: int, contract: Contract, num: int = 200) -> float:
    """Share of resamples of that size, from the losses seen, that certify."""
    generator = np.random.default_rng(0)
    passed = (
        p_value_of(generator.choice(losses, size), contract.max_loss, contract.kind)
        <= contract.level
        for _ in range(num)
    )
    return sum(passed) / num


def _smallest_certifying(lost: int, max_loss: float, level: float) -> int:
    """Fewest prompts of which `lost` may lose: P(Bin(n, max_loss) <= lost) <= level."""
    high = lost + 1
    while binomial_cdf(lost, high, max_loss) > level:
        high *= 2
    low = high // 2
    while low < high:
        middle = (low + high) // 2
        if binomial_cdf(lost, middle, max_loss) <= level:
            high = middle
        else:
            low = middle + 1
    return high
