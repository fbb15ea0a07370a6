"""Ratio verification one token at a time, in Python's floats, as the papers print it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from random import Random

import torch

from specctl.noise import TOKEN_STREAM, gumbels, noise_keys, uniforms
from specctl.policy.ratio import COIN_STREAM, DRAFT_STREAM, RESIDUAL_STREAM

Law = Sequence[float]
LawOf = Callable[[tuple[int, ...]], Law]
"""From a context to the distribution of the next token over the target's vocabulary."""


def accept_prob(p: Law, q: Law, token: int) -> float:
    return min(1.0, p[token] / q[token])


def residual(p: Law, q: Law) -> list[float]:
    rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return [one / sum(rest) for one in rest]


def draw(law: Law, seed: int, position: int, stream: int, ids: Sequence[int] = ()) -> int:
    """Gumbel-max; the noise is counted in `ids`, a draft vocabulary, where one is given."""
    noise = noise_of(seed, stream, len(ids or law))[position]
    scores = [
        (math.log(law[token]) + noise[at] if law[token] > 0 else -math.inf, token)
        for at, token in enumerate(ids or range(len(law)))
    ]
    return max(scores)[1]


POSITIONS = torch.arange(24)


@cache
def noise_of(seed: int, stream: int, size: int) -> list[list[float]]:
    noise: list[list[float]] = gumbels(
        noise_keys(torch.tensor(seed), POSITIONS, stream), size
    ).tolist()
    return noise


@cache
def coins_of(seed: int) -> list[list[float]]:
    coins: list[list[float]] = uniforms(
        noise_keys(torch.tensor(seed), POSITIONS, COIN_STREAM), 1
    ).tolist()
    return coins


def coin(seed: int, position: int) -> float:
    return coins_of(seed)[position][0]


def round_of(
    target: LawOf, drafter: LawOf, context: tuple[int, ...], position: int, length: int, seed: int
) -> list[int]:
    """The tokens that a round emits behind a context, whose next output position is given."""
    emitted: list[int] = []
    drafts: list[int] = []
    for step in range(length):
        q = drafter((*context, *drafts))
        drafts.append(draw(q, seed, position + step, DRAFT_STREAM))
    for step, token in enumerate(drafts):
        before = (*context, *emitted)
        p, q, at = target(before), drafter(before), position + step
        if coin(seed, at) >= accept_prob(p, q, token):
            return [*emitted, draw(residual(p, q), seed, at, RESIDUAL_STREAM)]
        emitted.append(token)
    return [*emitted, draw(target((*context, *emitted)), seed, position + length, TOKEN_STREAM)]


def text_of(
    target: LawOf, drafter: LawOf, prompt: tuple[int, ...], length: int, size: int, seed: int
) -> tuple[int, ...]:
    """A request's first `size` tokens, by chains of `length` drafts."""
    text = [draw(target(prompt), seed, 0, TOKEN_STREAM)]
    while len(text) < size:
        text += round_of(target, drafter, (*prompt, *text), len(text), length, seed)
    return tuple(text[:size])


def random_law(size: int, random: Random, zeros: int = 0) -> list[float]:
    weights = [random.random() ** 2 + 0.01 for _ in range(size)]
    for at in random.sample(range(size), zeros):
        weights[at] = 0.0
    return [one / sum(weights) for one in weights]


class RandomLaws:
    """A law for every context; a few of them lack tokens, a draft vocabulary the same ones."""

    def __init__(self, seed: int, size: int, *, said: Sequence[int] | None = None) -> None:
        self.seed, self.size, self.said = seed, size, said or range(size)

    def __call__(self, context: tuple[int, ...]) -> list[float]:
        random = Random(hash((self.seed, context)))  # integers hash alike in every process
        said = random_law(len(self.said), random, zeros=int(random.random() < 0.3))
        law = [0.0] * self.size
        for token, prob in zip(self.said, said, strict=True):
            law[token] = prob
        return law
