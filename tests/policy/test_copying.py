"""Copies of the text: which tokens are drafted, by a transcription of the rule, and what they do
not go with."""

from __future__ import annotations

import random

import pytest
import torch

from specctl.errors import UsageError
from specctl.features import recent_tokens
from specctl.policy import Policy, RootOnly, parse_policy, policy_digest, policy_json
from specctl.policy.copying import CopyText
from specctl.runtime.policy_spec import resolve_policy, words_of

HOST = torch.device("cpu")


def copy_by_hand(text: list[int], of: CopyText) -> list[int] | None:
    """The rule in words: among the places of the window where the text's end stood before, that of
    the longest match (of four tokens, or of `min_length`), and the latest of those."""
    text, best, places = text[-of.window :], 0, []
    for end in range(len(text) - 1):
        length = 0
        while length <= end and text[end - length] == text[-1 - length]:
            length += 1
        length = min(length, max(4, of.min_length))
        if length >= of.min_length and length >= best:
            best, places = length, [*places, end]
    if not places:
        return None
    source = list(text)
    while len(source) <= places[-1] + of.max_draft_tokens:
        source.append(source[places[-1] + 1 + len(source) - len(text)])
    return source[places[-1] + 1 :][: of.max_draft_tokens]


def test_a_copy_is_what_followed_the_longest_and_latest_match() -> None:
    draws, found = random.Random(3), 0
    for _ in range(300):
        of = CopyText(
            min_length=draws.choice([1, 2, 3, 6]),
            max_draft_tokens=draws.choice([1, 5, 17]),
            window=draws.choice([2, 9, 40]),
        )
        texts = [
            draws.choices(range(draws.choice([2, 4])), k=draws.randint(1, 50)) for _ in range(4)
        ]
        width = min(of.window, max(map(len, texts)))
        copy = of.find(recent_tokens(texts, HOST, width))
        wanted = [copy_by_hand(text, of) for text in texts]
        assert (copy.length > 0).tolist() == [one is not None for one in wanted]
        for ids, one in zip(copy.token_ids.tolist(), wanted, strict=True):
            found += one is not None
            assert one is None or ids == one
    assert found > 300


def test_a_loop_is_copied_as_long_as_is_asked() -> None:
    copy = CopyText(max_draft_tokens=7).find(recent_tokens([[9, 1, 2, 3, 1, 2, 3]], HOST, 7))
    assert copy.token_ids.tolist() == [[1, 2, 3, 1, 2, 3, 1]]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("chain+copy+ratio", "verified strictly, not by ratio"),
        ("eagle2+copy+survival:max_tokens=9", "without a probability, but budget survival"),
        ("eagle2+copy+mars", "verified strictly, not by mars"),
        ("adasd_stop+copy", "adasd_stop learns"),
        ("schedule:from_batch=1/4:num_draft_tokens=4/1+copy", "schedule has several"),
        ("chain+copy:min_length=0", "min_length: at least 1"),
        ("chain+copy:max_draft_tokens=many", "max_draft_tokens: a whole number"),
        ("chain+copy:lenght=3", "a setting of copy: min_length, max_draft_tokens, window, prompt"),
        ("chain+copy+copy", "copies once at most"),
        ("copy", "a word of docs/policies.md"),
    ],
)
def test_what_does_not_go_together_is_refused(spec: str, says: str) -> None:
    with pytest.raises(UsageError) as refusal:
        resolve_policy(spec, allow_lossy=True)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_records_and_words_say_the_same() -> None:
    policy = resolve_policy("threshold:min_level_prob=.5+copy:min_length=3:prompt=true").policy
    assert policy.copies == CopyText(min_length=3, prompt=True)
    assert parse_policy(policy_json(policy)) == policy
    assert resolve_policy(words_of(policy) or "").policy == policy
    assert policy.name == "threshold+copy"
    assert not resolve_policy("ar+copy").policy.is_plain


def test_a_policy_without_copies_is_the_record_that_it_was() -> None:
    plain = Policy(shape=RootOnly())
    assert "copies" not in policy_json(plain)
    assert policy_digest(plain) != policy_digest(Policy(shape=RootOnly(), copies=CopyText()))
