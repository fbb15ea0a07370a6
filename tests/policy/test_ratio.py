"""Ratio verification emits the target's distribution: by enumeration, without any sampling.

Every draft of up to five tokens is taken with its probability under the drafter, and every outcome
of every coin and draw with the probability that the production rule gives it. The production shapes
decide how much of each draft is verified. The distribution of whole texts is then a sum, and its
total variation to the target's is 0 up to rounding. Each bug put in on purpose must be seen.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from specctl.policy import (
    Chain,
    ChainSchedule,
    EntropyStop,
    JointThreshold,
    PerRequest,
    Policy,
    Ratio,
    Shape,
    SignalStop,
    StaticTree,
    SurvivalBudget,
    build_acceptance,
    build_shape,
)
from specctl.policy.growing import grow_tree
from specctl.policy.ratio import Chances, chances
from specctl.policy.rules import Frontier, Level, RoundStart
from specctl.policy.verification import DraftDistribution, Verification
from specctl.tree import Children, DraftPool, TokenTree, take
from tests.policy.ratio_reference import RandomLaws

VOCAB = 3
ROUNDING = 1e-12
"""Total variation is a sum of up to 3^6 texts, each of a few float64 products."""
Found = Callable[[Verification], Chances]


class Silent:
    def lap(self, phase: str) -> None:
        pass


@dataclass
class GivenDrafts:
    """A source whose row r drafts a given chain: its drafter's probabilities and entropies."""

    drafter: RandomLaws
    drafts: list[tuple[int, ...]]

    def children(self, level: Level, frontier: Frontier, top_k: int) -> Children:
        depth = level.depth
        laws = [self.drafter(chain[:depth]) for chain in self.drafts]
        tokens = [chain[depth] for chain in self.drafts]
        logp = [math.log(law[token]) for law, token in zip(laws, tokens, strict=True)]
        entropy = [-sum(p * math.log(p) for p in law if p) for law in laws]
        columns = (torch.tensor(one)[:, None] for one in (logp, entropy))
        own, of = (one.float() for one in columns)
        return Children(torch.tensor(tokens)[:, None, None], own[..., None], of, of)


def every_draft(drafter: RandomLaws, length: int) -> dict[tuple[int, ...], float]:
    """All chains of that length that the drafter may draw, with their probabilities."""
    found = {}
    for chain in itertools.product(range(VOCAB), repeat=length):
        probs = [drafter(chain[:at])[token] for at, token in enumerate(chain)]
        if all(probs):
            found[chain] = math.prod(probs)
    return found


def verification(
    target: RandomLaws, drafter: RandomLaws, tree: TokenTree, drafts: list[tuple[int, ...]]
) -> Verification:
    """The verification of chains, row r being the beginning of draft r."""
    rows, slots = tree.parent.shape
    law, said = (
        torch.tensor(
            [[of(chain[:at]) for at in range(slots)] for chain in drafts], dtype=torch.float64
        )
        for of in (target, drafter)
    )
    ids = torch.tensor(list(drafter.said))
    behind = said[..., ids]
    return Verification(
        tree=tree,
        target_ids=torch.zeros(rows, slots, dtype=torch.int64),
        logits=law.log(),
        processed=law.log(),
        greedy=torch.zeros(rows, dtype=torch.bool),
        seeds=torch.arange(rows),
        positions=torch.arange(slots).expand(rows, slots) + 7,
        memory=torch.zeros(rows, 0),
        drafted_from=DraftDistribution(torch.cat([behind[:, :1], behind[:, :-1]], 1).log(), ids),
    )


def submitted(shape: Shape, drafter: RandomLaws, drafts: list[tuple[int, ...]]) -> TokenTree:
    """What the shape's production rule submits of each draft."""
    rule = build_shape(shape)
    # A memory in which AdaSD's mean accepted and rejected entropies are .7 and .9 nats.
    memory = torch.tensor([[9, 9, 6.3, 8.1]], dtype=torch.float64)[:, : rule.memory_size]
    plan = rule.begin(RoundStart(len(drafts), memory.expand(len(drafts), -1)))
    roots = torch.zeros(len(drafts), dtype=torch.int64)
    pool: DraftPool = grow_tree(rule, plan, GivenDrafts(drafter, drafts), roots, Silent())
    return take(pool, rule.select(plan, pool))


