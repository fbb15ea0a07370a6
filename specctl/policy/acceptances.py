"""Acceptances: what the target's logits admit."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from specctl.policy.base import Probability, Record, require


class Strict(Record):
    """Point-mass verification: follow the child that equals the target's token. Lossless."""

    kind: Literal["strict"] = "strict"


class Mars(Record):
    """MARS: also accept the target's second choice where its margin is low. Lossy.

    Attributes:
        mode: `alg1` (greedy, the paper), `sound` (sampling by coupling, strict child first),
            `code_v1` (as released; its sampler is lossy even at theta 1).
        form: `ratio` z2/z1 of logits, `margin` z1 - z2 in nats, `prob_ratio` p2/p1.
        theta: accept the second choice above it (below it for `margin`).
        deny_token_ids: never relaxed (EOS, digits, tool-call marks).
    """

    kind: Literal["mars"] = "mars"
    mode: Literal["alg1", "sound", "code_v1"] = "sound"
    form: Literal["ratio", "margin", "prob_ratio"] = "ratio"
    theta: Annotated[float, Field(ge=0)] = 0.9
    deny_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        require(self.form == "margin" or self.theta <= 1, "a ratio threshold is at most 1")
        return self


class JensenShannon(Record):
    """AdaSD's acceptance: match, or Jensen-Shannon distance below an online threshold. Lossy.

    Attributes:
        max_threshold: certified clip, square root of bits, in [0, 1].
        min_samples: accepted and rejected tokens in strict mode before the rule acts.
        prior_accepted, prior_rejected: warm start, each weighing `prior_weight` tokens.
    """

    kind: Literal["adasd_accept"] = "adasd_accept"
    max_threshold: Probability = 1.0
    min_samples: Annotated[int, Field(ge=0)] = 8
    prior_accepted: Probability | None = None
    prior_rejected: Probability | None = None
    prior_weight: Annotated[float, Field(ge=0)] = 0.0


Acceptance = Annotated[Strict | Mars | JensenShannon, Field(discriminator="kind")]
