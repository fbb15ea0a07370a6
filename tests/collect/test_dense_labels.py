"""Labels and rows of a hand-worked text, its end included.

text    7 │ 1 2 3        prompt 7, response 1 2 3; two trees, of 1 and of 2
target  after 1: 2 likeliest; after 2: 3; after 3: 0

tree of 1   1 ┬ 2 ┬ 3 ─ 5      2, 3 on the path; 5: the text ended, unknown
              │   └ 4          4: the target said 3
              └ 6 ─ 2          6 off the path, so 2 too
tree of 2   2 ─ 3 ┬ 0          3 on the path; below it the text ended
                  └ 1
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specctl.collect.dense.labels import (
    NO_TOKEN,
    TargetDistributions,
    continuations,
    label_paths,
    target_distributions,
)
from specctl.collect.dense.trees import columns_of
from specctl.collect.rows import dense_tables
from specctl.policy import FullTree
from specctl.runtime.requests import Request, Sampling
from specctl.tree import PAD, DraftPool, TokenTree
from tests.trees import joint_logp

TEXT = torch.tensor([7, 1, 2, 3])
ROOTS = range(1, 3)
REQUEST = Request("p/0", (7,), 8, "p", "code", 0)
DIGEST = "sha256:" + "cd" * 32
TREE = TokenTree(
    token_ids=torch.tensor([[1, 2, 6, 3, 4, 2, 5], [2, 3, 9, 0, 1, 9, 9]]),
    parent=torch.tensor([[-1, 0, 0, 1, 1, 2, 3], [-1, 0, PAD, 1, 1, PAD, PAD]]),
    depth=torch.tensor([[0, 1, 1, 2, 2, 2, 3]] * 2),
    draft_logp=torch.tensor([[0.0, -0.5, -1, -0.1, -2.5, -0.2, -0.3]] * 2),
)


def logits_after_each_token() -> Tensor:
    """Of the distributions after text tokens 1, 2 and 3: `[3, 8]`."""
    rows = torch.zeros(3, 8)
    rows[0, [2, 6]] = torch.tensor([4.0, 2.0])
    rows[1, [3, 4]] = torch.tensor([3.0, 1.0])
    rows[2, [0, 5]] = torch.tensor([5.0, 4.0])
    return rows


def targets(sampling: Sampling | None = None) -> TargetDistributions:
    return target_distributions(1, logits_after_each_token(), sampling or Sampling())


POOL = DraftPool(
    *TREE,
    joint_logp(TREE),
    torch.full((2, 7), 0.25),
    torch.full((2, 7), 0.125),
    torch.tensor([[0, 0, 1, 0, 1, 0, 0]] * 2),
    torch.tensor([[True, True, True, True, False, False, False], [True, True] + [False] * 5]),
)
LABELS = label_paths(TREE, continuations(TEXT, ROOTS, 3))


def rows_of(table: str, sampling: Sampling | None = None) -> dict[str, list[object]]:
    columns = {"text": TEXT, **columns_of(ROOTS, POOL, LABELS, targets(sampling))}
    tables = dense_tables(REQUEST, ROOTS, columns, FullTree(depth=3, top_k=2), DIGEST)
    found: dict[str, list[object]] = tables[table].to_pydict()
    return found


def test_below_an_unknown_node_all_is_unknown() -> None:
    parent, depth = torch.tensor([[-1, 0, 1, 2]]), torch.tensor([[0, 1, 2, 3]])
    tree = TokenTree(torch.tensor([[1, 2, 4, 4]]), parent, depth, torch.zeros(1, 4))
    labels = label_paths(tree, torch.tensor([[2, NO_TOKEN, NO_TOKEN]]))
    assert labels.unknown.tolist() == [[False, False, True, True]]
    assert labels.judged.tolist() == [[False, True, True, False]]


def test_rounds_are_those_of_the_hand_worked_text() -> None:
    rows = rows_of("rounds")
    wanted = {
        "round_idx": [0, 1],
        "position": [1, 2],
        "context_tokens": [2, 3],
        "root_token_id": [1, 2],
        "bonus_token_id": [None, None],  # both paths reach the end of the text
        "num_drafted": [6, 3],
        "num_verified": [3, 2],
        "num_accepted": [2, 1],
        "num_emitted": [2, 1],
        "fully_accepted": [False, False],
        "offered_depth": [3, 3],
        "offered_width": [2, 2],
        "top_k": [2, 2],
        "tcr": [None, None],
        "phi": [None, None],
        "phi_depth": [None, None],
        "kind": ["dense", "dense"],
        "prompt_id": ["p", "p"],
        "policy_digest": [DIGEST, DIGEST],
        "verify_us": [None, None],
        "batch_size": [None, None],
    }
    assert {name: rows[name] for name in wanted} == wanted


def test_nodes_are_those_of_the_hand_worked_text() -> None:
    rows = rows_of("nodes")
    seen = LABELS.judged[TREE.valid].tolist()
    yes, no, none = True, False, None
    wanted = {
        "round_idx": [0] * 7 + [1] * 4,
        "node_idx": [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3],
        "parent_idx": [-1, 0, 0, 1, 1, 2, 3, -1, 0, 1, 1],
        "depth": [0, 1, 1, 2, 2, 2, 3, 0, 1, 2, 2],
        "token_id": [1, 2, 6, 3, 4, 2, 5, 2, 3, 0, 1],
        "expanded": [yes, yes, yes, yes, no, no, no, yes, yes, no, no],
        "path_accepted": [yes, yes, no, yes, no, no, none, yes, yes, none, none],
        "node_match": [none, yes, no, yes, no, none, none, none, yes, none, none],
        "verified": [yes, yes, no, yes, no, no, no, yes, yes, no, no],
        "confidence_rank": [none] * 11,
        "target_rank": [none, 1, 2, 1, 2, none, 2, none, 1, 1, 3],
        "target_top1_logit": [none, 4, 4, 3, 3, none, 5, none, 3, 5, 5],
        "target_top2_logit": [none, 2, 2, 1, 1, none, 4, none, 1, 4, 4],
        "target_margin": [none, 2, 2, 2, 2, none, 1, none, 2, 1, 1],
    }
    assert {name: rows[name] for name in wanted} == wanted
    for name in rows:
        if name.startswith("target_"):
            assert [value is not None for value in rows[name]] == seen, name


def test_log_probabilities_are_those_that_were_drawn_from() -> None:
    """Raw when greedy; under temperature 2 and top-k 2 two tokens share all of the mass."""
    raw = rows_of("nodes")
    total = math.exp(4) + math.exp(2) + 6
    assert raw["target_logp"][1] == pytest.approx(4 - math.log(total))
    drawn = rows_of("nodes", Sampling(temperature=2.0, top_k=2))
    best = 1 / (1 + math.exp(-1))
    assert drawn["target_logp"][1:3] == pytest.approx([math.log(best), math.log(1 - best)])
    entropy = -best * math.log(best) - (1 - best) * math.log(1 - best)
    assert drawn["target_entropy"][1] == pytest.approx(entropy)
    assert drawn["target_logp"][10] == -math.inf  # token 1 after text token 3 was cut
    assert drawn["target_rank"] == raw["target_rank"]  # ranks and logits are raw
