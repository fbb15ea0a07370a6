"""MARS's rules on trees drawn by hand, by definition, and on what its authors released."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.kernels.verify_tree import verify_tree
from specctl.policy import build_acceptance
from specctl.policy.mars import Mars, MarsRule, ReleasedRule, top_two
from specctl.policy.verification import StrictAcceptance, Verification
from specctl.tree import TokenTree
from tests.policy.drafts import tree_of_nodes, verification
from tests.runtime.small_trees import all_trees, tree_of

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


# --------------------------------------------------------------------------- by hand

CHAIN = tree((B, 0), (A, 1))
"""
root ── B ── A
"""
FORK = tree((B, 0), (A, 0), (C, 1))
"""
root ─┬─ B ── C
      └─ A
"""
CLOSE = {A: 10.0, B: 9.5}
"""z2 / z1 = 0.95, z1 - z2 = 0.5, p2 / p1 = 0.61"""


@pytest.mark.parametrize("mode", ["sound", "alg1"])
@pytest.mark.parametrize(
    ("form", "theta", "relaxes"),
    [
        ("ratio", 0.94, True),
        ("ratio", 0.95, False),  # not above it
        ("ratio", 1.0, False),
        ("margin", 0.6, True),
        ("margin", 0.5, False),
        ("margin", 0.0, False),
        ("prob_ratio", 0.6, True),
        ("prob_ratio", 0.61, False),
        ("prob_ratio", 1.0, False),
    ],
)
def test_second_choice_follows_where_the_margin_is_low(
    mode: str,
    form: str,
    theta: float,
    relaxes: bool,  # noqa: FBT001
) -> None:
    rule = rule_of(mode=mode, form=form, theta=theta)
    given = verification(CHAIN, logits_of(CHAIN, {0: CLOSE}))
    # Below B the target wants A, which is there: strict, though off the strict path.
    assert admitted(rule, given) == ([1, 2] if relaxes else [2])
    path = verify_tree(CHAIN.parent, rule.judge(given).admitted, 2)
    assert path.tolist() == ([[0, 1, 2]] if relaxes else [[0, -1, -1]])


def test_strict_child_comes_first_even_on_the_shorter_path() -> None:
    given = verification(FORK, logits_of(FORK, {0: CLOSE, 1: {C: 10.0}}))
    assert admitted(rule_of(theta=0.5), given) == [2, 3]
    path = verify_tree(FORK.parent, rule_of(theta=0.5).judge(given).admitted, 2)
    assert path.tolist() == [[0, 2, -1]]


def test_third_choice_is_not_relaxed_to() -> None:
    drawn = tree((C, 0))
    given = verification(drawn, logits_of(drawn, {0: {A: 10.0, B: 9.9, C: 9.8}}))
    assert admitted(rule_of(theta=0.5), given) == []


@pytest.mark.parametrize("denied", [A, B])
def test_denied_tokens_are_relaxed_neither_to_nor_from(denied: int) -> None:
    given = verification(CHAIN, logits_of(CHAIN, {0: CLOSE}))
    assert 1 in admitted(rule_of(theta=0.9), given)
    assert 1 not in admitted(rule_of(theta=0.9, deny_token_ids=(denied,)), given)


@pytest.mark.parametrize(("first", "second"), [(EOS, A), (A, EOS)])
def test_end_of_text_is_denied_without_being_named(first: int, second: int) -> None:
    drawn = tree((second, 0))
    given = verification(drawn, logits_of(drawn, {0: {first: 10.0, second: 9.9}}))
    assert admitted(rule_of(theta=0.9), given) == []


@pytest.mark.parametrize("shift", [-20.0, -10.2])
def test_ratio_of_logits_that_are_not_positive_relaxes_nothing(shift: float) -> None:
    """z2 / z1 of two negative logits exceeds 1; of a negative and a positive one it is below 0."""
    logits = logits_of(CHAIN, {0: {A: 10.4, B: 10.0}}) + shift
    assert 1 not in admitted(rule_of(theta=0.0), verification(CHAIN, logits))
    assert 1 in admitted(rule_of(form="margin", theta=1.0), verification(CHAIN, logits))


def test_margin_and_probability_ratio_ignore_the_origin_of_logits_the_ratio_does_not() -> None:
    logits = logits_of(CHAIN, {0: CLOSE})
    for form, theta in (("margin", 0.6), ("prob_ratio", 0.6)):
        for shift in (0.0, 100.0):
            assert 1 in admitted(
                rule_of(form=form, theta=theta), verification(CHAIN, logits + shift)
            )
    assert 1 not in admitted(rule_of(theta=0.99), verification(CHAIN, logits))
    assert 1 in admitted(rule_of(theta=0.99), verification(CHAIN, logits + 100))


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


# --------------------------------------------------------------------------- sampling


def test_sound_draws_first_and_relaxes_what_was_not_drafted() -> None:
    """By coupling: a drawn child is followed, whatever the margin; else the second choice is."""
    logits = logits_of(FORK, {0: {C: 10.0, B: 9.9, A: 5.0}})
    cases = {A: [2, 3], B: [1, 3], C: [1, 3], ROOT: [1, 3]}  # the node below B holds what is drawn
    for drawn, wanted in cases.items():
        target_ids = torch.tensor([[drawn, C, A, A]])
        found = admitted(rule_of(theta=0.9), verification(FORK, logits, target_ids))
        assert found == wanted, drawn


def test_sound_never_emits_what_top_p_excludes() -> None:
    logits = logits_of(CHAIN, {0: CLOSE})
    law = logits.clone()
    law[0, 0, B] = float("-inf")
    target_ids = torch.tensor([[A, A, A]])
    assert admitted(rule_of(theta=0.9), verification(CHAIN, logits, target_ids, law)) == [2]


def test_alg1_refuses_a_temperature() -> None:
    given = verification(CHAIN, logits_of(CHAIN, {0: CLOSE}), torch.tensor([[A, A, A]]))
    with pytest.raises(UsageError, match=r"alg1.*greedy.*mode=sound"):
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


def emitted_law(paths: list[tuple[int, ...]], rule: object) -> dict[tuple[int, ...], Fraction]:
    """What a rule emits over every combination of the target's draws, exactly."""
    ordered = sorted(paths, key=lambda path: (len(path), path))
    draws = torch.tensor(list(itertools.product(range(3), repeat=len(paths))))
    single = tree_of(paths)
    columns = (single.token_ids, single.parent, single.depth, single.draft_logp)
    batch = TokenTree(*(column.expand(len(draws), -1) for column in columns))
    table = torch.tensor([weights(path) for path in ordered], dtype=torch.float64)
    logits = table.log().float()[None].expand(len(draws), -1, -1)
    judged = rule.judge(verification(batch, logits, draws))  # type: ignore[attr-defined]
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


