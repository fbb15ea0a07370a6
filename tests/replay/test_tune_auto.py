"""`fit auto`: the fits, the families that compete, and the trace of a refused fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts import Artifact, load_artifact
from specctl.errors import OutputError, SpecctlError, TraceEmptyError
from specctl.replay.tune.candidates import parse_families
from specctl.replay.tune.tuning import Attempt, attempts, families_of
from tests.artifacts.examples import PAIR, write_artifact
from tests.cli.command import refuses

NO_SPOT = TraceEmptyError("fit echo", expected="a sweet spot", found="none", fix="lower --delta")
NO_ROOM = OutputError("fits", expected="room", found="none", fix="free some")


def tried(out: Path, **fits: str | SpecctlError) -> list[Attempt]:
    """Fits by name: each writes an artifact of a kind, or is refused."""

    def writes(kind: str | SpecctlError) -> Any:
        def write(folder: Path) -> Artifact:
            if isinstance(kind, SpecctlError):
                raise kind
            return load_artifact(write_artifact(folder, kind))

        return write

    return list(attempts({name: writes(kind) for name, kind in fits.items()}, out))


def test_a_refused_fit_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    found = tried(tmp_path, hetero="hetero", echo=NO_SPOT, ddd="ddd")
    assert [attempt.folder is not None for attempt in found] == [True, False, True]
    sentence = found[1].outcome.sentence()
    assert sentence.startswith("fit echo: fit echo: expected a sweet spot, found none")
    digest = load_artifact(tmp_path / "fits" / "hetero").digest
    assert found[0].outcome.sentence() == f"fit hetero: artifact {digest}"


def test_a_place_that_cannot_be_written_ends_it(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        tried(tmp_path, hetero=NO_ROOM, ddd="ddd")
    assert not (tmp_path / "fits" / "ddd").exists()


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_families_are_known_to_tune(tmp_path: Path, is_shared: bool) -> None:  # noqa: FBT001
    found = tried(tmp_path, hetero="hetero", c2t="c2t_ffn", echo="echo", gbdt=NO_SPOT)
    names = families_of(found, is_shared=is_shared)
    families = parse_families(names, (), PAIR)
    assert [family.name for family in families] == list(names)
    assert any(family.budget for family in families) == is_shared
    fitted = [Path(family.name).name for family in families if family.artifact is not None]
    fits = ["hetero", "c2t", "echo"]
    budgets = [*(f"{fit}+survival" for fit in fits), "echo+echo_budget"] if is_shared else []
    assert fitted == fits + budgets


def test_a_shape_that_learns_is_not_put_under_a_shared_budget(tmp_path: Path) -> None:
    found = tried(tmp_path, adasd="adasd", hetero="hetero")
    names = [Path(name).name for name in families_of(found, is_shared=True)]
    assert {"adasd", "hetero", "hetero+survival"} <= set(names)
    assert "adasd+survival" not in names


@pytest.mark.parametrize(
    "skip",
    [
        ["--skip", "c3t"],
        [f"--skip={n}" for n in ("hetero", "c2t", "gbdt", "distilled", "echo", "adasd")],
    ],
)
def test_names_to_skip_are_checked_before_anything_is_read(tmp_path: Path, skip: list[str]) -> None:
    line = refuses(2, "fit", "auto", tmp_path, "-o", tmp_path / "out", "--cost-model", "x", *skip)
    assert "--skip" in line
    assert not (tmp_path / "out").exists()
