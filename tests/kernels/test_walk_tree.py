"""The reference of `walk_tree`: equal to the loops of the docstrings, and to the rules it stands
in for, which judge all nodes first."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.kernels.verify_tree import NearLaw, RunnerUp, Walk, verify_tree, walk_tree
from specctl.policy import build_acceptance
from specctl.policy.acceptances import JensenShannon, Mars
from specctl.policy.adasd import JensenShannonRule, distances
from specctl.policy.mars import MarsRule, bound, top_two
from specctl.policy.running import first_rejected
from specctl.policy.verification import AcceptanceRule, DraftLaw, StrictAcceptance, Verification
from specctl.tree import TokenTree
from tests.kernels.cases_verify_tree import (
    ACCEPTANCES,
    EMPTY_ROW,
    VOCAB,
    Batch,
    check_verify,
    check_walk,
    random_batch,
)
from tests.kernels.cases_walk_edges import check_edges

CPU = torch.device("cpu")
DENIED = (3, 14, 15)
EOS = 92
FORMS = {"ratio": 0.8, "margin": 0.5, "prob_ratio": 0.6}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ACCEPTANCES)
def test_reference_equals_the_loop(name: str, seed: int) -> None:
    batch = random_batch(seed, 40, 8 + 12 * seed, 3 + 4 * seed)
    check_walk(batch, name, CPU, spare_depth=seed)
    check_verify(batch, CPU)


def test_thresholds_are_exceeded_not_met() -> None:
    check_edges(CPU)


# --------------------------------------------------------------------------- beside the rules


def verification(seed: int, *, sampled: bool) -> Verification:
    """Rooted random trees behind logits that prefer children, or nearly so; two of three rows
    sampled under top-p, if any is."""
    batch = random_batch(seed, 60, 24, 6)
    kept = torch.arange(60) != EMPTY_ROW
    tree = tree_of(batch, kept)
    rows, slots = tree.parent.shape
    logits = torch.randn(rows, slots, VOCAB, generator=batch.generator)
    first = batch.randint(0, VOCAB, rows, slots)
    first = torch.where(batch.rand(rows, slots) < 0.6, batch.target_ids[kept], first)
    links = tree.parent.where(tree.parent >= 0, torch.tensor(slots))
    spare = batch.randint(0, VOCAB, rows, slots + 1)
    second = spare.scatter_(1, links, tree.token_ids)[:, :slots]
    logits.scatter_(2, second[..., None], 5 - 2 * batch.rand(rows, slots, 1))
    logits.scatter_(2, first[..., None], 5.0)
    greedy = torch.arange(rows) % 3 == 0 if sampled else torch.ones(rows, dtype=torch.bool)
    law = logits.masked_fill((logits < 4) & ~greedy[:, None, None], -math.inf)
    gumbel = -batch.rand(rows, slots, VOCAB).log_().neg_().log_()
    drawn = torch.where(greedy[:, None, None], logits, law + gumbel).argmax(-1)
    above = law.gather(1, tree.parent.clamp(min=0)[..., None].expand_as(law)).clamp(min=-20)
    drafted = above + 2 * batch.rand(rows, slots, 1) * batch.rand(rows, slots, VOCAB)
    return Verification(
        tree=tree,
        target_ids=drawn,
        logits=logits,
        law=law,
        greedy=greedy,
        seeds=torch.zeros(rows, dtype=torch.int64),
        positions=tree.depth,
        memory=10 * batch.rand(rows, 8).double().sort(1, descending=True).values,
        draft_law=DraftLaw(drafted, torch.arange(VOCAB)),
    )


def tree_of(batch: Batch, kept: Tensor) -> TokenTree:
    parent, depth = batch.parent[kept], torch.zeros_like(batch.parent[kept])
    for _ in range(batch.max_depth):
        depth = torch.where(parent >= 0, depth.gather(1, parent.clamp(min=0)) + 1, 0)
    return TokenTree(batch.token_ids[kept], parent, depth, torch.zeros(parent.shape))


def assert_as_judged(rule: AcceptanceRule, given: Verification, found: Walk) -> None:
    """Path, emitted tokens and first rejection are those of the two steps that decode today."""
    judged, tree = rule.judge(given), given.tree
    path = verify_tree(tree.parent, judged.admitted, int(tree.depth.max()))
    assert torch.equal(found.path, path)
    assert torch.equal(found.num_accepted, (path >= 0).sum(1) - 1)
    assert torch.equal(found.first_rejected, first_rejected(tree, path))
    end = path.gather(1, found.num_accepted[:, None])
    assert torch.equal(found.bonus_ids, judged.target_ids.gather(1, end)[:, 0])


def walk(given: Verification, acceptance: RunnerUp | NearLaw | None) -> Walk:
    tree = given.tree
    return walk_tree(
        tree.parent, tree.token_ids, given.target_ids, int(tree.depth.max()), acceptance
    )


def denied_mask() -> Tensor:
    return torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor([*DENIED, EOS]), True)


@pytest.mark.parametrize("sampled", [False, True])
def test_strict_is_as_judged(sampled: bool) -> None:  # noqa: FBT001
    given = verification(0, sampled=sampled)
    assert_as_judged(StrictAcceptance(), given, walk(given, None))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["sound", "alg1"])
def test_the_runner_up_is_as_mars_judges(mode: str, form: str) -> None:
    record = Mars(mode=mode, form=form, theta=FORMS[form], deny_token_ids=DENIED)
    rule = build_acceptance(record, eos_ids=(EOS,))
    assert isinstance(rule, MarsRule)
    num_relaxed = 0
    for seed in range(4):
        given = verification(seed, sampled=mode == "sound")
        found = walk(given, runner_up_of(record, given))
        assert_as_judged(rule, given, found)
        num_relaxed += int((found.num_accepted > walk(given, None).num_accepted).sum())
    assert num_relaxed >= 20


def runner_up_of(record: Mars, given: Verification) -> RunnerUp:
    """The record's threshold in the kernel's two forms."""
    best = given.logits.topk(2, -1)
    limit = math.log(record.theta) if record.form == "prob_ratio" else bound(record)
    return RunnerUp(
        top_ids=best.indices,
        top_logits=best.values,
        greedy=given.greedy,
        bound=torch.full((len(given.greedy),), limit),
        form="ratio" if record.form == "ratio" else "difference",
        denied=denied_mask(),
        law=given.law,
    )


def test_a_runner_up_that_ties_is_as_mars_judges() -> None:
    """Of logits that tie, the target's token is the first, whatever top-k says."""
    given = verification(1, sampled=False)
    logits = given.logits.clamp(max=4.0)
    given = replace(given, logits=logits, law=logits, target_ids=logits.argmax(-1))
    record = Mars(theta=0.9, deny_token_ids=DENIED)
    rule = build_acceptance(record, eos_ids=(EOS,))
    assert isinstance(rule, MarsRule)
    assert (top_two(logits, given.target_ids, given.greedy).second != logits.argmax(-1)).all()
    assert_as_judged(rule, given, walk(given, runner_up_of(record, given)))