def total_variation(
    shape: Shape, target: RandomLaws, drafter: RandomLaws, find: Found = chances
) -> tuple[float, set[int]]:
    """Between the texts that a round begins and the target's own; also the lengths submitted."""
    length = build_shape(shape).max_depth
    weights = every_draft(drafter, length)
    drafts = list(weights)
    tree = submitted(shape, drafter, drafts)
    found = find(verification(target, drafter, tree, drafts))
    accept, rest = found.accept.tolist(), found.rest.tolist()
    sizes = ((tree.parent >= 0).sum(1)).tolist()
    begun: dict[tuple[int, ...], float] = defaultdict(float)
    for row, (chain, mass) in enumerate(weights.items()):
        for at in range(sizes[row] + 1):
            is_last = at == sizes[row]
            taken = 0.0 if is_last else accept[row][at + 1]
            for token in range(VOCAB):
                begun[(*chain[:at], token)] += mass * (1 - taken) * rest[row][at][token]
            mass *= taken
    # Texts end where the longest round does; shorter ones go on by the target.
    for size in range(1, length + 1):
        for text in itertools.product(range(VOCAB), repeat=size):
            mass = begun.pop(text, 0.0)
            for token, prob in enumerate(target(text)):
                begun[(*text, token)] += mass * prob
    wanted = {
        text: math.prod(target(text[:at])[token] for at, token in enumerate(text))
        for text in itertools.product(range(VOCAB), repeat=length + 1)
    }
    return sum(abs(begun[text] - wanted[text]) for text in wanted) / 2, set(sizes)


def stop(signal: str, threshold: float, window: int = 4, **more: bool) -> SignalStop:
    return SignalStop(signal=signal, threshold=threshold, window=window, **more)  # type: ignore[arg-type]


PREDICTABLE: dict[str, Shape] = {
    "confidence": stop("confidence", 0.5),
    "survival": stop("survival", 0.2),
    "entropy": stop("entropy", 0.8),
    "entropy before": stop("entropy", 0.8, keep_last=False),
    "svip": stop("sqrt_entropy", 0.9, keep_last=False),
    "adaedl": stop("entropy_bound", 0.6, keep_last=False),
    "adasd": EntropyStop(window=4),
    "adasd before": EntropyStop(window=4, keep_last=False),
    "schedule": ChainSchedule(from_batch=(1,), num_draft_tokens=(3,)),
}
UNPREDICTABLE: dict[str, Shape] = {
    "confidence before": stop("confidence", 0.5, keep_last=False),
    "survival before": stop("survival", 0.2, keep_last=False),
    "joint threshold": JointThreshold(depth=4, top_k=1, num_tokens=5, min_prob=0.3),
}
TARGET = RandomLaws(1, VOCAB)
DRAFTERS = {"all": RandomLaws(2, VOCAB), "reduced vocabulary": RandomLaws(3, VOCAB, said=(2, 0))}


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_every_chain_emits_the_target_law(length: int, drafter: RandomLaws) -> None:
    found, sizes = total_variation(Chain(num_draft_tokens=length), TARGET, drafter)
    assert found < ROUNDING
    assert sizes == {length}


@pytest.mark.parametrize("name", PREDICTABLE)
def test_predictable_stops_emit_the_target_law(name: str) -> None:
    Policy(shape=PREDICTABLE[name], acceptance=Ratio())
    found, sizes = total_variation(PREDICTABLE[name], TARGET, DRAFTERS["all"])
    assert found < ROUNDING
    assert len(sizes) > 1 or name == "schedule", "a stop that never acts would prove nothing"


