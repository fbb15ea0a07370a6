"""What a user wants, in words: models that are here give digests, all else is a part of a name."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from specctl.artifacts.compatibility import Wanted
from specctl.embedded import embedded_path
from specctl.errors import ModelError, UsageError
from specctl.runtime.identity import wanted_of
from specctl.runtime.load import load_pair


def test_a_model_here_gives_the_digests_of_its_pair() -> None:
    pair = load_pair("embedded", "embedded", device="cpu").fingerprint
    for target, drafter in (
        ("embedded", "embedded"),
        (str(embedded_path("target")), str(embedded_path("eagle3"))),
    ):
        found = wanted_of(Wanted(target=target, drafter=drafter, gpu="h200"))
        assert (found.target_digest, found.drafter_digest) == (
            pair.target_digest,
            pair.drafter_digest,
        )
        assert (found.tokenizer_digest, found.gpu) == (pair.tokenizer_digest, "h200")


def test_other_words_are_parts_of_names() -> None:
    asked = Wanted(target="Qwen3-8B", drafter="no such/drafter at all", batch_size=4)
    assert wanted_of(asked) == asked
    assert wanted_of(Wanted()) == Wanted()


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        wanted_of(Wanted(target=str(tmp_path)))


def test_a_model_without_its_tokenizer_is_refused_on_one_line(tmp_path: Path) -> None:
    """transformers has 64 lines to say of it."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(embedded_path("target") / name, tmp_path)
    with pytest.raises(ModelError, match="AutoTokenizer of") as refused:
        wanted_of(Wanted(target=str(tmp_path)))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("path", ["/no/such/folder", "./none", "../none", "~/none"])
def test_a_path_that_is_no_folder_is_no_name(path: str) -> None:
    for pair in ((path, None), (None, path)):
        with pytest.raises(UsageError, match="no folder"):
            wanted_of(Wanted(target=pair[0], drafter=pair[1]))


@pytest.mark.parametrize("option", ["gpu", "workload"])
def test_a_word_has_letters_or_digits(option: str) -> None:
    for word in ("", "--", " "):
        with pytest.raises(UsageError, match=f"--{option}"):
            wanted_of(replace(Wanted(), **{option: word}))
    with pytest.raises(UsageError, match="--for"):
        wanted_of(Wanted(target=""))


def test_number_formats_are_known_by_their_names_and_short_ones() -> None:
    said = ("bf16", "BFloat16", "bfloat16", "fp16", "half", "fp32", "float32")
    found = [wanted_of(Wanted(dtype=name)).dtype for name in said]
    assert found == [*["bfloat16"] * 3, *["float16"] * 2, *["float32"] * 2]
    assert wanted_of(Wanted()).dtype is None
    with pytest.raises(UsageError, match=r"bfloat16.*bf16"):
        wanted_of(Wanted(dtype="bfloat17"))
