"""The feature registry: values on hand-made pools, identity of a choice of names."""

from __future__ import annotations

from itertools import cycle, islice, takewhile

import pytest
import torch

from specctl.errors import UsageError
from specctl.features import (
    COPIED_LEVELS,
    NODE_FEATURES,
    RECENT_TOKENS,
    SUFFIX_TOKENS,
    features_digest,
    needs_text,
    node_features,
    recent_tokens,
)
from specctl.policy import StaticTree, build_shape
from specctl.policy.growing import Growth
from specctl.policy.rules import Frontier
from specctl.tree import Children, DraftPool
from tests.policy.drafts import grow, hand_law
from tests.trees import joint_logp

CPU = torch.device("cpu")
DRAFT = [name for name, feature in NODE_FEATURES.items() if not feature.reads_text]
TEXT = [name for name in NODE_FEATURES if name not in DRAFT]


def hand_pool() -> DraftPool:
    pool, _, _ = grow(build_shape(StaticTree(depth=2, top_k=2, num_tokens=7)), [hand_law])
    return pool


def test_values_are_what_the_names_say() -> None:
    pool = hand_pool()
    values = dict(zip(DRAFT, node_features(pool, DRAFT).unbind(-1), strict=True))
    assert values["depth"][0].tolist() == [0, 1, 1, 2, 2, 2, 2]
    assert values["sibling_rank"][0].tolist() == [0, 0, 1, 0, 1, 0, 1]
    expected = torch.tensor([1.0, 0.6, 0.3, 0.36, 0.18, 0.24, 0.03])
    torch.testing.assert_close(values["joint_prob"][0], expected)
    torch.testing.assert_close(values["joint_logp"], joint_logp(pool), rtol=0, atol=0)
    assert float(values["parent_entropy"][0, 1]) == float(values["parent_entropy"][0, 2])
    # Four tokens in all: the top 10 are the whole vocabulary.
    torch.testing.assert_close(values["parent_entropy"], values["parent_topk_entropy"])
    assert pool.expanded[0].tolist() == [True, True, True] + [False] * 4


def test_a_level_has_the_values_that_it_has_in_the_whole_pool() -> None:
    pool = hand_pool()._replace(copied=torch.arange(7)[None])
    names = list(NODE_FEATURES)
    whole, level = node_features(pool, names), node_features(pool, names, 3)
    torch.testing.assert_close(level, whole[:, 3:], rtol=0, atol=0)
    assert level.shape == (1, 4, len(names))


def copied_by_hand(text: list[int], path: list[int]) -> int:
    """The copy by loops over the places of the text; `path` behind its last token."""
    text, best = text[-RECENT_TOKENS:], (0, -1)
    # Of a whole window the first places are not looked at: no whole match fits before them.
    first = max(0, len(text) - RECENT_TOKENS + SUFFIX_TOKENS - 1)
    for place in range(first, len(text) - 1):
        agree = zip(text[place::-1], text[::-1], strict=False)
        length = len(list(takewhile(lambda pair: pair[0] == pair[1], agree)))
        best = max(best, (min(length, SUFFIX_TOKENS), place))
    length, place = best
    follows = list(islice(cycle(text[place + 1 :]), COPIED_LEVELS))
    agree = [a == b for a, b in zip(path, follows, strict=False)]
    if len(path) > COPIED_LEVELS or not all(agree[:-1]):
        return 0
    return length if all(agree) else -length


@pytest.mark.parametrize("length", [1, 5, 8, 40, 63, 64, 100])
def test_copies_equal_those_found_by_loops(length: int) -> None:
    """Chains and trees of three tokens, grown level by level as a round does."""
    generator = torch.Generator().manual_seed(length)
    texts = torch.randint(2, (6, length), generator=generator).tolist()
    growth = Growth(torch.tensor([t[-1] for t in texts]), 1 + 18 * 6, recent_tokens(texts, CPU))
    paths: list[list[list[int]]] = [[[]] for _ in texts]
    frontier = Frontier(torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1, dtype=torch.bool))
    for depth in range(1, 19):
        width = frontier.index.shape[1]
        ids = torch.stack([torch.randperm(3, generator=generator) for _ in range(6 * width)])
        ids, zeros = ids.view(6, width, 3), torch.zeros(6, width)
        pool = growth.append(frontier, Children(ids, -ids.float(), zeros, zeros)).pool
        level = [
            [[*path, token] for path, tokens in zip(above, new, strict=True) for token in tokens]
            for above, new in zip(paths, ids.tolist(), strict=True)
        ]
        found = pool.copied
        assert found is not None
        wanted = [[copied_by_hand(t, p) for p in row] for t, row in zip(texts, level, strict=True)]
        assert found[:, growth.level.start :].tolist() == wanted, depth
        # Go on below the copy, where there is one, and below another node.
        places = [(max(range(len(row)), key=row.__getitem__), 0) for row in wanted]
        frontier = Frontier(torch.tensor(places) + growth.level.start, torch.ones(6, 2) > 0)
        paths = [[row[place] for place in two] for row, two in zip(level, places, strict=True)]


def test_features_of_the_text_are_refused_where_the_text_is_not_known() -> None:
    assert needs_text([*DRAFT, TEXT[0]])
    assert not needs_text(DRAFT)
    with pytest.raises(UsageError, match=r"recent text.*collect dense traces"):
        node_features(hand_pool(), ["depth", TEXT[0]])


def test_a_digest_names_an_ordered_choice_and_the_window_of_a_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert features_digest(["depth", "phi"]) != features_digest(["phi", "depth"])
    before = features_digest(["depth"]), features_digest(TEXT)
    monkeypatch.setattr("specctl.features.RECENT_TOKENS", RECENT_TOKENS + 1)
    assert features_digest(["depth"]) == before[0]
    assert features_digest(TEXT) != before[1]


@pytest.mark.parametrize("use", [features_digest, lambda names: node_features(None, names)])
def test_an_unknown_name_is_refused(use: object) -> None:
    with pytest.raises(UsageError, match="are none of"):
        use(["depth", "mood"])
