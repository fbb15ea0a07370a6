"""The loader takes the steps that docs/artifact-format.md lists, in that order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from specctl.artifacts import loading
from specctl.artifacts.files import read_folder
from specctl.artifacts.loading import STEPS, LoadRequest, checked
from specctl.artifacts.strict_json import MAX_KEY_CHARS, MAX_VALUES, most_values, parse_strict
from specctl.errors import ArtifactError
from tests.artifacts.attacks import checked as checked_refusal
from tests.artifacts.examples import read_manifest, replace_file, write_manifest

FORMAT = Path(__file__).parents[2] / "docs" / "artifact-format.md"
OF_REGISTRIES = ("signature", "freshness")


def documented() -> list[tuple[int, str, set[str]]]:
    """Number, name and codes of each step."""
    table = FORMAT.read_text().split("| step |")[1].split("\n\n")[0]
    steps: list[tuple[int, str, set[str]]] = []
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0]:
            number, _, name = cells[0].partition(" ")
            steps.append((int(number), name, set()))
        steps[-1][2].update(re.findall(r"`([EW]_\w+)`", cells[2]))
    return steps


def test_the_steps_are_those_of_the_format_in_its_order() -> None:
    steps = documented()
    assert [number for number, _, _ in steps] == list(range(1, len(steps) + 1))
    names = [name for _, name, _ in steps if name not in OF_REGISTRIES]
    assert names == [name for name, _ in STEPS]


def broken_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Breaks a sound folder step by step, the last one first; gives the step and its code."""
    replace_file(folder, "selftest.safetensors", (folder / "policy.safetensors").read_bytes())
    yield "self-test", "E_SELFTEST"
    replace_file(folder, "policy.onnx", b"no graph")
    yield "twin", "E_TWIN"
    replace_file(folder, "README.md", b"hf_" + b"a" * 30)
    yield "privacy", "E_PRIVACY"
    replace_file(folder, "report.json", b"{")
    yield "report", "E_MANIFEST"
    write_manifest(folder, {**read_manifest(folder), "lossless": False})
    yield "class", "E_CLASS"
    manifest = read_manifest(folder)
    manifest["policy"]["shape"]["gammas"] = [0.5] * 9
    write_manifest(folder, manifest)
    yield "policy", "E_POLICY"
    replace_file(folder, "policy.safetensors", b"no tensors")
    yield "tensors", "E_WEIGHTS"
    write_manifest(folder, {**read_manifest(folder), "features": ["phi"] * 33})
    yield "features", "E_COST"
    (folder / "policy.onnx").write_bytes(b"unlisted")
    yield "digests", "E_DIGEST"
    write_manifest(folder, {**read_manifest(folder), "artifact_version": 99})
    yield "manifest", "E_SCHEMA"


def test_the_first_step_that_fails_is_the_one_that_speaks(folder: Path) -> None:
    """Each file is broken on top of all that come later, and speaks for them with its own code."""
    codes = {name: codes for _, name, codes in documented()}
    order = [name for name, _ in STEPS]
    seen = []
    for step, code in broken_files(folder):
        with pytest.raises(ArtifactError) as caught:
            checked(read_folder(folder), LoadRequest())
        checked_refusal(caught.value, code)
        assert code in codes[step]
        seen.append(step)
    assert seen == sorted(seen, key=order.index, reverse=True)


def test_nothing_is_searched_before_the_policy_is_known_to_cost_little(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("check_private", "check_twin"):
        monkeypatch.setattr(loading, name, lambda *_: pytest.fail("searched"))
    write_manifest(folder, {**read_manifest(folder), "lossless": False})
    with pytest.raises(ArtifactError, match="E_CLASS"):
        checked(read_folder(folder), LoadRequest())


# ------------------------------------------------------------------ the bounds of JSON


@pytest.mark.parametrize("text", [b"[]", b"{}", b"[[],[]]", b'{"a":[1,2,{"b":{}}],"c":0}', b"0"])
def test_a_text_holds_no_more_values_than_are_counted(text: bytes) -> None:
    def count(tree: object) -> int:
        inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
        return 1 + sum(map(count, inner))

    assert count(parse_strict(text)) <= most_values(text)


@pytest.mark.parametrize("one", [b"0", b"[]", b"{}", b"[[]]", b'{"a":[0]}'])
def test_values_are_bounded_however_they_are_nested(one: bytes) -> None:
    fits = (MAX_VALUES - 2) // most_values(one)
    assert len(parse_strict(b"[" + b",".join([one] * fits) + b"]")) == fits
    with pytest.raises(ArtifactError) as caught:
        parse_strict(b"[" + b",".join([one] * (fits + 3)) + b"]")
    checked_refusal(caught.value, "E_MANIFEST")


def test_keys_are_no_longer_than_names() -> None:
    longest = "k" * MAX_KEY_CHARS
    assert parse_strict(f'{{"{longest}":1}}'.encode()) == {longest: 1}
    with pytest.raises(ArtifactError) as caught:
        parse_strict(f'{{"a":[{{"{longest}k":1}}]}}'.encode())
    assert "256 characters" in str(checked_refusal(caught.value, "E_MANIFEST"))
