"""From a fit to a folder that loads, decides alike in ONNX, and can be read by people."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specctl.artifacts import describe_artifact, load_artifact, twin_decisions
from specctl.errors import ArtifactError, InvariantError
from specctl.policy.parse import policy_digest
from specctl.train import cart_artifact
from specctl.train.cart import CartConfig, CartFit, fit_cart
from specctl.train.cart_artifact import cart_publication
from specctl.train.figure import report_png
from specctl.train.publish import save_fit
from specctl.train.report import _mean_interval, bins_of, report_json
from tests.artifacts.examples import PAIR, sha
from tests.train.examples import noisy_rounds

BIN_STARTS = [f"| {index}" for index in range(8)]


@pytest.fixture(scope="module")
def fit() -> CartFit:
    return fit_cart(noisy_rounds(), CartConfig())


@pytest.fixture(scope="module")
def folder(fit: CartFit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fit") / "policy"
    save_fit(cart_publication(fit, PAIR, sha("d")), place, PAIR)
    return place


def test_saved_fit_loads_as_the_same_policy(fit: CartFit, folder: Path) -> None:
    artifact = load_artifact(folder, expect=PAIR)
    assert policy_digest(artifact.policy) == policy_digest(fit.policy)
    assert artifact.manifest.fit == {"kind": "cart", **fit.config.model_dump(mode="json")}
    assert (
        CartConfig.model_validate_json(
            json.dumps({k: v for k, v in artifact.manifest.fit.items() if k != "kind"})
        )
        == fit.config
    )


def test_a_fit_of_several_sets_names_the_snapshot_of_each(fit: CartFit, tmp_path: Path) -> None:
    made = cart_publication(fit, PAIR, sha("d"))
    sets = [sha("a"), sha("b")]
    several = save_fit(made, tmp_path / "several", PAIR, snapshots=sets)
    assert several.manifest.fit == {**made.settings, "snapshots": sets}
    assert load_artifact(tmp_path / "several").manifest.fit == several.manifest.fit
    assert save_fit(made, tmp_path / "one", PAIR, snapshots=sets[:1]).manifest.fit == made.settings


def test_manifest_states_the_evidence(fit: CartFit, folder: Path) -> None:
    evidence = load_artifact(folder).manifest.evidence
    assert evidence is not None
    assert (evidence.num_prompts, evidence.num_rounds) == (20, 3000)
    assert evidence.splits["held_out"].num_rounds == len(fit.held_out_phi)
    assert evidence.metrics["held_out_mse"].value == fit.report.held_out.mse
    error = evidence.metrics["held_out_mse"]
    assert (error.low, error.high) == fit.report.held_out.mse_interval
    assert (error.level, error.num_prompts) == (0.95, fit.report.prompts["held_out"])
    assert evidence.metrics["jaccard_depth_4"].value == fit.report.stability[0].jaccard


def test_twin_of_the_folder_decides_as_the_bins_on_every_held_out_round(
    fit: CartFit, folder: Path
) -> None:
    bins, depths, tokens = twin_decisions(folder / "policy.onnx", fit.held_out_phi)
    shape = fit.policy.shape
    wanted = bins_of(fit.held_out_phi, shape.edges)  # type: ignore[union-attr]
    np.testing.assert_array_equal(bins, wanted)
    np.testing.assert_array_equal(depths, np.array(shape.plan_depths)[wanted])  # type: ignore[union-attr]
    np.testing.assert_array_equal(tokens, np.array(shape.plan_tokens)[wanted])  # type: ignore[union-attr]


@pytest.mark.parametrize("output", [0, 1, 2], ids=["bin", "depth", "num_tokens"])
def test_a_twin_that_differs_in_one_row_stops_the_publication(
    output: int, fit: CartFit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off_by_one(model: bytes, phi: np.ndarray) -> list[np.ndarray]:
        found = list(twin_decisions(model, phi))
        found[output] = found[output] + (np.arange(len(phi)) == 17)
        return found

    monkeypatch.setattr(cart_artifact, "twin_decisions", off_by_one)
    with pytest.raises(ArtifactError, match=r"E_TWIN.*another on 1 of"):
        save_fit(cart_publication(fit, PAIR, sha("d")), tmp_path / "policy", PAIR)
    assert not (tmp_path / "policy").exists()


def test_card_tells_pair_evidence_bins_and_limits(fit: CartFit, folder: Path) -> None:
    card = (folder / "README.md").read_text()
    for words in ("toy target", sha("c"), sha("d"), "another fit", "embedded", "specctl run"):
        assert words in card
    assert f"over {fit.report.held_out.num_used} rounds" in card
    assert [line[:3] for line in card.splitlines() if line[:3] in BIN_STARTS] == BIN_STARTS


def test_report_files_are_the_report(fit: CartFit, folder: Path) -> None:
    assert (folder / "report.json").read_bytes() == report_json(fit.report)
    png = (folder / "report.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert png == report_png(fit.report)


def test_show_lists_the_bins(folder: Path) -> None:
    description = describe_artifact(load_artifact(folder))
    assert [row[0] for row in description.rows] == [str(i) for i in range(8)]
    assert "20 prompts, 3000 rounds" in dict(description.facts)["evidence"]


def test_a_policy_with_a_twin_is_not_published_unchecked(fit: CartFit, tmp_path: Path) -> None:
    unchecked = replace(cart_publication(fit, PAIR, sha("d")), check_twin=None)
    with pytest.raises(InvariantError, match="give check_twin"):
        save_fit(unchecked, tmp_path / "policy", PAIR)
    assert not (tmp_path / "policy").exists()


def test_the_interval_of_the_error_is_over_prompts_not_rounds() -> None:
    """Copies of a prompt's rounds say nothing new; other prompts do."""
    values = np.array([1.0, 2.0, 4.0, 8.0])
    few = _mean_interval(values, np.arange(4))
    copied = _mean_interval(np.repeat(values, 50), np.repeat(np.arange(4), 50))
    many = _mean_interval(np.tile(values, 50), np.arange(200))
    assert few is not None
    assert many is not None
    assert copied == pytest.approx(few)
    assert many[1] - many[0] < (few[1] - few[0]) / 4
    assert _mean_interval(values, np.zeros(4, dtype=np.int64)) is None
