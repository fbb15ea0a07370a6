"""`Decoder`: the runtime from Python, in the manner of transformers.

>>> from specctl import Decoder
>>> decoder = Decoder.from_pretrained("embedded", "embedded", policy="eagle2")
>>> [answer] = decoder.generate("def add(a, b):", max_new_tokens=16)
>>> answer.metrics.calls <= 16
True
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specctl.errors import PromptTooLongError, UsageError
from specctl.policy import Policy
from specctl.runtime.capture import GraphCounters, GraphSettings
from specctl.runtime.config import Decisions
from specctl.runtime.conversations import (
    Conversation,
    ConversationPrompt,
    DecodeSettings,
    Messages,
    TextStream,
    decode_text,
    encode_prompt,
    longest_text,
    next_request,
    request_seed,
)
from specctl.runtime.decode import DecodeLoop, SharedMemory
from specctl.runtime.load import Pair, expectation, load_pair
from specctl.runtime.requests import Metrics, Observer, Request, Sampling
from specctl.runtime.runnable import TreeRoom, runnable, tree_room
from specctl.runtime.words import resolve_policy, words_of

if TYPE_CHECKING:
    from specctl.runtime.follow import Follower

Prompt = str | Messages
DEFAULT_TOKENS = 128
LEAST_TEXT = 256
"""Shortest text that a loop allocates for, tokens."""


@dataclass(frozen=True)
class Generation:
    """The answer to one prompt."""

    text: str  # without special tokens
    token_ids: tuple[int, ...]  # all emitted ones
    finish_reason: str  # `eos`, `length` or `context`
    metrics: Metrics  # of this prompt alone

    def __repr__(self) -> str:
        return f"Generation({self.text!r}, {self.finish_reason!r}, {self.metrics!r})"


class Decoder:
    """A loaded pair under one policy.

    Args:
        batch_size: prompts decoded together at most.
        observer: called with every round, e.g. to collect traces.
        decisions: backend of the policy's learned part, see `specctl.runtime.config.Decisions`.
        graphs: see `DecodeLoop`.
        allow_mismatch: let `follow` load lossless artifacts of another pair, hardware, number
            format or batch size; each difference is logged.

    Attributes:
        graph_counters: of the last loop; zeros if its rounds are not captured.

    Raises:
        UsageError: this pair or this machine cannot run the policy, or not by these decisions.
    """

    def __init__(
        self,
        pair: Pair,
        policy: Policy,
        *,
        batch_size: int = 1,
        observer: Observer | None = None,
        decisions: Decisions = "auto",
        graphs: GraphSettings | Literal["auto"] | None = "auto",
        allow_mismatch: bool = False,
    ) -> None:
        if not isinstance(policy, Policy):
            raise UsageError(
                f"policy is of type {type(policy).__name__}, and no Policy",
                hint="give Policy(shape=...), or words to Decoder.from_pretrained",
            )
        if batch_size < 1:
            raise UsageError(f"batch_size must be at least 1, not {batch_size}")
        device = pair.target.model.device
        self._rules = runnable(policy, pair.drafter, device, batch_size, decisions=decisions)
        self.pair, self.policy, self.decisions = pair, policy, decisions
        self.batch_size, self.observer, self.graphs = batch_size, observer, graphs
        self.allow_mismatch = allow_mismatch
        self._loop: DecodeLoop | None = None
        self.graph_counters = GraphCounters()

    def __repr__(self) -> str:
        name = words_of(self.policy) or self.policy.name
        return f"Decoder({self.pair!r}, policy={name!r}, batch_size={self.batch_size})"

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        drafter: str | None = None,
        *,
        policy: str | Policy = "eagle2",
        device: str = "auto",
        dtype: str = "auto",
        batch_size: int = 1,
        allow_lossy: bool = False,
        allow_mismatch: bool = False,
        decisions: Decisions = "auto",
        graphs: GraphSettings | Literal["auto"] | None = "auto",
    ) -> Decoder:
        """Loads both models and the policy.

        Args:
            target, drafter, device, dtype: see `runtime.load.load_pair`.
            policy: `ar`, `chain`, `eagle2` (with settings, `eagle2:depth=8`), an artifact
                folder, or a `Policy`.
            allow_lossy: accept policies that change the target's distribution.
            batch_size, allow_mismatch, decisions, graphs: see `Decoder`; `allow_mismatch` also
                holds for `policy`.
        """
        pair = load_pair(target, drafter, device=device, dtype=dtype)
        if isinstance(policy, str):
            expect = expectation(pair, batch_size, allow_mismatch=allow_mismatch)
            policy = resolve_policy(policy, expect, allow_lossy=allow_lossy).policy
        return cls(
            pair,
            policy,
            batch_size=batch_size,
            decisions=decisions,
            graphs=graphs,
            allow_mismatch=allow_mismatch,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[Generation]:
        """Decodes prompts, in order.

        Args:
            prompts: one string (raw text) or list of messages (chat), or a list of these.
            max_new_tokens, max_tokens: tokens per prompt at most, under transformers' name and
                under OpenAI's and vLLM's; 128 by default.
            temperature: 0 is greedy. top_k: 0, or vLLM's -1, keeps all tokens. top_p: nucleus mass.
            seed: prompt i draws from the stream of (seed, i), independent of its batch.
        """
        sampling = Sampling(temperature, 0 if top_k == -1 else top_k, top_p, seed)
        requests = self._requests(_each(prompts), _length(max_new_tokens, max_tokens), sampling)
        finished = {done.request.request_id: done for done in self.loop(requests).run(requests)}
        generations = []
        for done in (finished[request.request_id] for request in requests):
            text = decode_text(self.pair.target.tokenizer, done.token_ids)
            generations.append(Generation(text, done.token_ids, done.finish_reason, done.metrics))
        return generations

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Iterator[str]:
        """Yields pieces of one prompt's text, round by round; arguments as in `generate`."""
        sampling = Sampling(temperature, 0 if top_k == -1 else top_k, top_p, seed)
        requests = self._requests([prompt], _length(max_new_tokens, max_tokens), sampling)
        text, loop = TextStream(self.pair.target.tokenizer), self.loop(requests)
        loop.submit(requests[0])
        while loop.busy:
            tokens: list[int] = []

            def keep(_: Request, new: list[int], into: list[int] = tokens) -> None:
                into.extend(new)

            loop.step(keep)
            if piece := text.feed(tokens):
                yield piece

    def converse(
        self, prompts: Sequence[ConversationPrompt], settings: DecodeSettings
    ) -> Iterator[Conversation]:
        """Decodes all prompts, yielding each when its last turn is answered.

        First turns are checked before decoding starts. A later turn without room ends its
        conversation and sets `is_cut`.

        Raises:
            PromptTooLongError: a first turn leaves no room in the model's context.
        """
        tokenizer = self.pair.target.tokenizer
        loop = self.loop_for(longest_text(tokenizer, prompts, settings))
        open_ones = {prompt.prompt_id: Conversation(prompt) for prompt in prompts}
        for conversation in open_ones.values():
            loop.submit(next_request(tokenizer, conversation, settings))
        while loop.busy:
            for done in loop.step():
                conversation = open_ones[done.request.prompt_id]
                conversation.completions.append(done)
                conversation.texts.append(decode_text(tokenizer, done.token_ids))
                if len(conversation.texts) < len(conversation.prompt.turns):
                    request = next_request(tokenizer, conversation, settings)
                    try:
                        loop.submit(request, first=True)
                        continue
                    except PromptTooLongError:
                        conversation.is_cut = True
                yield open_ones.pop(done.request.prompt_id)

    def loop(self, requests: Sequence[Request]) -> DecodeLoop:
        """A decode loop with room for these requests."""
        longest = max((len(r.prompt_ids) + r.max_new_tokens for r in requests), default=1)
        return self.loop_for(longest)

    def loop_for(self, max_text_tokens: int, memory: SharedMemory | None = None) -> DecodeLoop:
        """A decode loop for texts up to this length, capped at the model's context.

        The last loop is reused if it has room and still runs this policy: its graphs took a second
        to capture. Lengths are rounded up to a power of two, so that a slightly longer prompt can
        reuse the loop too.

        Args:
            memory: shared by decoders of one pair that take turns, see `DecodeLoop`.
        """
        model = self.pair.target.model
        longest, kept = min(max_text_tokens, model.context_tokens), self._loop
        if (
            kept is not None
            and (kept.policy, kept.observer is None) == (self.policy, self.observer is None)
            and kept.serves(longest)
        ):
            kept.observer = self.observer
            return kept
        if model.window is None:
            longest = min(max(LEAST_TEXT, 1 << (longest - 1).bit_length()), model.context_tokens)
        self._loop = DecodeLoop(
            model,
            self.pair.drafter,
            self.policy,
            batch_size=self.batch_size,
            max_text_tokens=longest,
            eos_ids=self.pair.target.eos_ids,
            observer=self.observer,
            graphs=self.graphs,
            decisions=self.decisions,
            memory=memory,
        )
        self.graph_counters = self._loop.graph_counters
        return self._loop

    @property
    def tree_room(self) -> TreeRoom:
        """Memory that trees of this policy need."""
        return tree_room(self._rules.shape)

    def follow(self, source: str | Path, loop: DecodeLoop, *, interval_s: float = 5.0) -> Follower:
        """Has a loop's policy follow an artifact folder or a registry alias; see `runtime.follow`.

        Args:
            source: a folder, which may appear later, or `REGISTRY/NAME@ALIAS`.
            loop: of this decoder.
            interval_s: seconds between two looks at the source.

        Raises:
            UsageError, RegistryError, StoreError, OutputError: see `runtime.follow.source_of`.
                Errors of artifacts are stored in `Follower.last_error` instead.
        """
        from specctl.runtime.follow import Follower, source_of

        expect = expectation(self.pair, self.batch_size, allow_mismatch=self.allow_mismatch)
        return Follower(source_of(str(source), expect), loop, interval_s=interval_s)

    def _requests(
        self, prompts: Sequence[Prompt], max_new_tokens: int, sampling: Sampling
    ) -> list[Request]:
        tokenizer = self.pair.target.tokenizer
        return [
            Request(
                request_id=str(index),
                prompt_ids=tuple(encode_prompt(tokenizer, prompt)),
                max_new_tokens=max_new_tokens,
                prompt_id=str(index),
                sampling=sampling.for_request(request_seed(sampling.seed, str(index))),
            )
            for index, prompt in enumerate(prompts)
        ]


def _each(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts, of which one may stand alone."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    parts: list[Any] = list(prompts)
    return [parts] if parts and all(isinstance(one, Mapping) for one in parts) else parts


def _length(max_new_tokens: int | None, max_tokens: int | None) -> int:
    given = {one for one in (max_new_tokens, max_tokens) if one is not None}
    if len(given) > 1:
        raise UsageError(
            f"max_new_tokens ({max_new_tokens}) and max_tokens ({max_tokens}) mean the same; "
            "give one of them"
        )
    return given.pop() if given else DEFAULT_TOKENS
