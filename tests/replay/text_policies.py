"""A policy that looks at repeats of the text."""

from __future__ import annotations

from specctl.features import NODE_FEATURES
from specctl.policy import FfnScorer, Policy, ScoredTree

TEXT = tuple(name for name, feature in NODE_FEATURES.items() if feature.reads_text)


NAMES = ("draft_logp", *TEXT)
REPEATS = FfnScorer(
    features=NAMES,
    mean=(0.0,) * len(NAMES),
    scale=(1.0,) * len(NAMES),
    w1=((1.0, *(0.0,) * len(TEXT)), (0.0, *(0.5,) * len(TEXT))),
    b1=(8.0, 0.0),
    w2=(1.0, 1.0),
    b2=(-7.5,),
)
"""Likely where the drafter says so, and likelier by what the text says."""
SIZES = {"depth": 4, "first_top_k": 3, "second_top_k": 4, "num_tokens": 12}
POLICY = Policy(shape=ScoredTree(scorer=REPEATS, predicts="conditional", beta=0.15, **SIZES))
