"""Text in, token ids out, and back; prompts of one turn or several, each of which answers on top of
the answers before."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Protocol

from tokenizers.decoders import DecodeStream

from specctl.errors import PromptError
from specctl.runtime.requests import Completion, Request, Sampling

Messages = Sequence[Mapping[str, str]]
RETOKENISED_SLACK = 64
"""Tokens kept free for answers that grow a little when they are tokenised again."""


def encode_prompt(tokenizer: Any, prompt: str | Messages) -> list[int]:
    """Token ids of a prompt, special tokens included.

    Args:
        prompt: a string is raw text to be continued; a list of `{"role", "content"}` goes
            through the tokenizer's chat template.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif tokenizer.chat_template is None:
        raise PromptError(
            "the tokenizer has no chat template for messages; give the prompt as plain text"
        )
    else:
        ids = tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, return_dict=False
        )
    if not ids:
        raise PromptError("the prompt has no token; drop it")
    return list(ids)


def decode_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of emitted tokens, special tokens left out."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text


class TextStream:
    """Turns a growing list of tokens into pieces of text that never break a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        pieces = (self._stream.step(self._tokenizer, token) for token in token_ids)
        return "".join(piece for piece in pieces if piece)


def request_seed(seed: int, request_id: str) -> int:
    """Seed of one request's own stream: a hash, so that no request shares another's coins."""
    text = f"{seed}:{request_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


# --------------------------------------------------------------------------- turns


class ConversationPrompt(Protocol):
    """One prompt: `collect.prompts.Prompt`, or anything shaped like it."""

    @property
    def prompt_id(self) -> str: ...
    @property
    def category(self) -> str: ...
    @property
    def turns(self) -> tuple[str, ...]: ...
    @property
    def chat(self) -> bool: ...


@dataclass
class Conversation:
    """A prompt and the answers so far."""

    prompt: ConversationPrompt
    completions: list[Completion] = field(default_factory=list)  # one per answered turn
    texts: list[str] = field(default_factory=list)  # their text
    is_cut: bool = False  # a later turn found no room in the context and was left out


@dataclass(frozen=True)
class DecodeSettings:
    """Settings for decoding prompts."""

    max_new_tokens: int = 128  # per turn
    sampling: Sampling = field(default_factory=Sampling)
    """Its seed is the run's; each request gets its own."""


def next_request(tokenizer: Any, conversation: Conversation, settings: DecodeSettings) -> Request:
    """The request of the first unanswered turn."""
    prompt, turn = conversation.prompt, len(conversation.texts)
    request_id = f"{prompt.prompt_id}/{turn}"
    seed = request_seed(settings.sampling.seed, request_id)
    return Request(
        request_id=request_id,
        prompt_ids=tuple(conversation_ids(tokenizer, prompt, conversation.texts)),
        max_new_tokens=settings.max_new_tokens,
        prompt_id=prompt.prompt_id,
        category=prompt.category,
        turn=turn,
        sampling=settings.sampling.for_request(seed),
    )


def conversation_ids(
    tokenizer: Any, prompt: ConversationPrompt, responses: Sequence[str]
) -> list[int]:
    """Token ids up to where the model speaks next.

    Chat prompts go through the tokenizer's template where there is one; otherwise the texts
    stand in order with a blank line between them.
    """
    asked = prompt.turns[: len(responses) + 1]
    texts = [text for pair in zip(asked, responses, strict=False) for text in pair] + [asked[-1]]
    if prompt.chat and tokenizer.chat_template is not None:
        roles = cycle(("user", "assistant"))
        messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
        return encode_prompt(tokenizer, messages)
    return encode_prompt(tokenizer, "\n\n".join(texts))


def longest_text(
    tokenizer: Any, prompts: Sequence[ConversationPrompt], settings: DecodeSettings
) -> int:
    """Tokens of the longest text that these prompts can become."""
    longest = 1
    for prompt in prompts:
        later = len(prompt.turns) - 1
        asked = len(conversation_ids(tokenizer, prompt, [""] * later))
        room = asked + (later + 1) * settings.max_new_tokens + later * RETOKENISED_SLACK
        longest = max(longest, room)
    return longest
