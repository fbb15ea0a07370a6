"""Lookup and admission: what fits, what is nearest, and what may be loaded all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specctl.artifacts import Domain, load_artifact
from specctl.artifacts.compatibility import (
    Agreement,
    Candidate,
    Expectation,
    Match,
    Wanted,
    check_expected,
    names,
    names_device,
    rank,
)
from specctl.artifacts.manifest import Manifest, Range
from specctl.errors import ArtifactError
from tests.artifacts.examples import DOMAIN, PAIR, sha, write_artifact

EXACT = Wanted(
    target_digest=PAIR.target_digest,
    drafter_digest=PAIR.drafter_digest,
    tokenizer_digest=PAIR.tokenizer_digest,
    gpu="h200",
    workload="Chat",
    dtype="bfloat16",
    batch_size=8,
    context_tokens=7,
)


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Manifest]:
    """A manifest by whether it is lossless."""
    folder = tmp_path_factory.mktemp("lookup")
    kinds = {True: "chain", False: "mars"}
    found = {k: load_artifact(write_artifact(folder / n, n)).manifest for k, n in kinds.items()}
    return {k: manifest.model_copy(update={"domain": DOMAIN}) for k, manifest in found.items()}


def changed(manifest: Manifest, **fields: Any) -> Manifest:
    """The manifest with other fields of its pair or its domain."""
    pair = {k: v for k, v in fields.items() if k in type(PAIR).model_fields}
    domain = {k: v for k, v in fields.items() if k in Domain.model_fields}
    parts = {
        "pair": manifest.pair.model_copy(update=pair),
        "domain": (manifest.domain or Domain()).model_copy(update=domain),
    }
    return manifest.model_copy(update=parts)


def one(manifest: Manifest, wanted: Wanted = EXACT) -> Match:
    [match] = rank(wanted, [Candidate("a@prod", sha("0"), manifest)])
    return match


def test_an_exact_match_has_nothing_to_say(manifests: dict[bool, Manifest]) -> None:
    found = one(manifests[True])
    assert found == Match(Candidate("a@prod", sha("0"), manifests[True]))
    assert (found.exact, found.loadable, found.score) == (True, True, 0.0)
    assert one(manifests[False]).exact
    assert one(manifests[True], Wanted()).exact


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tokenizer_digest": sha("1")}, "tokenizer"),
        ({"target_digest": sha("1")}, "target"),
        ({"drafter_digest": sha("1")}, "drafter"),
        ({"hardware": ("NVIDIA H100",)}, "gpu"),
        ({"workload": "code"}, "workload"),
        ({"dtype": "float16"}, "dtype"),
        ({"batch_size": Range(low=1, high=7)}, "batch_size"),
        ({"context_tokens": Range(low=8, high=9)}, "context_tokens"),
    ],
)
def test_each_difference_is_named(
    manifests: dict[bool, Manifest], fields: dict[str, Any], named: str
) -> None:
    for lossless in (True, False):
        match = one(changed(manifests[lossless], **fields))
        [difference] = match.differences
        assert difference.field == named
        assert match.loadable == (lossless or named not in ("tokenizer", "target", "drafter"))
        assert not match.exact
        assert match.score < 0


def test_the_unknown_is_nearer_than_what_differs(manifests: dict[bool, Manifest]) -> None:
    unknown = one(changed(manifests[True], hardware=None, workload=None))
    other = one(changed(manifests[True], hardware=("NVIDIA H100",), workload="code"))
    assert [d.found for d in unknown.differences] == ["unknown", "unknown"]
    assert not unknown.exact
    assert other.score < unknown.score < 0
    nothing = one(manifests[True].model_copy(update={"domain": None}))
    assert len(nothing.differences) == 5


def test_names_serve_where_there_is_no_digest(manifests: dict[bool, Manifest]) -> None:
    assert one(manifests[True], Wanted(target="TOY-Target", drafter=PAIR.drafter)).exact
    [difference] = one(manifests[True], Wanted(target="qwen")).differences
    assert (difference.field, difference.found) == ("target", "toy target")
    manifest = changed(manifests[True], hardware=("NVIDIA H200 NVL",), target="Qwen/Qwen3-8B-AWQ")
    match = one(manifest, Wanted(target="qwen3-8b", gpu="h200", workload="chat"))
    assert (match.exact, match.differences, match.score) == (False, (), 0.0)
    assert match.by_name == ("target", "gpu")
    assert match.closeness() == "by name (target, gpu)"
    assert one(manifest, Wanted(target="qwen3-8b-awq", gpu="h200-nvl")).closeness() == "yes"
    assert one(manifest, Wanted(target="qwen3-8b", gpu="h100")).closeness() == "no"


WORDS = {
    names: {
        Agreement.WHOLE: [("qwen3-8b", "Qwen/Qwen3-8B"), ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B")],
        Agreement.PART: [
            ("qwen3-8b", "Qwen/Qwen3-8B-AWQ"),
            ("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"),
            ("eagle3", "AngelSlim/Qwen3-8B_eagle3"),
            ("code", "code review"),
        ],
        Agreement.NONE: [
            *(("qwen3-1", "Qwen/Qwen3-14B"), ("qwen", "qwen2"), ("code", "barcode")),
            *(("", "anything"), ("x", "")),
        ],
    },
    names_device: {
        Agreement.WHOLE: [
            *(("h200", "NVIDIA H200"), ("NVIDIA H200", "NVIDIA H200")),
            *(("rtx4090", "NVIDIA GeForce RTX 4090"), ("xeon", "Intel(R) Xeon(R) Processor")),
        ],
        Agreement.PART: [
            *(("h200", "NVIDIA H200 NVL"), ("cpu", "Intel(R) Xeon(R) Processor")),
            ("CPU", "AMD EPYC 7763 64-Core Processor"),
        ],
        Agreement.NONE: [
            *(("a10", "NVIDIA A100-SXM4-80GB"), ("l4", "NVIDIA L40S"), ("h20", "NVIDIA H200")),
            ("cpu", "Tesla T4"),
        ],
    },
}


@pytest.mark.parametrize("agreement", Agreement)
@pytest.mark.parametrize("agree", WORDS)
def test_a_word_names_a_model_or_a_device_by_whole_words(
    agree: Callable[[str, str], Agreement], agreement: Agreement
) -> None:
    pairs = WORDS[agree][agreement]
    assert [agree(*pair) for pair in pairs] == [agreement] * len(pairs)


def test_all_of_what_runs_must_lie_in_what_was_measured(manifests: dict[bool, Manifest]) -> None:
    manifest = changed(manifests[True], hardware=("NVIDIA H200", "NVIDIA A100"))
    for wanted, field in (
        (Wanted(hardware=("NVIDIA A100", "NVIDIA T4")), "gpu"),
        (Wanted(batch_size=Range(low=4, high=9)), "batch_size"),
        (Wanted(batch_size=Range(low=0, high=4)), "batch_size"),
        (Wanted(context_tokens=Range(low=7, high=901)), "context_tokens"),
    ):
        assert [one.field for one in one(manifest, wanted).differences] == [field]
    both = Wanted(hardware=("NVIDIA A100", "NVIDIA H200"), batch_size=Range(low=1, high=8))
    assert one(manifest, both).exact
    here = Domain(context_tokens=Range(low=9000, high=32000))
    with pytest.raises(ArtifactError, match="context_tokens"):
        check_expected(manifest, Expectation(PAIR, here))


def order(wanted: Wanted, *given: Candidate) -> list[str]:
    return [match.candidate.reference for match in rank(wanted, given)]


def test_the_nearest_come_first_and_the_refused_last(manifests: dict[bool, Manifest]) -> None:
    lossless, other, far = manifests[True], sha("1"), ("NVIDIA H100",)
    given = {
        "refused": changed(manifests[False], drafter_digest=other),
        "other pair": changed(lossless, drafter_digest=other),
        "far": changed(lossless, drafter_digest=other, hardware=far),
        "other gpu": changed(lossless, hardware=far),
        "other load": changed(lossless, batch_size=Range(low=1, high=2)),
        "exact": lossless,
        "same score": changed(lossless, batch_size=Range(low=1, high=3)),
    }
    assert order(EXACT, *(Candidate(name, sha("0"), m) for name, m in given.items())) == [
        *("exact", "other load", "same score", "other gpu", "other pair", "far", "refused")
    ]
    named = (
        Candidate("a", sha("0"), changed(lossless, target="toy target two")),
        Candidate("b", sha("0"), lossless),
        Candidate("0", sha("0"), changed(lossless, target="another")),
        Candidate("expired", sha("0"), lossless, "it has expired"),
    )
    assert order(Wanted(target="toy target"), *named) == ["b", "a", "0", "expired"]
    assert [match.loadable for match in rank(Wanted(), named)] == [True, True, True, False]


def admitted(manifest: Manifest, **domain: Any) -> list[str] | str:
    """Warnings with the flag, after the refusal without it; the code where the flag is refused."""
    here = Domain(**{"hardware": ("NVIDIA H200",), "dtype": "bfloat16", **domain})
    with pytest.raises(ArtifactError):
        check_expected(manifest, Expectation(PAIR, here))
    said: list[str] = []
    try:
        check_expected(manifest, Expectation(PAIR, here, True, said.append))
    except ArtifactError as refusal:
        return refusal.code
    return [line.partition(":")[0] for line in said]


def test_an_exact_match_needs_no_flag_and_is_silent(manifests: dict[bool, Manifest]) -> None:
    here = Domain(hardware=("NVIDIA H200",), dtype="bfloat16", batch_size=Range(low=4, high=4))
    for manifest in manifests.values():
        check_expected(manifest, Expectation(PAIR, here, warn=pytest.fail))
        check_expected(manifest, PAIR)
        check_expected(manifest, None)


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
        ["W_DOMAIN gpu", "W_DOMAIN dtype", "W_DOMAIN batch_size"],
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_an_artifact_made_elsewhere_needs_the_flag_and_of_another_pair_losslessness(
    case: str, manifests: dict[bool, Manifest]
) -> None:
    fields, here, warned = OTHERS[case]
    assert admitted(changed(manifests[True], **fields), **here) == warned
    code = warned[0].split()[0]
    lossy = warned if code == "W_DOMAIN" else code
    assert admitted(changed(manifests[False], **fields), **here) == lossy


def test_every_difference_is_told(manifests: dict[bool, Manifest]) -> None:
    manifest = changed(manifests[True], **OTHERS["two of the pair"][0])
    with pytest.raises(ArtifactError, match=r"E_TOKENIZER.*other too: target.*--allow-mismatch"):
        check_expected(manifest, PAIR)


def test_what_an_artifact_does_not_say_is_told_alone(manifests: dict[bool, Manifest]) -> None:
    here = Domain(hardware=("any",), dtype="float32", batch_size=Range(low=99, high=99))
    of_dense_traces = changed(manifests[True], hardware=("any",), dtype="float32", batch_size=None)
    said: list[str] = []
    for manifest in (
        manifests[True].model_copy(update={"domain": None}),
        changed(manifests[True], hardware=None, dtype="float32", batch_size=None),
        of_dense_traces,
    ):
        check_expected(manifest, Expectation(PAIR, here, warn=said.append))
    of_nothing, of_some = said
    assert of_nothing.startswith("W_DOMAIN gpu, dtype, batch_size: the artifact does not say")
    assert of_some.startswith("W_DOMAIN gpu, batch_size:")
