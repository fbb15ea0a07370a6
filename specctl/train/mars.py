"""`fit mars`: the threshold of relaxed acceptance, from paired runs and a quality contract.

    prompts ─sweep─► answers, strict and at every theta ─certify─► the fastest theta that keeps
                                                                    the contract ─► artifact

Nothing about a relaxed text can be replayed from a log: it leaves the strict one at its first
relaxed token. What can be told exactly is *whether* it leaves. A run notes the closest call that
each of its texts had (`Answer.opening`); a laxer theta that is still above it would have given
the same text, so that answer is copied and only the others are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from specctl.policy.acceptances import Mars
from specctl.policy.base import require
from specctl.policy.mars import bound, mars_acceptance
from specctl.policy.records import Policy, Record
from specctl.policy.verification import Verification
from specctl.runtime.load import Pair
from specctl.runtime.observe import RoundRecord
from specctl.train.paired import (
    Answers,
    Plan,
    losses_of,
    run_prompts,
    strict_twin,
)
from specctl.train.quality import Certificate, Contract, certify
from specctl.train.runs import RunFolder
from specctl.train.watch import Opening

THETAS = {
    "ratio": (0.96, 0.94, 0.92, 0.90, 0.88, 0.86, 0.84),
    "margin": (0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0),
    "prob_ratio": (0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1),
}
"""Strictest first. Of the ratio, the paper's sweep; of the others, about the same reach."""


class MarsConfig(Record):
    """What is swept, and what is promised.

    Attributes:
        thetas: strictest first.
        deny_token_ids: never relaxed, beside the ids that end a text.
    """

    mode: Literal["alg1", "sound", "code_v1"] = "sound"
    form: Literal["ratio", "margin", "prob_ratio"] = "ratio"
    thetas: Annotated[tuple[float, ...], Field(min_length=1)] = THETAS["ratio"]
    deny_token_ids: tuple[int, ...] = ()
    contract: Contract = Contract()

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        bounds = [bound(self.acceptance(theta)) for theta in self.thetas]
        strictest_first = all(strict > lax for strict, lax in pairwise(bounds))
        require(strictest_first, "thetas go from the strictest on, each once")
        return self

    def acceptance(self, theta: float) -> Mars:
        """The record of one threshold."""
        return Mars(mode=self.mode, form=self.form, theta=theta, deny_token_ids=self.deny_token_ids)


@dataclass(frozen=True)
class MarsSweep:
    """Answers of the strict policy and of each theta, in the order of the configuration."""

    base: Policy
    config: MarsConfig
    strict: Answers
    relaxed: tuple[Answers, ...]

    def policy(self, index: int) -> Policy:
        """The base with the acceptance of one theta."""
        acceptance = self.config.acceptance(self.config.thetas[index])
        return self.base.model_copy(update={"acceptance": acceptance})


def sweep(
    pair: Pair,
    base: Policy,
    plan: Plan,
    config: MarsConfig,
    folder: RunFolder,
    *,
    on_answer: Callable[[], Any] | None = None,
) -> MarsSweep:
    """Runs the strict policy and every theta over the prompts.

    Args:
        base: shape and budget; its own acceptance is replaced.
    """
    result = MarsSweep(strict_twin(base), config, {}, ())
    opening = None if config.mode == "code_v1" else opening_of(config, pair)
    before: Answers = run_prompts(
        pair, result.base, plan, folder, opening=opening, on_answer=on_answer
    )
    strict, relaxed = before, []
    for index, theta in enumerate(config.thetas):
        # What was released draws coins of its own: its strict answers are no guide.
        known = unchanged(before, config.acceptance(theta), opening) if opening else {}
        before = run_prompts(
            pair,
            result.policy(index),
            plan,
            folder,
            opening=opening,
            known=known,
            on_answer=on_answer,
        )
        relaxed.append(before)
    return MarsSweep(result.base, config, strict, tuple(relaxed))


def unchanged(answers: Answers, acceptance: Mars, opening: Opening) -> Answers:
    """Those of a stricter policy's answers that this acceptance would give too."""
    least = bound(acceptance)
    return {
        key: answer
        for key, answer in answers.items()
        if answer.measure == opening.measure and (answer.opening is None or answer.opening <= least)
    }


def opening_of(config: MarsConfig, pair: Pair) -> Opening:
    """Closeness, in the configuration's form, where each request's path ended."""
    eos_ids: Collection[int] = pair.target.eos_ids
    device = pair.target.model.device
    rule = mars_acceptance(config.acceptance(config.thetas[0]), device, eos_ids)

    def of_round(record: RoundRecord) -> Tensor:
        last = (record.path >= 0).sum(1, keepdim=True) - 1
        return rule.openings(_given(record)).gather(1, record.path.gather(1, last))[:, 0]

    denied = ",".join(map(str, sorted({*config.deny_token_ids, *eos_ids})))
    return Opening(f"{config.form}, denied {denied}", of_round)


def _given(record: RoundRecord) -> Verification:
    """What the acceptance saw of a round; nothing here draws, so seeds are left out."""
    none = torch.zeros_like(record.position)
    greedy = [request.sampling.greedy for request in record.requests]
    return Verification(
        tree=record.tree,
        target_ids=record.target_ids,
        logits=record.target_logits,
        law=record.target_logp_source,
        greedy=torch.tensor(greedy, device=none.device),
        seeds=none,
        positions=record.tree.depth,
        memory=none[:, None].double(),
    )


def judge_sweep(found: MarsSweep) -> Certificate:
    """The contract over the thetas, strictest first."""
    contract = found.config.contract
    losses = [losses_of(found.strict, answers, contract.kind) for answers in found.relaxed]
    return certify(losses, contract)


def fastest(certificate: Certificate, tokens_per_call: Sequence[float]) -> int | None:
    """The certified setting of most tokens per call, the strictest of equal ones.

    All certified settings hold together at the contract's confidence, so any may be picked, by
    whatever was seen.
    """
    certified = range(certificate.num_certified)
    return max(certified, key=lambda index: (tokens_per_call[index], -index), default=None)
