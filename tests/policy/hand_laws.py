"""Drafters of a few tokens whose trees can be drawn by hand, and what their steps cost."""

from __future__ import annotations

from specctl.policy import StepCost

A, B, C, D = range(4)
NAMES = {A: "a", B: "b", C: "c", D: "d", 99: "root"}


def hand_law(path: tuple[int, ...]) -> list[float]:
    """By hand, top_k 2, depth 3. Joint probabilities of all candidates:

    level 1: a .6  b .3
    level 2 (a and b expanded): aa .36  ab .18  | ba .24  bc .03
    level 3 (aa .36 and ba .24 expanded): aaa .216  aad .108  | bab .192  bac .024
    """
    table = {
        (): [0.6, 0.3, 0.06, 0.04],
        (A,): [0.6, 0.3, 0.06, 0.04],
        (B,): [0.8, 0.05, 0.1, 0.05],
        (A, A): [0.6, 0.05, 0.05, 0.3],
        (B, A): [0.05, 0.8, 0.1, 0.05],
    }
    return table[path]


def certain_law(path: tuple[int, ...]) -> list[float]:
    """Probability 1 at every step: all scores tie at 0, the case that breaks EAGLE's top-k."""
    return [1.0, 0.0, 0.0, 0.0]


def uniform_law(path: tuple[int, ...]) -> list[float]:
    return [0.25] * 4


LEVELS = ([0.9, 0.1, 0.0, 0.0], [0.8, 0.2, 0.0, 0.0], [0.3, 0.25, 0.25, 0.2], [0.9, 0.1, 0.0, 0.0])
"""A chain's distributions, level by level; the likeliest token is always the first.

    level                1      2      3      4
    probability         .9     .8     .3     .9
    of the path         .9    .72   .216   .194
    entropy (nats)    .325   .500  1.376   .325
    its square root   .570   .707  1.173   .570
    1 - sqrt(.2 H)    .745   .684   .475   .745
"""


def chain_law(path: tuple[int, ...]) -> list[float]:
    return LEVELS[len(path)]


def sure(path: tuple[int, ...]) -> list[float]:
    return [0.9, 0.1] if not path else [0.8, 0.2]


def unsure(path: tuple[int, ...]) -> list[float]:
    return [0.6, 0.4] if not path else [0.5, 0.5]


# us of a round of so many tokens, both requests at their tokens: m draft nodes cost entry m + 2.
#   m                0     1     2     3     4
#   tokens         2.0   2.9  3.62  4.22  4.52
STAIRS = StepCost(token_counts=(2, 4, 6), step_us=(10.0, 12.0, 20.0))
# rate            .200  .242  .302  .211  .226    best at 2
VALLEY = StepCost(token_counts=(2, 6, 7), step_us=(10.0, 20.0, 40.0))
# rate            .200  .145  .181  .211  .226    best at 4, behind a descent
STEEP = StepCost(token_counts=(2, 3), step_us=(10.0, 20.0))
# cost              10    20    30    40    50    best at 0
