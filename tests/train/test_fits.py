"""Every fit: the same at a seed, blind to held-out prompts, reported alike in every form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from pydantic import BaseModel

from specctl.artifacts import describe_artifact, load_artifact
from specctl.artifacts.onnx_twin import twin_bytes
from specctl.errors import ArtifactError, InvariantError, RecordError, TraceEmptyError
from specctl.logs.node_sample import LoggedNodes
from specctl.stats import split_prompts
from specctl.train import configs
from specctl.train.c2t import fit_c2t
from specctl.train.cart import fit_rounds
from specctl.train.report import Fit, save_fit
from tests.artifacts.examples import PAIR, sha
from tests.train import cases

Fits = dict[str, Fit[Any]]
Folders = dict[str, Path]


@pytest.mark.parametrize("name", cases.FITS)
def test_same_data_and_seed_give_the_same_bytes(name: str, source: LoggedNodes, fits: Fits) -> None:
    again = cases.FITS[name](source)
    assert again.policy == fits[name].policy
    assert again.report.json_bytes() == fits[name].report.json_bytes()


class Spoiled:
    """A log whose held-out prompts accept nothing but first children."""

    def __init__(self, source: LoggedNodes, prompts: set[str]) -> None:
        self.source, self.prompts, self.support = source, prompts, source.support

    def batches(self, rule: Any, prompt_ids: Any = None) -> Iterator[Any]:
        for batch in self.source.batches(rule, prompt_ids):
            rows = np.isin(batch.prompt_id, list(self.prompts))
            accepted = batch.accepted.clone()
            accepted[rows, 2:] = False
            yield replace(batch, accepted=accepted)


def spoiled_frame(frame: pl.DataFrame, column: str, value: int) -> pl.DataFrame:
    """The rounds with one value of a column on all held-out prompts."""
    held_out = split_prompts(frame["prompt_id"], held_out_frac=0.2, seed=0).held_out
    spoiled = pl.when(pl.col("prompt_id").is_in(held_out)).then(value).otherwise(pl.col(column))
    return frame.with_columns(spoiled.cast(frame.schema[column]).alias(column))


def spoiled(name: str, source: LoggedNodes) -> Fit[Any]:
    """The fit, with nonsense on its held-out prompts."""
    if name == "hetero":
        return fit_rounds(spoiled_frame(cases.noisy_rounds(), "tcr", 99), configs.CartConfig())
    if name == "echo":
        frame = spoiled_frame(cases.planted(), "accepted", 0)
        return cases.echo_fit(frame, cases.ECHO)
    config = cases.c2t_config()
    split = split_prompts(cases.NODE_PROMPTS, held_out_frac=config.held_out_frac, seed=config.seed)
    return cases.FITS[name](Spoiled(source, set(split.held_out)))


@pytest.mark.parametrize("name", cases.FITS)
def test_held_out_prompts_choose_nothing(name: str, source: LoggedNodes, fits: Fits) -> None:
    found = spoiled(name, source)
    assert found.policy == fits[name].policy
    assert found.report.json_bytes() != fits[name].report.json_bytes(), "the report looks at them"


def test_one_prompt_is_refused(source: LoggedNodes) -> None:
    one = cases.noisy_rounds().with_columns(prompt_id=pl.lit("only"))
    lone = cases.planted().with_columns(prompt_id=pl.lit("only"))
    for fit in (
        lambda: fit_rounds(one, configs.CartConfig()),
        lambda: cases.echo_fit(lone, cases.ECHO),
        lambda: fit_c2t(source, cases.NODE_PROMPTS[:1], cases.c2t_config()),
    ):
        with pytest.raises(TraceEmptyError, match="at least 2 prompts"):
            fit()


@pytest.fixture(scope="module")
def folders(fits: Fits, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    place = tmp_path_factory.mktemp("artifacts")
    for name, fit in fits.items():
        save_fit(fit, place / name, PAIR, sha("d"))
    return {name: place / name for name in fits}


@pytest.mark.parametrize("name", cases.FITS)
def test_the_artifact_says_what_the_report_says(name: str, fits: Fits, folders: Folders) -> None:
    fit, folder = fits[name], folders[name]
    artifact = load_artifact(folder, expect=PAIR)
    assert artifact.policy == fit.policy
    assert artifact.manifest.lossless
    assert artifact.manifest.fit == {"kind": fit.report.kind, **fit.report.config}
    evidence = artifact.manifest.evidence
    assert evidence is not None
    sizes = {side: (s.num_prompts, s.num_rounds) for side, s in evidence.splits.items()}
    assert sizes == dict(fit.report.splits)
    assert evidence.num_prompts == sum(prompts for prompts, _ in sizes.values())
    assert evidence.metrics.keys() == fit.report.metrics.keys()
    for figure in evidence.metrics.values():
        if figure.low is not None:
            assert (figure.level, figure.num_prompts) == (0.95, sizes["held_out"][0])
    assert (folder / "report.json").read_bytes() == fit.report.json_bytes()
    assert describe_artifact(artifact)


@pytest.mark.parametrize("name", cases.FITS)
def test_the_card_holds_what_the_report_holds(name: str, fits: Fits, folders: Folders) -> None:
    card, report = (folders[name] / "README.md").read_text(), fits[name].report
    for words in (PAIR.target, sha("d"), "Lossless", "specctl run", "embedded", *report.limits):
        assert words in card
    for line in report.summary:
        assert line.replace("|", "\\|") in card
    for table in report.tables:
        assert f"## {table.title}" in card
        assert card.count("\n| ") >= len(table.rows)


def test_a_fit_of_several_sets_names_the_snapshot_of_each(fits: Fits, tmp_path: Path) -> None:
    fit, sets = fits["hetero"], [sha("a"), sha("b")]
    several = save_fit(fit, tmp_path / "several", PAIR, sha("d"), snapshots=sets)
    plain = {"kind": "hetero", **fit.report.config}
    assert several.manifest.fit == {**plain, "snapshots": sets}
    one = save_fit(fit, tmp_path / "one", PAIR, sha("d"), snapshots=sets[:1])
    assert one.manifest.fit == plain


OTHERS: dict[str, dict[str, Any]] = {
    "hetero": {"edges": lambda edges: (*edges[:-1], edges[-1] + 2)},
    "echo": {"thresholds": lambda cuts: (cuts[0], 0.15)},
    "c2t": {"scorer": lambda scorer: scorer.model_copy(update={"b2": (3.0,)})},
}


@pytest.mark.parametrize("name", cases.FITS)
def test_a_twin_that_decides_otherwise_is_not_published(
    name: str, fits: Fits, tmp_path: Path
) -> None:
    fit, [(field, change)] = fits[name], OTHERS[name].items()
    shape: Any = fit.policy.shape
    shape = shape.model_copy(update={field: change(getattr(shape, field))})
    other = fit.policy.model_copy(update={"shape": shape})
    assert fit.check_twin is not None
    fit.check_twin(twin_bytes(fit.policy))
    with pytest.raises(ArtifactError, match=r"E_TWIN.*decides differently from the rule"):
        save_fit(replace(fit, policy=other), tmp_path / "policy", PAIR, sha("d"))
    with pytest.raises(InvariantError, match="give check_twin"):
        save_fit(replace(fit, check_twin=None), tmp_path / "policy", PAIR, sha("d"))
    assert not (tmp_path / "policy").exists()


BAD: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (configs.EchoConfig, {"width": 5, "max_width": 4}),
    (configs.MarsConfig, {"thetas": (0.9, 0.95)}),
    (configs.MarsConfig, {"thetas": (1.2,)}),
    (configs.MarsConfig, {"thetas": (2.0, 1.0), "form": "margin"}),
    (configs.AdasdConfig, {"clips": (0.2, 0.1)}),
    (configs.AdasdConfig, {"clips": (0.0, 0.1)}),
]


@pytest.mark.parametrize(("config", "fields"), BAD)
def test_settings_that_contradict_each_other(
    config: type[BaseModel], fields: dict[str, Any]
) -> None:
    with pytest.raises(RecordError):
        config(**fields)
