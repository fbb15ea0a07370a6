"""Who stands in the table: controls, and every family whose fit this version has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specctl.policy import EntropyBins, Policy, ScoredTree, SparseGates
from systems import fits
from systems.families import (
    CONTROLS,
    Family,
    Settings,
    gates_family,
    hetero_family,
    hetero_grid,
    scored_family,
)

BETAS = (0.015, 0.03, 0.06, 0.12, 0.22, 0.38, 0.6)
SCORED = {
    "C2T": fits.C2T,
    "C2T, path product": fits.C2T_PATH,
    "C2T, path and text": fits.C2T_TEXT,
    "gbdt": fits.GBDT,
}


@dataclass(frozen=True)
class Roster:
    """Families by name.

    Attributes:
        curves: one knob a depth. grids: further settings, to be chosen on training prompts.
        fitted: policies as their fits made them. absent: why a family is not there.
    """

    curves: tuple[Family, ...]
    grids: dict[str, Settings]
    fitted: dict[str, Policy]
    absent: dict[str, str]


def roster(traces: Sequence[Path], work: Path, *, may_fit: bool = True) -> Roster:
    """Fits whatever can be fitted; or takes what `work` holds."""
    made = {name: fits.fitted(fit, traces, work, may_fit=may_fit) for name, fit in _all_fits()}
    absent = {name: found for name, found in made.items() if isinstance(found, str)}
    policies = {name: found for name, found in made.items() if isinstance(found, Policy)}
    learned = [_family(name, policy) for name, policy in policies.items()]
    grids = {
        name: hetero_grid(policy.shape)
        for name, policy in policies.items()
        if isinstance(policy.shape, EntropyBins)
    }
    return Roster((*CONTROLS, *learned), grids, policies, absent)


def _all_fits() -> Iterator[tuple[str, fits.Fit]]:
    yield "HeteroSpec", fits.HETERO
    yield from SCORED.items()
    yield "ECHO gates", fits.ECHO


def _family(name: str, policy: Policy) -> Family:
    shape = policy.shape
    if isinstance(shape, ScoredTree):
        return scored_family(name, shape, BETAS)
    if isinstance(shape, EntropyBins):
        return hetero_family(name, shape)
    assert isinstance(shape, SparseGates), f"no curve for {shape.kind}"
    return gates_family(name, shape)
