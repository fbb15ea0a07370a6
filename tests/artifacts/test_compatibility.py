"""Admission: whether an artifact fits a run, and what may be loaded all the same."""

from __future__ import annotations

from typing import Any

import pytest

from specctl.artifacts import Domain, load_artifact
from specctl.artifacts.compatibility import Expectation, check_expected
from specctl.artifacts.manifest import Manifest, Range
from specctl.errors import ArtifactError
from tests.artifacts.examples import DOMAIN, PAIR, sha, write_artifact


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Manifest]:
    """A manifest by whether it is lossless."""
    folder = tmp_path_factory.mktemp("lookup")
    kinds = {True: "chain", False: "mars"}
    found = {k: load_artifact(write_artifact(folder / n, n)).manifest for k, n in kinds.items()}
    return {k: manifest.model_copy(update={"domain": DOMAIN}) for k, manifest in found.items()}


def changed(manifest: Manifest, **fields: Any) -> Manifest:
    pair = {k: v for k, v in fields.items() if k in type(PAIR).model_fields}
    domain = {k: v for k, v in fields.items() if k in Domain.model_fields}
    parts = {
        "pair": manifest.pair.model_copy(update=pair),
        "domain": (manifest.domain or Domain()).model_copy(update=domain),
    }
    return manifest.model_copy(update=parts)


def test_all_of_what_runs_must_lie_in_what_was_measured(
    manifests: dict[bool, Manifest], caplog: pytest.LogCaptureFixture
) -> None:
    manifest = changed(manifests[True], hardware=("NVIDIA H200", "NVIDIA A100"))
    for here, field in (
        (Domain(hardware=("NVIDIA A100", "NVIDIA T4")), "hardware"),
        (Domain(batch_size=Range(low=4, high=9)), "batch_size"),
        (Domain(batch_size=Range(low=0, high=4)), "batch_size"),
    ):
        with pytest.raises(ArtifactError, match=f"W_DOMAIN {field}"):
            check_expected(manifest, Expectation(PAIR, here))
    both = Domain(hardware=("NVIDIA A100", "NVIDIA H200"), batch_size=Range(low=1, high=8))
    check_expected(manifest, Expectation(PAIR, both))
    assert not caplog.messages


def admitted(
    caplog: pytest.LogCaptureFixture, manifest: Manifest, **domain: Any
) -> list[str] | str:
    """Warnings with the flag, after the refusal without it; the code where the flag is refused."""
    caplog.clear()
    here = Domain(**{"hardware": ("NVIDIA H200",), "dtype": "bfloat16", **domain})
    with pytest.raises(ArtifactError):
        check_expected(manifest, Expectation(PAIR, here))
    try:
        check_expected(manifest, Expectation(PAIR, here, True))
    except ArtifactError as refusal:
        return refusal.code
    return [line.partition(":")[0] for line in caplog.messages]


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "tokenizer": ({"tokenizer_digest": sha("1")}, {}, ["E_TOKENIZER tokenizer"]),
    "target": ({"target_digest": sha("1")}, {}, ["E_TARGET target"]),
    "drafter": ({"drafter_digest": sha("1")}, {}, ["E_TARGET drafter"]),
    "two of the pair": (
        {"tokenizer_digest": sha("1"), "target_digest": sha("2")},
        {},
        ["E_TOKENIZER tokenizer", "E_TARGET target"],
    ),
    "domain": (  # names are told apart in whole: an H200 NVL is another device
        {"hardware": ("NVIDIA H200 NVL",)},
        {"dtype": "float16", "batch_size": Range(low=9, high=9)},
        ["W_DOMAIN hardware", "W_DOMAIN dtype", "W_DOMAIN batch_size"],
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_an_artifact_made_elsewhere_needs_the_flag_and_of_another_pair_losslessness(
    case: str, manifests: dict[bool, Manifest], caplog: pytest.LogCaptureFixture
) -> None:
    fields, here, warned = OTHERS[case]
    assert admitted(caplog, changed(manifests[True], **fields), **here) == warned
    code = warned[0].split()[0]
    lossy = warned if code == "W_DOMAIN" else code
    assert admitted(caplog, changed(manifests[False], **fields), **here) == lossy


def test_what_an_artifact_does_not_say_is_told_alone(
    manifests: dict[bool, Manifest], caplog: pytest.LogCaptureFixture
) -> None:
    here = Domain(hardware=("any",), dtype="float32", batch_size=Range(low=99, high=99))
    of_dense_traces = changed(manifests[True], hardware=("any",), dtype="float32", batch_size=None)
    for manifest in (
        manifests[True].model_copy(update={"domain": None}),
        changed(manifests[True], hardware=None, dtype="float32", batch_size=None),
        of_dense_traces,
    ):
        check_expected(manifest, Expectation(PAIR, here))
    of_nothing, of_some = caplog.messages
    assert of_nothing.startswith(
        "W_DOMAIN hardware, dtype, batch_size: the artifact does not record this"
    )
    assert of_some.startswith("W_DOMAIN hardware, batch_size:")