@pytest.mark.parametrize("theta", [0.4, 0.6, 0.8])
def test_sound_emits_its_defined_law_on_every_tree(theta: float) -> None:
    rule = rule_of(form="prob_ratio", theta=theta)
    assert len(TREES) == 1 + 3 + 12 + 55
    differs = 0
    for paths in TREES:
        law = emitted_law(paths, rule)
        assert law == defined_law(paths, theta)
        differs += law != emitted_law(paths, StrictAcceptance())
    assert (differs > 0) == (theta < 0.75)  # no second choice is closer than that


def test_sound_at_theta_one_is_strict_on_every_tree() -> None:
    for paths in TREES:
        assert emitted_law(paths, rule_of(form="prob_ratio", theta=1.0)) == emitted_law(
            paths, StrictAcceptance()
        )


# --------------------------------------------------------------------------- as released


def released(theta: float = 1.0) -> MarsRule:
    rule = rule_of(mode="code_v1", theta=theta)
    assert isinstance(rule, ReleasedRule)
    return rule


PROBS = (0.5, 0.3, 0.2)
"""p = q of the example in notes/state-of-the-art.md, section 6."""


def drafted_with(probs: tuple[float, ...], rows: int) -> tuple[TokenTree, Tensor]:
    """One level that drafts tokens 0, 1, 2, ... with these probabilities, and logits of PROBS."""
    size = len(probs)
    columns = ([0, *range(size)], [-1] + [0] * size, [0] + [1] * size)
    logp = torch.tensor([1.0, *probs]).log().expand(rows, -1)
    drawn = TokenTree(*(torch.tensor([c]).expand(rows, -1) for c in columns), logp)
    logits = 10 + torch.tensor(PROBS).log().expand(rows, size + 1, -1)
    return drawn, logits


