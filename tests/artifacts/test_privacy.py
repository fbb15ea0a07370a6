"""Secrets and prompts are refused wherever they stand, and never repeated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from re import _parser as regex_parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from specctl.artifacts import privacy
from specctl.artifacts.privacy import check_private
from tests.artifacts.conftest import refused
from tests.artifacts.examples import SECRETS, sha

HARMLESS = {
    "digest": sha("a"),
    "commit": "0123456789abcdef" * 2 + "01234567",
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "path": "/srv/traces/chat@2026-01-31",
    "url": "https://huggingface.co/Qwen/Qwen3-8B",
    "bucket": "s3://bucket/registry:443/x@prod",
    "card": "The drafter's tokens are a secret sauce: none. Token budget: 48.",
    "base64": "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA=",
    "path of prompts": "prompts/held-out.jsonl",
}
KINDS = {
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
    "marks of a chat template, as prompts have them": "<|im_start|>",
}


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_refused_wherever_it_stands_and_never_repeated(name: str) -> None:
    secret = SECRETS[name]
    places: list[tuple[Any, ...]] = [
        ({"fit": {"note": secret}}, {}),
        ({"fit": {"deep": [{"x": ["y", secret]}]}}, {}),
        ({"fit": {secret: 1}}, {}),
        ({}, {"README.md": f"# card\n\n{secret}\n"}),
        ({}, {}, {"rows": [{"note": secret}]}),
        ({}, {}, {"rows": {secret: 1}}),
    ]
    for given in places:
        error = refused("E_PRIVACY", check_private, *given)
        assert secret not in str(error).replace(", a key", "")
        assert ("report.json" in error.field) == (len(given) == 3)


@pytest.mark.parametrize("kind", KINDS)
def test_each_secret_is_called_by_its_kind(kind: str) -> None:
    """Several kinds are looked for in one search; a second one tells them apart."""
    assert KINDS.keys() == privacy.SECRETS.keys()
    for text in (KINDS[kind], f"a line\n  ({KINDS[kind]}) and more"):
        assert refused("E_PRIVACY", check_private, {}, {"README.md": text}).found == kind


@pytest.mark.parametrize(
    "fit",
    [
        {"db": {"password": "x"}},
        {"API_KEY": "short"},
        {"prompt": "p" * 300},
        {"prompts": ["What is my salary?"]},
        {"messages": [{"role": "user"}]},
        {"token_ids": [1, 2, 3]},
        {"response": "two\nlines"},
    ],
    ids=lambda fit: next(iter(fit)),
)
def test_names_that_promise_secrets_or_texts_are_refused(fit: dict[str, Any]) -> None:
    refused("E_PRIVACY", check_private, {"fit": fit}, {})


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_no_secret_passes(name: str) -> None:
    text = HARMLESS[name]
    fit = {"note": text, "prompts": "prompts.jsonl", "num_tokens": 48}
    check_private({"fit": fit, "policy": {"acceptance": {"deny_token_ids": [1]}}}, {"c": text})


@pytest.mark.parametrize(
    ("fit", "place"),
    [
        ({"a": {"b.c": [["x", {"d": "<|user|>"}]]}}, "config.json.fit.a.b.c.d"),
        ({"a": [1, "ok", "[INST]"]}, "config.json.fit.a"),
        ({"a": {"hf_" + "a" * 30: 1}}, "config.json.fit.a, a key"),
        ({"db.password": "x"}, "config.json.fit.db.password"),
    ],
    ids=["deep", "in a list", "a key", "a dotted name"],
)
def test_a_refusal_names_the_place(fit: dict[str, Any], place: str) -> None:
    assert refused("E_PRIVACY", check_private, {"fit": fit}, {}).field == place


def repeats(tree: Any) -> Iterator[int]:
    """The largest counts of all repetitions of a parsed pattern."""
    for item in tree if isinstance(tree, list | tuple | regex_parser.SubPattern) else ():
        if isinstance(item, tuple) and str(item[0]).endswith("REPEAT"):
            yield int(item[1][1])
        yield from repeats(item)


def test_every_repetition_is_bounded() -> None:
    """So a search takes at most a fixed number of steps a character, whoever wrote the text."""
    patterns = [privacy._SECRETS[kind] for kind in privacy.SECRETS]
    for pattern in (*patterns, privacy._WORD, privacy._ACTIVE):
        parsed = regex_parser.parse(pattern.pattern)
        assert all(most <= 100 for most in repeats(parsed)), pattern.pattern
    assert max(repeats(regex_parser.parse("(a|b+)c"))) > 100  # as the law would find one
    assert re.compile(privacy._WORD.pattern)
