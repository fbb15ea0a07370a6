"""Who stands in the tables: the control, and every family with its fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specctl.policy import EntropyBins, Policy, ScoredTree
from systems.families import THRESHOLD, Family, fitted_family

SYSTEMS = {
    "HeteroSpec": "HeteroSpec",
    "C2T, paper": "C2T",
    "C2T, path and text": "C2T",
    "survival table": "ours",
}
"""Families of the comparison at equal depth and whose they are; a line adds one."""


@dataclass(frozen=True)
class Roster:
    """Fitted policies by name, one of each seed."""

    fitted: dict[str, list[Policy]]

    def compared(self) -> Iterator[tuple[str, str, list[Family]]]:
        """Name, whose, and the family of every fit; the plain threshold first."""
        yield "threshold", "control", [THRESHOLD]
        for name, whose in SYSTEMS.items():
            yield name, whose, [self.family(name, seed) for seed in range(self.num_seeds)]

    def family(self, name: str, seed: int) -> Family:
        """One fit's."""
        return fitted_family(f"{name}, seed {seed}", self.fitted[name][seed])

    def scored(self, name: str, seed: int) -> ScoredTree:
        """One fit's shape, of a scorer."""
        shape = self.fitted[name][seed].shape
        assert isinstance(shape, ScoredTree), name
        return shape

    def bins(self, name: str, seed: int) -> EntropyBins:
        """One fit's shape, of HeteroSpec."""
        shape = self.fitted[name][seed].shape
        assert isinstance(shape, EntropyBins), name
        return shape

    @property
    def num_seeds(self) -> int:
        return len(next(iter(self.fitted.values())))
