"""Ratio verification of chains whose draft tokens were drawn from the drafter. Lossless.

With q the drafter's distribution after a token and p the target's, both after temperature, top-k
and top-p, the draft token x ~ q is accepted with probability min(1, p(x) / q(x)). The first
rejected token is replaced by a draw from the residual, max(p - q, 0) normalised; after a fully
accepted chain the target draws from p (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023,
Algorithm 2). A drawn token is accepted with probability 1 - TV(p, q), and the likeliest one under
point-mass verification with its probability under p; which is higher depends on the pair.

Losslessness requires that x is a draw from q *given that it is verified*. So whether position i is
verified may depend on earlier draws, but not on x_i: the stop rule must be predictable. A rule that
withholds a drafted token for its probability changes the distribution of the text; see
`ShapeFamily.withholds`.

All noise follows from the request's seed and the output position (`specctl.noise`), with separate
streams for draft token, coin and residual, so a text is independent of its batch. It depends on the
policy, unlike texts of point-mass verification; only its distribution does not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from specctl.lazy import Device, Tensor, torch
from specctl.noise import gumbels, noise_keys, uniforms
from specctl.policy.family import Acceptance, AcceptanceFamily
from specctl.policy.verification import Judgement, Outcome, Verification, follows

DRAFT_STREAM, COIN_STREAM, RESIDUAL_STREAM = 201, 202, 203
"""Streams of noise: draft token, acceptance, replacement."""


class Ratio(Acceptance):
    """Drafts are drawn from the drafter and accepted with probability min(1, p/q). Lossless."""

    kind: Literal["ratio"] = "ratio"


@dataclass(frozen=True)
class Chances:
    """The probabilities of a verification of chains, float64."""

    accept: Tensor
    """`[B, N]`, of each draft token given that the earlier ones are accepted; 0 at the root and in
    empty slots."""
    rest: Tensor
    """`[B, N, V]`, distribution of the token emitted after each node if the next draft token is
    rejected; after the last node of a chain the target's own."""
    draft_prob: Tensor  # `[B, N]`, q of each draft token; arbitrary elsewhere


@dataclass(frozen=True)
class RatioRule:
    """Ratio verification of a batch of chains; greedy rows are strict, the limit at T = 0."""

    memory_size = 0
    needs_draft_distribution = True
    samples_drafts = True

    def judge(self, given: Verification) -> Judgement:
        found, tree = chances(given), given.tree
        before = given.positions[:, :-1]  # a draft token stands where its parent's successor does
        coins = uniforms(noise_keys(given.seeds[:, None], before, COIN_STREAM), 1)[..., 0]
        accepted = torch.zeros_like(tree.valid)
        accepted[:, 1:] = coins < found.accept[:, 1:]
        sampled = ~given.greedy[:, None]
        accepted = torch.where(sampled, accepted, follows(tree, given.target_ids))
        target_ids = given.target_ids.clone()
        keys = noise_keys(given.seeds[:, None], before, RESIDUAL_STREAM)
        rest = found.rest[:, :-1]
        drawn = (rest.log() + gumbels(keys, rest.shape[-1])).argmax(-1)
        drafted = has_draft(given)[:, 1:]
        target_ids[:, :-1] = torch.where(sampled & drafted, drawn, target_ids[:, :-1])
        # A node's `target_ids` is the token emitted after it, as in point-mass verification.
        target_ids[:, :-1] = torch.where(accepted[:, 1:], tree.token_ids[:, 1:], target_ids[:, :-1])
        return Judgement(accepted, target_ids, found.draft_prob.log().float())

    def observe(self, memory: Tensor, outcome: Outcome) -> Tensor:
        del outcome  # every round is judged alone
        return memory


def has_draft(given: Verification) -> Tensor:
    """`[B, N]` bool: the slot holds a draft token."""
    return given.tree.parent >= 0


def chances(given: Verification) -> Chances:
    """The probabilities of a verification. The parent of slot i is slot i - 1, as trees are
    chains."""
    tree, drafter = given.tree, given.drafted_from
    assert drafter is not None
    target = given.processed.double().softmax(-1)
    spread = torch.zeros_like(target)
    drafted = drafter.logits.double().softmax(-1)
    spread.index_add_(2, drafter.target_ids, drafted)  # q = 0 outside the draft vocabulary
    p, q = target[:, :-1], spread[:, 1:]
    token_ids, is_draft = tree.token_ids[:, 1:, None], has_draft(given)[:, 1:]
    p_token, q_token = (probs.gather(-1, token_ids)[..., 0] for probs in (p, q))
    accept = torch.zeros_like(target[..., 0])
    accept[:, 1:] = torch.where(is_draft, (p_token / q_token).clamp(max=1), 0.0)
    draft_prob = torch.ones_like(accept)
    draft_prob[:, 1:] = q_token
    residual = (p - q).clamp(min=0)
    mass = residual.sum(-1, keepdim=True)
    # Where p = q, up to rounding, no mass is left and nothing is rejected.
    replaces = is_draft[..., None] & (mass > 0)
    rest = target.clone()
    rest[:, :-1] = torch.where(replaces, residual / mass.where(mass > 0, 1.0), p)
    return Chances(accept, rest, draft_prob)


def ratio_acceptance(record: Ratio, device: Device, eos_ids: Collection[int]) -> RatioRule:
    del record, device, eos_ids
    return RatioRule()


RATIO = AcceptanceFamily(record=Ratio, rule=ratio_acceptance, words={"ratio": {}}, is_lossless=True)
