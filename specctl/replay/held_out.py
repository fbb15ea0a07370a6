"""The choice of prompts that policies are scored or timed on, outside the prompts of their fits.

An artifact records the prompts of its fit and choice (`Evidence.fitted_on`). All rows of a table
are scored on the same prompts, so comparisons are paired: on the prompts outside all fits, if at
least `MIN_PROMPTS` are left; else on all, and policies fitted on some of them are marked and cannot
win.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.artifacts.manifest import Manifest
from specctl.logs.parquet import collected
from specctl.logs.trace_set import TraceSet
from specctl.records import HELD_OUT_FRAC
from specctl.replay.config import LadderConfig, TuneConfig
from specctl.runtime.words import NamedPolicy
from specctl.stats import MIN_PROMPTS, Split, split_prompts

logger = logging.getLogger(__name__)
SplitOptions = tuple[float, int]
"""`--held-out` and `--seed`."""


def prompts_digest(prompt_ids: Iterable[str]) -> str:
    """`sha256:<hex>` of ids in any order; equal for equal sets of prompts."""
    text = "\n".join(sorted(prompt_ids)).encode()
    return f"sha256:{hashlib.sha256(text).hexdigest()}"


@dataclass(frozen=True)
class ScoredPrompts:
    """The prompts of all rows of a table."""

    prompts: tuple[str, ...]  # their ids, sorted
    num_left_out: int = 0  # further prompts, of some policy's fit
    trained: tuple[str, ...] = ()  # labels of policies fitted on some of `prompts`

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of `TraceFacts`."""
        return {
            "prompts_digest": prompts_digest(self.prompts),
            "scored_prompts": self.prompts,
            "num_prompts_left_out": self.num_left_out or None,
            "scored_on_training_prompts": self.trained or None,
        }


def logged_prompts(traces: TraceSet) -> list[str]:
    """Prompts with rows, sorted; an answer of one token has none."""
    import polars as pl

    rounds = traces.scan("rounds").select(pl.col("prompt_id").cast(pl.String).unique())
    return sorted(collected(rounds)["prompt_id"].to_list())


def choose_prompts(
    prompt_ids: Iterable[str],
    named: Iterable[NamedPolicy],
    traces: TraceSet | None,
    *,
    split: SplitOptions | None = None,
    all_prompts: bool = False,
) -> ScoredPrompts:
    """The prompts that policies are scored on, among those of a verb.

    A warning names the policies that cannot win and the command that changes this, unless
    `all_prompts` is set.

    Args:
        traces: None where prompts are decoded.
        split: the verb's own; None where it scores all prompts of the traces.
        all_prompts: leave none out.
    """
    prompts, named = tuple(sorted(set(prompt_ids))), list(named)
    fitted = {one.label: one.fitted_on(prompts) for one in named}
    others = set(prompts).difference(*fitted.values())
    if len(others) == len(prompts):
        return ScoredPrompts(prompts)
    if not all_prompts and len(others) >= MIN_PROMPTS:
        return ScoredPrompts(tuple(sorted(others)), len(prompts) - len(others))
    trained = tuple(label for label, of in fitted.items() if of)
    if not all_prompts:
        logger.warning(
            "%s: fitted on %s of the %s prompts that are scored, so it cannot win; %s",
            ", ".join(trained),
            len(prompts) - len(others),
            len(prompts),
            _remedy(named, trained, traces, split),
        )
    return ScoredPrompts(prompts, trained=trained)


def split_and_choose(
    prompt_ids: Collection[str],
    named: Iterable[NamedPolicy],
    traces: TraceSet,
    config: LadderConfig | TuneConfig,
) -> tuple[Split, ScoredPrompts]:
    """Prompts to choose on and prompts to report on, the latter as `choose_prompts` has them."""
    share, seed = config.held_out_frac, config.seed
    sides = split_prompts(prompt_ids, held_out_frac=share, seed=seed)
    choice: dict[str, Any] = {"split": (share, seed), "all_prompts": config.all_prompts}
    scored = choose_prompts(sides.held_out, named, traces, **choice)
    return Split(sides.train, scored.prompts), scored


def _remedy(
    named: Sequence[NamedPolicy],
    trained: Collection[str],
    traces: TraceSet | None,
    split: SplitOptions | None,
) -> str:
    """The next step that leaves enough prompts outside all fits."""
    if traces is None:
        return f"give {MIN_PROMPTS} or more others in PROMPTS"
    prompts = logged_prompts(traces)
    if len(prompts) < 2 * MIN_PROMPTS:
        return (
            f"collect {2 * MIN_PROMPTS} prompts or more and fit it again: a split of "
            f"{len(prompts)} leaves no {MIN_PROMPTS} to score on"
        )
    marked = [one for one in named if one.label in trained]
    fits = (artifact.manifest for one in marked for _, artifact in one.parts)
    own = {found for manifest in fits if (found := _split_of(manifest))}
    if split is not None and len(own) == 1:
        [(share, seed)] = own
        return f"give --held-out {share:g} --seed {seed}, as it was fitted"
    share, seed = split or (HELD_OUT_FRAC, 0)
    return f"fit it again with --held-out {share:g} --seed {seed}"


def _split_of(manifest: Manifest) -> SplitOptions | None:
    """The split of a fit."""
    fit = manifest.fit or {}
    share, seed = fit.get("held_out_frac"), fit.get("seed")
    return (share, seed) if isinstance(share, float) and isinstance(seed, int) else None
