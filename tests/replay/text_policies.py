"""A policy that looks at repeats of the text."""

from __future__ import annotations

from specctl.features import NODE_FEATURES
from specctl.policy import FfnScorer, Policy, ScoredTree

TEXT = tuple(name for name, feature in NODE_FEATURES.items() if feature.reads_text)


def repeats(weight: float, *, scale: float = 1.0) -> FfnScorer:
    """Likely where the drafter says so, and likelier by what the text says."""
    names = ("draft_logp", *TEXT)
    return FfnScorer(
        features=names,
        mean=(0.0,) * len(names),
        scale=(1.0,) * len(names),
        w1=((scale, *(0.0,) * len(TEXT)), (0.0, *(weight,) * len(TEXT))),
        b1=(8.0, 0.0),
        w2=(1.0, 1.0),
        b2=(-7.5,),
    )


def scored(weight: float) -> ScoredTree:
    return ScoredTree(
        scorer=repeats(weight),
        predicts="conditional",
        beta=0.15,
        depth=4,
        first_top_k=3,
        second_top_k=4,
        num_tokens=12,
    )


POLICY = Policy(shape=scored(0.5))
