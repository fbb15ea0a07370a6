"""A tokenizer is told by all that maps text to ids, not by the size of its vocabulary."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specctl.artifacts import load_artifact
from specctl.artifacts.compatibility import check_expected
from specctl.artifacts.manifest import Manifest
from specctl.errors import ArtifactError
from specctl.runtime.identity import tokenizer_digest
from tests.artifacts.examples import PAIR, write_artifact

VOCAB = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}
MERGES = [("a", "b"), ("b", "c")]


def tokenizer(
    merges: list[tuple[str, str]] = MERGES, vocab: dict[str, int] = VOCAB, added: str | None = None
) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if added is not None:
        backend.add_tokens([added])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


OTHERS = {
    "other merges, the same vocabulary": tokenizer(MERGES[::-1]),
    "ids that changed places": tokenizer(vocab={**VOCAB, "ab": 4, "bc": 3}),
    "an added token": tokenizer(added="<|im_start|>"),
    "another added token": tokenizer(added="<|im_end|>"),
}


def test_other_merges_read_the_same_text_otherwise() -> None:
    """Else the case below would be none."""
    one, other = tokenizer(), OTHERS["other merges, the same vocabulary"]
    assert one.get_vocab() == other.get_vocab()
    assert one.encode("abc") != other.encode("abc")


def test_each_of_them_has_a_digest_of_its_own() -> None:
    digests = {tokenizer_digest(one) for one in (tokenizer(), *OTHERS.values())}
    assert len(digests) == 1 + len(OTHERS)


def test_what_a_call_sets_is_no_part_of_it() -> None:
    used = tokenizer()
    used.pad_token = "a"
    before = tokenizer_digest(tokenizer())
    used(["ab", "abc"], padding="max_length", truncation=True, max_length=7)
    assert tokenizer_digest(used) == before


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Of an artifact that was fitted with `tokenizer()`."""
    found = load_artifact(write_artifact(tmp_path_factory.mktemp("a") / "a")).manifest
    pair = PAIR.model_copy(update={"tokenizer_digest": tokenizer_digest(tokenizer())})
    return found.model_copy(update={"pair": pair})


@pytest.mark.parametrize("name", OTHERS)
def test_an_artifact_of_another_tokenizer_is_refused(name: str, manifest: Manifest) -> None:
    check_expected(manifest, manifest.pair)
    here = PAIR.model_copy(update={"tokenizer_digest": tokenizer_digest(OTHERS[name])})
    with pytest.raises(ArtifactError) as caught:
        check_expected(manifest, here)
    assert (caught.value.code, caught.value.field) == ("E_TOKENIZER", "tokenizer")
