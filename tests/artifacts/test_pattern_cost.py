"""What searching a stranger's text costs: in proportion to it, whatever it says.

A search holds the interpreter's lock, so one that takes minutes stops a whole serving process.
"""

from __future__ import annotations

import re
import time

import pytest

from specctl.artifacts import privacy, text_warning
from specctl.errors import ArtifactError
from tests.artifacts.secret_words import SECRETS

TEXT_CHARS = 1 << 20
MOST_CPU_S = 1.0
"""Generous: it takes some 30 ms. What was quadratic took hours."""
PATTERNS = {
    **privacy._SECRETS,
    "words": privacy._WORD,
    "marks": privacy._MARKS,
    "names of secrets": privacy.SECRET_NAMES,
    "names of texts": privacy.TEXT_NAMES,
    "active text": text_warning._ACTIVE,
    "controls": text_warning._CONTROLS,
}
MATCHED = {
    "an AWS access key": SECRETS["aws"],
    "an AWS secret key": SECRETS["aws secret"],
    "a GitHub token": SECRETS["github"],
    "a Hugging Face token": SECRETS["hub"],
    "an API key": SECRETS["api key"],
    "a Google key": "AIza" + "a" * 35,
    "a Slack token": "xoxb-" + "1" * 12,
    "a private key": "-----BEGIN RSA " + "PRIVATE KEY-----",
    "a bearer token": "bearer  " + "a" * 20,
    "a JSON web token": SECRETS["jwt"],
    "a URL with a password": SECRETS["url"],
    "a signed URL": "?sig=" + "0" * 16,
    "a password": "password  =  " + "correct-horse",
    "words": SECRETS["hub"],
    "marks": "<|im_start|>",
    "names of secrets": "my_api_key",
    "names of texts": "conversations",
    "active text": "<  /  script>",
    "controls": "ab\x1b",
}
"""A text that each of them finds; its beginnings are what a search may be led astray by."""


def adversarial(matched: str) -> list[str]:
    """Each beginning of a match, repeated whole, and with its last letter repeated."""
    steps = sorted({1, 3, 4, len(matched) // 2, len(matched) - 1} & set(range(len(matched))))
    texts = []
    for size in steps:
        head = matched[:size]
        texts += [head * (TEXT_CHARS // size), head + head[-1] * TEXT_CHARS]
        texts += [f"{head}-" * (TEXT_CHARS // (size + 1)), f"{head} " * (TEXT_CHARS // (size + 1))]
    return texts


def cpu_s(pattern: re.Pattern[str], text: str) -> float:
    begun = time.thread_time()
    pattern.search(text)
    return time.thread_time() - begun


def test_there_is_a_match_for_each_pattern() -> None:
    assert MATCHED.keys() == PATTERNS.keys()
    for name, pattern in PATTERNS.items():
        assert pattern.search(MATCHED[name]), name


@pytest.mark.parametrize("name", privacy.SECRETS)
def test_each_secret_is_called_by_its_kind(name: str) -> None:
    """Several kinds are looked for in one search; a second one tells them apart."""
    for text in (MATCHED[name], f"a line\n  ({MATCHED[name]}) and more"):
        with pytest.raises(ArtifactError) as caught:
            privacy.check_private({}, {"README.md": text})
        assert caught.value.found == name


@pytest.mark.parametrize("name", PATTERNS)
def test_a_search_takes_time_in_proportion_to_the_text(name: str) -> None:
    for text in adversarial(MATCHED[name]):
        spent = cpu_s(PATTERNS[name], text)
        assert spent < MOST_CPU_S, (text[:40], spent)


def test_what_froze_a_server_is_read_at_once() -> None:
    """A card of white space, and one of beginnings of web tokens."""
    for text in ("<" + " " * TEXT_CHARS, "eyJ-" * (TEXT_CHARS // 4), "< /" * (TEXT_CHARS // 3)):
        begun = time.thread_time()
        assert text_warning.find_active_text(text) is None
        privacy.check_private({}, {"README.md": text})
        assert time.thread_time() - begun < 2 * MOST_CPU_S


@pytest.mark.parametrize("text", ["<script>", "</ script>", "< / svg", "a<IMG src=x>"])
def test_active_text_is_still_found(text: str) -> None:
    assert text_warning.find_active_text(text) is not None
