"""`fit auto`: every fit that the traces allow, every baseline, one race for a load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specctl.artifacts import Artifact
from specctl.errors import OutputError, SpecctlError
from specctl.replay.online import is_online
from specctl.replay.tune.results import TuneResult, fit_sentence

FITS_FOLDER = "fits"
RIVALS = ("confidence", "svip", "threshold:top_k=8", "opt_tree:top_k=8", "ddd:top_k=8")
"""Shapes that need no fit and that a fitted one has to beat too. At one beam, which changes least
of what they have to set: whole grids (`tune`) take three times as long."""
SHARED_RIVALS = ("chain+survival", "eagle2+survival", "threshold+survival")
"""The same where requests share a batch."""


@dataclass(frozen=True)
class Fitter:
    """One of the fits: `write` fits and writes an artifact into a folder."""

    name: str
    write: Callable[[Path], Artifact]


@dataclass(frozen=True)
class Attempt:
    """What became of a fit: an artifact in `folder`, or why there is none.

    Attributes:
        is_online: its shape learns from its own rounds, so no log tells what it does under a
            budget that other requests share.
    """

    name: str
    folder: Path | None = None
    digest: str | None = None
    refusal: str | None = None
    is_online: bool = False

    def to_json(self) -> dict[str, str | None]:
        return {"fit": self.name, "artifact_digest": self.digest, "refusal": self.refusal}

    def sentence(self) -> str:
        """The outcome in words."""
        return fit_sentence(self.to_json())


def attempts(fitters: Sequence[Fitter], out: Path) -> Iterator[Attempt]:
    """Runs the fits one after another, each into its own folder below `out`.

    A fit that the traces do not allow (no gate separates anything, too few rounds) is no reason to
    give up the others: its refusal is kept and told.

    Raises:
        OutputError: the place cannot be written.
    """
    for fitter in fitters:
        folder = out / FITS_FOLDER / fitter.name
        try:
            artifact = fitter.write(folder)
        except OutputError:
            raise
        except SpecctlError as refusal:
            yield Attempt(fitter.name, refusal=" ".join(str(refusal).split()))
        else:
            learns = is_online(artifact.policy)
            yield Attempt(fitter.name, folder, artifact.digest, is_online=learns)


def families_of(tried: Sequence[Attempt], *, is_shared: bool) -> tuple[str, ...]:
    """What races: the fitted shapes, the rivals, and both under budgets where a batch shares.

    Args:
        is_shared: requests meet in batches.
    """
    fitted = [attempt for attempt in tried if attempt.folder is not None]
    alone = (*(str(attempt.folder) for attempt in fitted), *RIVALS)
    if not is_shared:
        return alone
    survival = [f"{a.folder}+survival" for a in fitted if not a.is_online]
    elastic = [f"{a.folder}+echo_budget" for a in fitted if a.name == "echo"]
    return (*alone, *survival, *elastic, *SHARED_RIVALS)


def with_attempts(result: TuneResult, tried: Sequence[Attempt]) -> TuneResult:
    """The result, which now also says what became of the fits."""
    fits = [attempt.to_json() for attempt in tried]
    return replace(result, facts={**result.facts, "fits": fits})
