"""Text in, token ids out, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from specctl.errors import PromptError

Messages = Sequence[Mapping[str, str]]


def encode_prompt(tokenizer: Any, prompt: str | Messages) -> list[int]:
    """Token ids of a prompt, special tokens included.

    Args:
        prompt: a string is raw text to be continued; a list of `{"role", "content"}` goes
            through the tokenizer's chat template.

    Raises:
        PromptError: nothing to encode, or messages for a tokenizer without a template.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif tokenizer.chat_template is None:
        raise PromptError(
            "chat messages",
            expected="a tokenizer with a chat template",
            found="none",
            fix="give the prompt as plain text",
        )
    else:
        ids = tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, return_dict=False
        )
    if not ids:
        raise PromptError(
            "prompt", expected="at least one token", found="none", fix="drop the empty prompt"
        )
    return list(ids)


def chat_messages(turns: Sequence[str], responses: Sequence[str]) -> list[dict[str, str]]:
    """A conversation up to the next user turn: one more turn than responses."""
    messages = []
    for turn, text in enumerate(turns[: len(responses) + 1]):
        messages.append({"role": "user", "content": text})
        if turn < len(responses):
            messages.append({"role": "assistant", "content": responses[turn]})
    return messages


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
