"""MARS's rules on trees drawn by hand, and by definition."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.kernels.verify_tree import verify_tree
from specctl.policy import build_acceptance
from specctl.policy.mars import Mars, MarsRule, top_two
from specctl.policy.verification import StrictAcceptance, Verification
from specctl.tree import TokenTree
from tests.policy.drafts import tree_of_nodes, verification
from tests.runtime.table import all_trees, tree_of

ROOT, A, B, C, EOS = 0, 1, 2, 3, 4
VOCAB = 5


def tree(*nodes: tuple[int, int]) -> TokenTree:
    return tree_of_nodes(ROOT, *nodes)


def logits_of(drawn: TokenTree, rows: dict[int, dict[int, float]]) -> Tensor:
    """`[1, N, V]`, 0.1 where nothing is said; A leads by far at nodes that are not named."""
    logits = torch.full((1, drawn.num_slots, VOCAB), 0.1)
    logits[:, :, A] = 10.0
    for node, values in rows.items():
        logits[0, node] = 0.1
        for token, value in values.items():
            logits[0, node, token] = value
    return logits


def rule_of(**fields: object) -> MarsRule:
    rule = build_acceptance(Mars(**fields), eos_ids=(EOS,))
    assert isinstance(rule, MarsRule)
    return rule


def admitted(rule: MarsRule, given: Verification) -> list[int]:
    """Indices of the admitted nodes of row 0."""
    return rule.judge(given).admitted[0].nonzero()[:, 0].tolist()


CHAIN = tree((B, 0), (A, 1))
"""
root ── B ── A
"""
CLOSE = {A: 10.0, B: 9.5}
"""z2 / z1 = 0.95, z1 - z2 = 0.5, p2 / p1 = 0.61"""


@pytest.mark.parametrize(
    ("relaxes", "form", "theta", "logits"),
    [
        (True, "ratio", 0.94, CLOSE),
        (False, "ratio", 0.95, CLOSE),  # not above it
        (False, "ratio", 1.0, CLOSE),
        (True, "margin", 0.6, CLOSE),
        (False, "margin", 0.5, CLOSE),
        (False, "margin", 0.0, CLOSE),
        (True, "prob_ratio", 0.6, CLOSE),
        (False, "prob_ratio", 0.61, CLOSE),
        (False, "prob_ratio", 1.0, CLOSE),
        # Only the ratio depends on the origin of logits.
        (True, "ratio", 0.99, {A: 110.0, B: 109.5}),
        (False, "margin", 0.5, {A: 110.0, B: 109.5}),
        (False, "prob_ratio", 0.61, {A: 110.0, B: 109.5}),
        # z2 / z1 of two negative logits exceeds 1; of a negative and a positive one it is below 0.
        (False, "ratio", 0.0, {A: -9.6, B: -10.0, C: -20.0, EOS: -20.0, ROOT: -20.0}),
        (False, "ratio", 0.0, {A: 0.2, B: -0.2, C: -20.0, EOS: -20.0, ROOT: -20.0}),
        (True, "margin", 1.0, {A: -9.6, B: -10.0, C: -20.0, EOS: -20.0, ROOT: -20.0}),
    ],
)
def test_second_choice_follows_where_the_margin_is_low(
    form: str,
    theta: float,
    logits: dict[int, float],
    relaxes: bool,  # noqa: FBT001
) -> None:
    given = verification(CHAIN, logits_of(CHAIN, {0: logits}))
    for mode in ("sound", "alg1"):
        rule = rule_of(mode=mode, form=form, theta=theta)
        # Below B the target wants A, which is there: strict, though off the strict path.
        assert admitted(rule, given) == ([1, 2] if relaxes else [2])
        path = verify_tree(CHAIN.parent, rule.judge(given).admitted, 2)
        assert path.tolist() == ([[0, 1, 2]] if relaxes else [[0, -1, -1]])


@pytest.mark.parametrize(
    ("first", "second", "denied"), [(A, B, A), (A, B, B), (EOS, A, None), (A, EOS, None)]
)
def test_denied_tokens_and_ends_of_text_are_relaxed_neither_to_nor_from(
    first: int, second: int, denied: int | None
) -> None:
    drawn = tree((second, 0))
    given = verification(drawn, logits_of(drawn, {0: {first: 10.0, second: 9.9}}))
    if denied is not None:
        assert admitted(rule_of(theta=0.9), given) == [1]
    deny = () if denied is None else (denied,)
    assert admitted(rule_of(theta=0.9, deny_token_ids=deny), given) == []


def test_ties_keep_the_strict_token_first() -> None:
    """Top-k may order tied logits otherwise than argmax, which strict decoding takes."""
    drawn = tree((C, 0))
    logits = logits_of(drawn, {0: {A: 5.0, C: 5.0}})
    for own, other in ((A, C), (C, A)):  # whichever of the two top-k puts first
        target_ids = torch.tensor([[own, A]])
        best = top_two(logits, target_ids, greedy=torch.tensor([True]))
        assert (best.first[0, 0], best.second[0, 0]) == (own, other)
    given = verification(drawn, logits)
    assert admitted(rule_of(theta=0.9), given) == [1]
    assert admitted(rule_of(theta=1.0), given) == []


def test_padding_is_never_admitted() -> None:
    parent = torch.tensor([[-1, 0, -2], [-1, 0, 1]])
    tokens = torch.tensor([[ROOT, B, 0], [ROOT, B, A]])
    depth = torch.tensor([[0, 1, 0], [0, 1, 2]])
    drawn = TokenTree(tokens, parent, depth, torch.zeros(2, 3))
    logits = logits_of(CHAIN, {0: CLOSE}).expand(2, -1, -1)
    judged = rule_of(theta=0.9).judge(verification(drawn, logits))
    assert judged.admitted.tolist() == [[False, True, False], [False, True, True]]


def test_sound_never_emits_what_top_p_excludes() -> None:
    logits = logits_of(CHAIN, {0: CLOSE})
    law = logits.clone()
    law[0, 0, B] = float("-inf")
    target_ids = torch.tensor([[A, A, A]])
    assert admitted(rule_of(theta=0.9), verification(CHAIN, logits, target_ids, law)) == [2]


def test_alg1_refuses_a_temperature() -> None:
    given = verification(CHAIN, logits_of(CHAIN, {0: CLOSE}), torch.tensor([[A, A, A]]))
    with pytest.raises(UsageError, match=r"alg1.*greedily.*mode=sound"):
        rule_of(mode="alg1").judge(given)


TOTAL = 7
LAWS = ((4, 2, 1), (1, 4, 2), (3, 0, 4), (2, 4, 1), (4, 3, 0))
"""Over three tokens, without ties; the second choice has 1/2 or 3/4 of the first."""


def weights(path: tuple[int, ...]) -> tuple[int, ...]:
    return LAWS[(len(path) + 2 * sum(path)) % len(LAWS)]


def defined_law(paths: list[tuple[int, ...]], theta: float) -> dict[tuple[int, ...], Fraction]:
    """What `sound` is defined to emit in a round, branch by branch."""
    drafted, law = set(paths), Counter()

    def visit(path: tuple[int, ...], mass: Fraction) -> None:
        found = weights(path)
        second, first = sorted(range(3), key=lambda token: found[token])[1:]
        children = {token for token in range(3) if (*path, token) in drafted}
        may_relax = found[second] > theta * found[first] and second in children
        for token in range(3):
            share = mass * Fraction(found[token], TOTAL)
            if share and token in children:
                visit((*path, token), share)
            elif share and may_relax and first not in children:
                visit((*path, second), share)
            elif share:
                law[(*path, token)] += share

    visit((), Fraction(1))
    return dict(law)


def emitted_law(paths: list[tuple[int, ...]], rule: Any) -> dict[tuple[int, ...], Fraction]:
    """What a rule emits over every combination of the target's draws, exactly."""
    ordered = sorted(paths, key=lambda path: (len(path), path))
    draws = torch.tensor(list(itertools.product(range(3), repeat=len(paths))))
    single = tree_of(paths)
    columns = (single.token_ids, single.parent, single.depth, single.draft_logp)
    batch = TokenTree(*(column.expand(len(draws), -1) for column in columns))
    table = torch.tensor([weights(path) for path in ordered], dtype=torch.float64)
    logits = table.log().float()[None].expand(len(draws), -1, -1)
    judged = rule.judge(verification(batch, logits, draws))
    ends = verify_tree(batch.parent, judged.admitted, 5)
    law: Counter[tuple[int, ...]] = Counter()
    for row, (path, drawn) in enumerate(zip(ends.tolist(), draws.tolist(), strict=True)):
        mass = Fraction(1)
        for node, token in enumerate(drawn):
            mass *= Fraction(int(table[node, token]), TOTAL)
        last = max(node for node in path if node >= 0)
        law[(*ordered[last], int(judged.target_ids[row, last]))] += mass
    return {text: mass for text, mass in law.items() if mass}


TREES = list(all_trees(4))


@pytest.mark.parametrize("theta", [0.4, 0.6, 0.8, 1.0])
def test_sound_emits_its_defined_law_on_every_tree(theta: float) -> None:
    rule = rule_of(form="prob_ratio", theta=theta)
    assert len(TREES) == 1 + 3 + 12 + 55
    differs = 0
    for paths in TREES:
        law = emitted_law(paths, rule)
        assert law == defined_law(paths, theta)
        differs += law != emitted_law(paths, StrictAcceptance())
    assert (differs > 0) == (theta < 0.75)  # no second choice is closer than that
