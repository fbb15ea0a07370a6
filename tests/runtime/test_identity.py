"""What makes two tokenizers one: all that maps text to ids, not the vocabulary alone."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specctl.runtime.identity import tokenizer_digest

VOCABULARY = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}
MERGES = [("a", "b"), ("b", "c")]


def tokenizer(
    vocabulary: dict[str, int] = VOCABULARY,
    merges: list[tuple[str, str]] = MERGES,
    added: tuple[str, ...] = (),
    *,
    splits: bool = False,
) -> Any:
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    if splits:
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_the_same_tokenizer_has_one_digest() -> None:
    first, padded = tokenizer(), tokenizer()
    padded.backend_tokenizer.enable_padding(length=8)
    padded.backend_tokenizer.enable_truncation(8)
    assert tokenizer_digest(first) == tokenizer_digest(padded) == tokenizer_digest(tokenizer())


@pytest.mark.parametrize(
    "other",
    [
        tokenizer(merges=MERGES[::-1]),
        tokenizer(added=("c a",)),
        tokenizer(splits=True),
        tokenizer({"b": 0, "a": 1, "c": 2, "ab": 3, "bc": 4}),
    ],
    ids=["merges in another order", "an added token", "another split", "ids swapped"],
)
def test_another_way_to_the_ids_is_another_tokenizer(other: Any) -> None:
    assert tokenizer_digest(other) != tokenizer_digest(tokenizer())


def test_merges_matter_where_the_vocabulary_is_the_same() -> None:
    """Why: one text, one vocabulary, other ids, so other entropies."""
    one, other = tokenizer(), tokenizer(merges=MERGES[::-1])
    assert one.get_vocab() == other.get_vocab()
    assert one("abc")["input_ids"] == [3, 2]
    assert other("abc")["input_ids"] == [0, 4]
