"""MARS: admits the target's second choice where the target is nearly indifferent. Lossy.

arXiv:2601.15498, Algorithm 1. With v1 and v2 the target's two best tokens after a node, by raw
logits, and y the target's own token there (argmax, or drawn):

    sound   child y if there is one; else child v2, if the margin is low and no child is v1
    alg1    as `sound` with y = v1: greedy only, as the paper prints it

The target's own token follows the deepest admitted node. Relaxation never accepts or replaces a
denied token, and never chooses a path by its length."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from specctl.errors import UsageError
from specctl.lazy import Device, Tensor, torch
from specctl.policy.family import Acceptance, AcceptanceFamily
from specctl.policy.verification import (
    Judgement,
    Outcome,
    Verification,
    denied_ids,
    follows,
    has_child,
    of_parent,
)
from specctl.records import require


class Mars(Acceptance):
    """MARS: also accept the target's second choice where its margin is low. Lossy."""

    kind: Literal["mars"] = "mars"
    mode: Literal["alg1", "sound"] = "sound"
    """`alg1` (greedy, the paper), `sound` (sampling by coupling, strict child first)."""
    form: Literal["ratio", "margin", "prob_ratio"] = "ratio"
    """`ratio` z2/z1 of raw logits, where both are positive; `margin` z1 - z2, nats; `prob_ratio`
    p2/p1 before temperature."""
    theta: Annotated[float, Field(ge=0)] = 0.9
    """Relax above it (below it for `margin`); 1 (0 for `margin`) relaxes nothing."""
    deny_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Tokens relaxed neither to nor from (digits, tool-call marks), besides those that end a
    text."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        require(self.form == "margin" or self.theta <= 1, "a ratio threshold is at most 1")
        return self


@dataclass(frozen=True)
class TopTwo:
    """The two best tokens after each node and their float32 logits, `[B, N]` each."""

    first: Tensor
    second: Tensor
    first_logit: Tensor
    second_logit: Tensor


@dataclass(frozen=True)
class MarsRule:
    """The rule of a record."""

    record: Mars
    denied: Tensor  # `[K]` int64, tokens relaxed neither to nor from
    memory_size = 0
    needs_draft_distribution = False
    samples_drafts = False

    def judge(self, given: Verification) -> Judgement:
        if self.record.mode == "alg1" and not bool(given.greedy.all()):
            raise UsageError(
                "MARS in mode alg1, the paper's Algorithm 1, decodes greedily, and a "
                "request has a temperature; use mode=sound"
            )
        best = top_two(given.logits, given.target_ids, given.greedy)
        opened = self._openings(given, best) > bound(self.record)
        relaxed = follows(given.tree, best.second) & of_parent(opened, given.tree)
        return Judgement(follows(given.tree, given.target_ids) | relaxed, given.target_ids)

    def openings(self, given: Verification) -> Tensor:
        """`[B, N]` float32: closeness of the two best after a node, where the threshold decides;
        -inf elsewhere."""
        return self._openings(given, top_two(given.logits, given.target_ids, given.greedy))

    def _openings(self, given: Verification, best: TopTwo) -> Tensor:
        tree = given.tree
        strict = follows(tree, given.target_ids) | follows(tree, best.first)
        ready = has_child(tree, follows(tree, best.second)) & ~has_child(tree, strict)
        ready &= ~torch.isin(given.target_ids, self.denied) & ~torch.isin(best.second, self.denied)
        # Top-k and top-p exclude tokens that raw logits would allow.
        ready &= given.processed.gather(-1, best.second[..., None])[..., 0] > float("-inf")
        return closeness(self.record, best).masked_fill(~ready, float("-inf"))

    def observe(self, memory: Tensor, outcome: Outcome) -> Tensor:
        del outcome  # every round is judged alone
        return memory


def mars_acceptance(record: Mars, device: Device, eos_ids: Collection[int]) -> MarsRule:
    return MarsRule(record, denied_ids(record.deny_token_ids, eos_ids, device))


def closeness(record: Mars, best: TopTwo) -> Tensor:
    """`[B, N]` float32: closeness of the target's two best tokens, in the record's form.

    The ratio z2 / z1 depends on a shift of the logits, so it counts only if both are positive.
    """
    first, second = best.first_logit, best.second_logit
    if record.form == "ratio":
        return (second / first).masked_fill((second <= 0) | (first <= 0), float("-inf"))
    if record.form == "margin":
        return second - first
    return (second - first).exp()


def bound(record: Mars) -> float:
    """The closeness that a relaxation must exceed."""
    return -record.theta if record.form == "margin" else record.theta


def top_two(logits: Tensor, target_ids: Tensor, greedy: Tensor) -> TopTwo:
    """The two best tokens after each node of `[B, N, V]` logits.

    In greedy rows the first is the target's token, as top-k may order ties differently.
    """
    values, ids = logits.topk(2, dim=-1)
    first = torch.where(greedy[:, None], target_ids, ids[..., 0])
    second = torch.where(ids[..., 0] == first, ids[..., 1], ids[..., 0])
    return TopTwo(first, second, values[..., 0].float(), values[..., 1].float())


MARS = AcceptanceFamily(
    record=Mars,
    rule=mars_acceptance,
    is_lossless=False,
    words={"mars": {}, "mars-paper": {"mode": "alg1"}},
)