@pytest.mark.parametrize("variant", ["base", "A", "B", "C"])
def test_a_near_law_is_as_adasd_judges(variant: str) -> None:
    record = JensenShannon(variant=variant, min_samples=1, deny_token_ids=DENIED)
    rule = build_acceptance(record, eos_ids=(EOS,))
    assert isinstance(rule, JensenShannonRule)
    num_relaxed = 0
    for seed in range(4):
        given = verification(seed, sampled=True)
        near = NearLaw(distances(given), rule.threshold(given.memory), denied_mask())
        assert len(near.threshold.unique()) > 10, "requests have thresholds of their own"
        found = walk(given, near)
        assert_as_judged(rule, given, found)
        num_relaxed += int((found.num_accepted > walk(given, None).num_accepted).sum())
    assert num_relaxed >= 20


# --------------------------------------------------------------------------- refusals


def test_other_dtypes_and_shapes_are_refused() -> None:
    tree = torch.tensor([[-1, 0]])
    with pytest.raises(UsageError, match="token_ids: expected int64 of 1 x 2, found int32 of 1 x"):
        walk_tree(tree, tree.int(), tree, 1)
    with pytest.raises(UsageError, match="target_ids: expected int64 of 1 x 2, found int64 of 1 x"):
        walk_tree(tree, tree, tree[:, :1], 1)
    near = NearLaw(torch.zeros(1, 2), torch.zeros(1))
    with pytest.raises(UsageError, match="threshold: expected float64 of 1, found float32 of 1"):
        walk_tree(tree, tree, tree, 1, near)
    two = RunnerUp(
        torch.zeros(1, 2, 2).long(), torch.zeros(1, 2, 2), tree[0, :1] > 0, torch.ones(1)
    )
    with pytest.raises(UsageError, match="form: expected ratio or difference, found 'odds'"):
        walk_tree(tree, tree, tree, 1, replace(two, form="odds"))
    with pytest.raises(UsageError, match="denied: expected bool of any, found int64 of 1 x 2"):
        walk_tree(tree, tree, tree, 1, replace(two, denied=tree))
    with pytest.raises(UsageError, match="law: expected float32 or bfloat16 or float16 of 1 x 2 x"):
        walk_tree(tree, tree, tree, 1, replace(two, law=tree))


def test_an_acceptance_on_another_device_is_refused() -> None:
    tree = torch.tensor([[-1, 0]])
    near = NearLaw(torch.zeros(1, 2), torch.zeros(1, device="meta", dtype=torch.float64))
    with pytest.raises(UsageError, match="tensors on one device, found cpu, meta"):
        walk_tree(tree, tree, tree, 1, near)
