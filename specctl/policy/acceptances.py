"""Acceptances: what the target's logits admit."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from specctl.policy.base import Probability, Record, require
from specctl.policy.means import RunningMeans


class Strict(Record):
    """Point-mass verification: follow the child that equals the target's token. Lossless."""

    kind: Literal["strict"] = "strict"


class Mars(Record):
    """MARS: also accept the target's second choice where its margin is low. Lossy.

    Attributes:
        mode: `alg1` (greedy, the paper), `sound` (sampling by coupling, strict child first),
            `code_v1` (as released, for reproduction; its sampler is lossy even at theta 1).
        form: `ratio` z2/z1 of raw logits, where both are positive; `margin` z1 - z2, nats;
            `prob_ratio` p2/p1 before temperature.
        theta: relax above it (below it for `margin`); 1 (0 for `margin`) relaxes nothing.
        deny_token_ids: never relaxed, to or from (digits, tool-call marks); the ids that end a
            text are always among them.
    """

    kind: Literal["mars"] = "mars"
    mode: Literal["alg1", "sound", "code_v1"] = "sound"
    form: Literal["ratio", "margin", "prob_ratio"] = "ratio"
    theta: Annotated[float, Field(ge=0)] = 0.9
    deny_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        require(self.form == "margin" or self.theta <= 1, "a ratio threshold is at most 1")
        require(self.mode != "code_v1" or self.form == "ratio", "code_v1 knows the ratio alone")
        return self


class JensenShannon(RunningMeans):
    """AdaSD's acceptance: match, or Jensen-Shannon distance below an online threshold. Lossy.

    The threshold is the request's own, from the distances of accepted and first rejected tokens in
    its earlier rounds; until `min_samples` of each were seen only matches are accepted.

    Attributes:
        max_threshold: certified clip, square root of bits, in [0, 1]; 0 accepts matches alone.
        variant: with means a and r of accepted and rejected distances, N tokens and C sequences
            of each kind: `base` (a + r) / 2; `A` a; `B` (N_a a + N_r r) / (N_a + N_r); `C` the
            same with C for N (the paper's appendix B).
        deny_token_ids: neither accepted nor skipped on a distance (digits, tool-call marks); the
            ids that end a text are always among them.
    """

    kind: Literal["adasd_accept"] = "adasd_accept"
    max_threshold: Probability = 1.0
    variant: Literal["base", "A", "B", "C"] = "base"
    prior_accepted: Probability | None = None
    prior_rejected: Probability | None = None
    deny_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()


Acceptance = Annotated[Strict | Mars | JensenShannon, Field(discriminator="kind")]