def first_tokens(rule: object, drawn: TokenTree, logits: Tensor, own: Tensor) -> Tensor:
    """`[3]` shares of the first emitted token over the rows."""
    target_ids = own[:, None].expand(-1, drawn.num_slots)
    judged = rule.judge(verification(drawn, logits, target_ids))  # type: ignore[attr-defined]
    assert int(judged.admitted.sum(1).max()) <= 1
    child = judged.admitted.int().argmax(1)
    first = torch.where(
        judged.admitted.any(1),
        drawn.token_ids.gather(1, child[:, None])[:, 0],
        judged.target_ids[:, 0],
    )
    return torch.bincount(first, minlength=3) / len(first)


def test_released_sampler_is_biased_even_without_relaxation() -> None:
    """q < 1 of children that were not drawn from q: always the first one, TV 0.5 from p."""
    rows = 4000
    drawn, logits = drafted_with(PROBS, rows)
    own = torch.multinomial(
        torch.tensor(PROBS), rows, replacement=True, generator=torch.Generator().manual_seed(1)
    )
    shares = first_tokens(released(theta=1.0), drawn, logits, own)
    assert shares.tolist() == [1.0, 0.0, 0.0]
    assert (shares - torch.tensor(PROBS)).abs().sum() / 2 == pytest.approx(0.5)
    strict = first_tokens(StrictAcceptance(), drawn, logits, own)
    # 4000 rows show a total variation of 0.04 (five standard deviations of one share).
    assert (strict - torch.tensor(PROBS)).abs().max() < 0.04


def test_released_sampler_follows_its_own_law() -> None:
    """min(1, p / q), mass of refused children to the others; 60,000 rows show shares off by 0.01.

    Children 2 and 1, drafted with 0.8 and 0.4: accepted with 0.2 / 0.8, then with
    (0.3 / 0.8) / 0.4; what is left goes to token 0.
    """
    rows = 60_000
    drawn, logits = drafted_with((0.8, 0.4), rows)
    drawn = with_tokens(drawn, [0, 2, 1])
    second = 0.75 * (0.3 / 0.8 / 0.4)
    wanted = torch.tensor([0.75 - second, second, 0.25])
    shares = first_tokens(released(), drawn, logits, torch.zeros(rows, dtype=torch.int64))
    assert (shares - wanted).abs().max() < 0.01
    assert (wanted - torch.tensor(PROBS)).abs().max() > 0.02  # the bias is within its sight


def with_tokens(drawn: TokenTree, tokens: list[int]) -> TokenTree:
    return replace(drawn, token_ids=torch.tensor([tokens]).expand(len(drawn.parent), -1))


def test_released_relaxation_takes_the_first_of_the_two_in_tree_order() -> None:
    drawn, logits = drafted_with((0.9, 0.9), 8)
    flipped, own = with_tokens(drawn, [0, 1, 0]), torch.full((8,), 2)
    assert first_tokens(released(0.9), drawn, logits, own).tolist() == [1.0, 0.0, 0.0]
    assert first_tokens(released(0.9), flipped, logits, own).tolist() == [0.0, 1.0, 0.0]


def test_released_relaxation_without_either_of_the_two_draws_from_the_target() -> None:
    drawn, logits = drafted_with((0.9,), 4)
    third = with_tokens(drawn, [0, 2])
    own = torch.tensor([0, 1, 2, 0])
    judged = released(0.9).judge(verification(third, logits, own[:, None].expand(-1, 2)))
    assert not judged.admitted.any()
    assert judged.target_ids[:, 0].tolist() == own.tolist()


def test_released_ratio_has_no_guard_against_negative_logits() -> None:
    drawn, logits = drafted_with((0.9, 0.9), 4)
    own, below = torch.full((4,), 2), logits - 30
    assert first_tokens(released(1.0), drawn, below, own).tolist() == [1.0, 0.0, 0.0]
    assert first_tokens(rule_of(theta=1.0), drawn, below, own).tolist() == [0.0, 0.0, 1.0]


def test_released_greedy_rows_are_strict() -> None:
    given = verification(CHAIN, logits_of(CHAIN, {0: CLOSE}))
    assert admitted(released(0.5), given) == [2]


def test_released_coins_belong_to_the_request_not_to_its_row() -> None:
    drawn, logits = drafted_with((0.8, 0.6), 64)
    own = torch.zeros(64, dtype=torch.int64)[:, None].expand(-1, 3)
    given = verification(drawn, logits, own)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    shuffled = replace(given, seeds=given.seeds[order])
    one, other = released().judge(given), released().judge(shuffled)
    assert torch.equal(one.admitted[order], other.admitted)
    assert torch.equal(one.target_ids[order], other.target_ids)
    assert len(one.admitted.unique(dim=0)) > 1
