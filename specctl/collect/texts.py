"""Digests of prompts' texts, so that going on with other texts under the same ids is seen."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from specctl.collect.commits import Commit
from specctl.collect.formats import Prompt
from specctl.collect.places import Place
from specctl.collect.tokens import TokenTreatment
from specctl.errors import TraceMismatchError
from specctl.policy.parse import canonical_json

Texts = Mapping[str, str]
"""Digests by prompt id."""


def text_digest(prompt: Prompt, tokens: TokenTreatment) -> str | None:
    """Of what a prompt says and how it is decoded.

    Who does not know the text must not be able to try guesses where token ids are hidden: with
    `hash` it is keyed as they are, with `drop` there is none.
    """
    text = canonical_json({"chat": prompt.chat, "turns": list(prompt.turns)}).encode()
    if tokens.mode == "keep":
        return "sha256:" + hashlib.sha256(text).hexdigest()
    if tokens.mode == "drop":
        return None
    keyed = hashlib.blake2b(text, key=tokens.key, digest_size=32, person=b"prompt text")
    return f"blake2b:{keyed.hexdigest()}"


def texts_of(prompts: Iterable[Prompt], tokens: TokenTreatment) -> Texts:
    """Of those prompts whose text may be told."""
    digests = ((prompt.prompt_id, text_digest(prompt, tokens)) for prompt in prompts)
    return {prompt: digest for prompt, digest in digests if digest is not None}


def committed_texts(commits: Iterable[Commit]) -> dict[str, str]:
    """Of the prompts whose commits hold digests of texts, which earlier writers did not write."""
    return {
        prompt: digest
        for commit in commits
        for prompt, digest in zip(commit.prompt_ids, commit.text_digests or (), strict=False)
        if digest is not None
    }


def check_same_texts(place: Place, committed: Texts, asked: Texts) -> None:
    """Refuses to go on with a set whose prompts said something else.

    Raises:
        TraceMismatchError: naming a prompt.
    """
    for prompt in sorted(committed.keys() & asked.keys()):
        if committed[prompt] != asked[prompt]:
            raise TraceMismatchError(
                f"trace set {place.name}, prompt {prompt!r}",
                expected=f"the text that it was collected with, {committed[prompt][:19]}…",
                found=f"another one, {asked[prompt][:19]}…",
                fix="give changed prompts ids of their own, or collect into another set",
            )