@pytest.mark.parametrize("name", UNPREDICTABLE)
def test_unpredictable_stops_emit_another_law_and_are_refused(name: str) -> None:
    found, _ = total_variation(UNPREDICTABLE[name], TARGET, DRAFTERS["all"])
    assert found > 0.005
    with pytest.raises(ValueError, match="predictable stop, but"):
        Policy(shape=UNPREDICTABLE[name], acceptance=Ratio())


def test_trees_and_shared_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="but eagle2 drafts trees"):
        Policy(shape=StaticTree(), acceptance=Ratio())
    with pytest.raises(ValueError, match="budget survival withholds tokens"):
        Policy(shape=Chain(), budget=SurvivalBudget(max_tokens=8), acceptance=Ratio())
    assert Policy(shape=Chain(), budget=PerRequest(), acceptance=Ratio()).lossless


# --------------------------------------------------------------------------- bugs put in

MUTANTS: dict[str, Found] = {}


def mutant(find: Found) -> Found:
    MUTANTS[find.__name__] = find
    return find


def with_rest(given: Verification, rest: torch.Tensor) -> Chances:
    """Other residuals where a draft token may be refused."""
    found = chances(given)
    own = found.rest.clone()
    drafted = (given.tree.parent[:, 1:] >= 0)[..., None]
    own[:, :-1] = torch.where(drafted, rest, own[:, :-1])
    return replace(found, rest=own)


def laws(given: Verification) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q where each draft token was drawn."""
    assert given.drafted_from is not None
    q = torch.zeros_like(given.processed)
    q.index_add_(2, given.drafted_from.target_ids, given.drafted_from.logits.softmax(-1))
    return given.processed.softmax(-1)[:, :-1], q[:, 1:]


@mutant
def target_in_place_of_the_residual(given: Verification) -> Chances:
    return with_rest(given, laws(given)[0])


@mutant
def residual_not_normalised(given: Verification) -> Chances:
    p, q = laws(given)
    return with_rest(given, (p - q).clamp(min=0))


@mutant
def draft_law_of_the_row_above(given: Verification) -> Chances:
    law = given.drafted_from
    assert law is not None
    shifted = torch.cat([law.logits[:, :1], law.logits[:, :-1]], 1)
    return chances(replace(given, drafted_from=replace(law, logits=shifted)))


@mutant
def accepted_by_the_target_alone(given: Verification) -> Chances:
    """Point-mass verification of a drawn token, with the residual of ratio verification."""
    found = chances(given)
    return replace(found, accept=torch.minimum(found.accept, found.accept * found.draft_prob))


@pytest.mark.parametrize("name", MUTANTS)
def test_bugs_are_seen(name: str) -> None:
    found, _ = total_variation(
        Chain(num_draft_tokens=3), TARGET, DRAFTERS["all"], find=MUTANTS[name]
    )
    assert found > 0.005


# --------------------------------------------------------------------------- the draws


def test_greedy_rows_are_strict() -> None:
    drafts = list(every_draft(TARGET, 2))
    tree = submitted(Chain(num_draft_tokens=2), TARGET, drafts)
    given = verification(TARGET, TARGET, tree, drafts)
    own = given.processed.argmax(-1)
    given = replace(given, greedy=torch.ones_like(given.greedy), target_ids=own)
    found, strict = (
        build_acceptance(one).judge(given) for one in (Ratio(), Policy(shape=Chain()).acceptance)
    )
    assert torch.equal(found.admitted, strict.admitted)
    assert torch.equal(found.target_ids, own)


def test_equal_laws_refuse_nothing() -> None:
    drafts = list(every_draft(TARGET, 2))
    tree = submitted(Chain(num_draft_tokens=2), TARGET, drafts)
    found = chances(verification(TARGET, TARGET, tree, drafts))
    assert torch.allclose(found.accept[:, 1:], torch.ones(1, dtype=torch.float64))
    assert bool(torch.isfinite(found.rest).all())
