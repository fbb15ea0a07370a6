"""`run --decisions`: the same figures by every backend, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specctl.artifacts import Origin, save_artifact
from specctl.policy import EntropyBins, Policy, StaticTree
from specctl.runtime.load import load_pair, pair_domain
from tests.cli.command import passes, refuses
from tests.cli.conftest import SMALL

COUNTS = ("policy", "calls", "verified_tokens", "mean_acceptance_length", "artifact_digest")


@pytest.fixture(scope="module")
def hetero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies") / "hetero"
    pair = load_pair("embedded", "embedded", device="cpu")
    shape = EntropyBins(base=StaticTree(depth=3, top_k=4, num_tokens=12), edges=(1.0, 2.0, 3.0))
    origin = Origin(pair=pair.fingerprint, domain=pair_domain(pair))
    save_artifact(folder, Policy(shape=shape), origin, card="# bins\n")
    return folder


def test_figures_are_those_of_torch(hetero: Path, prompts: Path, tmp_path: Path) -> None:
    found = []
    for decisions in ("torch", "onnx"):
        options = ("--compare", f"ar,{hetero}", "--decisions", decisions, *SMALL)
        rows = json.loads(
            passes("run", prompts, *options, "--json", "-o", tmp_path / decisions).out
        )
        found.append([[row[name] for name in COUNTS] for row in rows])
        facts = json.loads((tmp_path / decisions / "run.json").read_text())
        assert facts["decisions"] == decisions
        assert rows[1]["equal_to_ar"] is True
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--decisions", "triton"), "expected auto, fused, torch, onnx, found 'triton'"),
        (("--decisions", "fused"), "found no graphs on cpu"),
        (("--decisions", "onnx", "--compare", "ar,eagle2"), "decisions onnx, shape eagle2"),
    ],
)
def test_what_cannot_be_had_is_refused(options: tuple[str, ...], says: str, prompts: Path) -> None:
    assert says in refuses(2, "run", prompts, *options, *SMALL)
