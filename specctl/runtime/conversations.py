"""Text to token ids and back, and conversations of one turn or several."""

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
"""Tokens kept free for an answer that grows when it is tokenised again."""


def encode_prompt(tokenizer: Any, prompt: str | Messages) -> list[int]:
    """Token ids of a prompt, special tokens included.

    Args:
        prompt: a string is raw text to be continued; a list of `{"role", "content"}` goes
            through the tokenizer's chat template.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif not isinstance(prompt, Sequence) or not all(isinstance(one, Mapping) for one in prompt):
        raise PromptError(
            f"a prompt of type {type(prompt).__name__} is no text and no list of messages",
            hint='give messages as [{"role": "user", "content": TEXT}]',
        )
    elif tokenizer.chat_template is None:
        raise PromptError(
            "the tokenizer has no chat template for messages; give the prompt as plain text"
        )
    else:
        from jinja2 import TemplateError  # transformers needs it for this call alone

        try:
            ids = tokenizer.apply_chat_template(
                list(prompt), add_generation_prompt=True, return_dict=False
            )
        except TemplateError as error:  # e.g. of a system text
            raise PromptError(f"the chat template refuses the messages: {error}") from error
    if not ids:
        raise PromptError("the prompt has no token; drop it")
    return list(ids)


def decode_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of emitted tokens, without special tokens."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text


class TextStream:
    """Decodes a stream of tokens into pieces of text that end at whole characters."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete, possibly empty."""
        pieces = (self._stream.step(self._tokenizer, token) for token in token_ids)
        return "".join(piece for piece in pieces if piece)


def request_seed(seed: int, request_id: str) -> int:
    """Seed of a request's own stream: a hash, so that requests draw independently."""
    text = f"{seed}:{request_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


# --------------------------------------------------------------------------- turns


class ConversationPrompt(Protocol):
    """The interface of `collect.prompts.Prompt`."""

    @property
    def prompt_id(self) -> str: ...
    @property
    def category(self) -> str: ...
    @property
    def turns(self) -> tuple[str, ...]: ...
    @property
    def chat(self) -> bool: ...
    @property
    def before(self) -> tuple[tuple[str, str], ...]: ...


@dataclass
class Conversation:
    """A prompt and the answers so far."""

    prompt: ConversationPrompt
    completions: list[Completion] = field(default_factory=list)  # one per answered turn
    texts: list[str] = field(default_factory=list)  # one per answered turn
    is_cut: bool = False  # a later turn was dropped for want of room in the context


@dataclass(frozen=True)
class DecodeSettings:
    """Settings for decoding prompts."""

    max_new_tokens: int = 128  # per turn
    sampling: Sampling = field(default_factory=Sampling)  # the run's seed; requests derive theirs


def next_request(tokenizer: Any, conversation: Conversation, settings: DecodeSettings) -> Request:
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
    """Token ids of a conversation up to the model's next answer.

    Chat prompts go through the tokenizer's template, if it has one; other texts are joined by
    blank lines.
    """
    turns = prompt.turns[: len(responses) + 1]
    texts = [text for pair in zip(turns, responses, strict=False) for text in pair] + [turns[-1]]
    said = [*prompt.before, *zip(cycle(("user", "assistant")), texts, strict=False)]
    if prompt.chat and tokenizer.chat_template is not None:
        return encode_prompt(tokenizer, [{"role": role, "content": text} for role, text in said])
    return encode_prompt(tokenizer, "\n\n".join(text for _, text in said))


def longest_text(
    tokenizer: Any, prompts: Sequence[ConversationPrompt], settings: DecodeSettings
) -> int:
    """Tokens of the longest conversation that these prompts can become."""
    longest = 1
    for prompt in prompts:
        later = len(prompt.turns) - 1
        given = len(conversation_ids(tokenizer, prompt, [""] * later))
        room = given + (later + 1) * settings.max_new_tokens + later * RETOKENISED_SLACK
        longest = max(longest, room)
    return longest
