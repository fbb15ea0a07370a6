"""Rows against a tree checked by hand, and against plain Python on random rounds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.collect import rounds as device
from specctl.collect.rounds import (
    alike,
    order_statistics,
    read_on_device,
    read_on_host,
)
from specctl.collect.rows import join, round_tables, slot_of
from specctl.runtime.requests import RoundRecord, RoundTimes
from specctl.trace import TABLES
from specctl.tree import gather
from tests.collect.rounds import frame_of, make_record, move, padded_tree, random_record

# Drafted, with the joint probability; a star marks what was submitted to the target.
#
#     0* the ─┬─ 1* cat .8 ─┬─ 3* sat .48 ── 5  on .24
#             │             └─ 4  ran .16
#             └─ 2* dog .1
#
# The target says: the -> cat, cat -> sat, dog -> sat, sat -> down. So `on` is wrong.
THE, CAT, DOG, SAT, RAN, ON, DOWN = range(7)
LOGITS = {
    0: [0.0, 4.0, 2.0, 0.0, 0.0, 0.0, 0.0],  # the -> cat, second dog
    1: [0.0, 0.0, 0.0, 5.0, 3.0, 0.0, 0.0],  # cat -> sat, second ran
    2: [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0],  # dog -> sat
    3: [0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 8.0],  # sat -> down, second on
}


def cat_sat(num_emitted: int = 3, offered_depth: int = 3) -> RoundRecord:
    probs = [1.0, 0.8, 0.1, 0.6, 0.2, 0.5]
    return make_record(
        padded_tree(
            [THE, CAT, DOG, SAT, RAN, ON], [-1, 0, 0, 1, 1, 3], [math.log(p) for p in probs]
        ),
        submitted=torch.tensor([[0, 1, 2, 3]]),
        target_ids=torch.tensor([[CAT, SAT, SAT, DOWN]]),
        target_logits=torch.tensor([list(LOGITS.values())]),
        path=torch.tensor([[0, 1, 3, -1]]),
        num_emitted=torch.tensor([num_emitted]),
        offered_depth=torch.tensor([offered_depth]),
        sibling_rank=torch.tensor([[0, 0, 1, 0, 1, 0]]),
        expanded=torch.tensor([[True, True, False, True, False, False]]),
        topk_entropy=torch.tensor([[0.0, 0.1, 0.1, 0.2, 0.2, 0.4]]),
    )


def tables(*records: RoundRecord) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    made = round_tables(join([frame_of(record) for record in records]))
    return made["rounds"].to_pylist(), made["nodes"].to_pylist()


def column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def test_round_row_of_the_hand_checked_tree() -> None:
    (row,), _ = tables(cat_sat())
    assert row["num_drafted"] == 5
    assert row["num_verified"] == 4
    assert row["num_accepted"] == 2
    assert row["num_emitted"] == 3
    assert row["bonus_token_id"] == DOWN
    assert row["root_token_id"] == THE
    assert row["tcr"] == 2  # cat .8, then sat .48, then dog .1
    assert row["fully_accepted"] is False
    assert row["phi_depth"] == 3
    assert row["phi"] == pytest.approx(0.1 + 0.2 + 0.4)
    assert (row["draft_us"], row["other_us"]) == (10.0, 4.0)


def test_tokens_cut_by_the_limit_are_not_on_the_emitted_path() -> None:
    (row,), nodes = tables(cat_sat(num_emitted=1))
    assert (row["num_accepted"], row["num_emitted"]) == (1, 1)
    assert column(nodes, "path_accepted")[:4] == [True, True, False, False]
    assert row["tcr"] == 2  # verification admitted `sat` before the cut


def test_levels_drafted_for_others_of_the_batch_are_not_written() -> None:
    (row,), nodes = tables(cat_sat(offered_depth=2))
    assert column(nodes, "node_idx") == [0, 1, 2, 3, 4]
    assert column(nodes, "expanded") == [True, True, False, False, False]
    assert row["num_drafted"] == 4
    assert row["fully_accepted"] is True
    assert (row["phi_depth"], row["phi"]) == (2, pytest.approx(0.1 + 0.2))


def test_equal_scores_rank_the_earlier_node_first() -> None:
    record = cat_sat()
    tied = record.pool._replace(joint_logp=torch.tensor([[0.0, -1.0, -1.0, -1.0, -2.0, -2.0]]))
    _, nodes = tables(replace(record, pool=tied))
    assert column(nodes, "confidence_rank") == [None, 1, 2, 3, None, None]


@pytest.mark.parametrize("seed", [8, 15, 19, 24])  # between them they accept 0, 1, 2 and 3
def test_rows_equal_plain_python(seed: int) -> None:
    record = random_record(["a", "b", "c"], seed=seed, vocabulary=5)
    rounds, nodes = tables(record)
    assert any(row["num_accepted"] for row in rounds)
    assert any(node["node_match"] is None for node in nodes if node["depth"]), "none is censored"
    expected = [node for row in range(3) for node in plain_nodes(record, row)]
    for name in expected[0]:
        assert column(nodes, name) == pytest.approx(column(expected, name), abs=1e-5), name


def plain_nodes(record: RoundRecord, row: int) -> list[dict[str, Any]]:
    """The censoring and ranking rules of docs/trace-format.md, one node at a time."""
    tree = record.pool
    submitted = record.submitted[row].tolist()
    joint = record.pool.joint_logp[row].tolist()
    order = sorted(submitted[1:], key=lambda node: (-joint[node], node))
    emitted = [submitted[step] for step in record.path[row].tolist() if step >= 0]
    emitted = emitted[: int(record.num_emitted[row]) + 1]
    rows = []
    for node in range(tree.num_slots):
        up, token = int(tree.parent[row, node]), int(tree.token_ids[row, node])
        seen, verified = up in submitted, node in submitted
        logits = record.target_logits[row, submitted.index(up)].tolist() if seen else []
        first, second = sorted(logits, reverse=True)[:2] if seen else (0.0, 0.0)
        total = math.log(sum(math.exp(value) for value in logits)) if seen else 0.0
        rows.append(
            {
                "node_idx": node,
                "parent_idx": up,
                "verified": verified,
                "confidence_rank": order.index(node) + 1 if node in order else None,
                "node_match": logits.index(first) == token if seen else None,
                "path_accepted": node in emitted if verified else None,
                "target_logp": logits[token] - total if seen else None,
                "target_rank": 1 + sum(v > logits[token] for v in logits) if seen else None,
                "target_top1_logit": first if seen else None,
                "target_top2_logit": second if seen else None,
                "target_margin": first - second if seen else None,
                "target_ratio": second / first if seen else None,
            }
        )
    return rows


def test_rounds_of_different_sizes_join_without_changing_a_row() -> None:
    small = random_record(["a"], seed=1, depth=2, num_tokens=5, vocabulary=5)
    large = random_record(["b", "c"], seed=2, depth=4, num_tokens=9, vocabulary=5)
    together = tables(small, large)
    apart = [tables(small), tables(large)]
    assert together == (apart[0][0] + apart[1][0], apart[0][1] + apart[1][1])


@pytest.mark.parametrize("vocabulary", [2, 17, 1024, 1500, 2049])
def test_order_statistics_equal_plain_counts(vocabulary: int) -> None:
    draw = torch.Generator().manual_seed(vocabulary)
    logits = torch.randint(-4, 5, (10, vocabulary), generator=draw).float()  # many ties
    children = torch.randint(-6, 6, (10, 3), generator=draw).float()
    children[0] = float("inf")  # a leaf: nothing was drafted below it
    children[4, 1:] = -100.0  # all logits are larger: the counts that could overflow a byte
    top1, top2, larger = order_statistics(logits, children)
    assert torch.equal(torch.stack([top1, top2], 1), logits.topk(2, 1).values)
    assert torch.equal(larger, (logits[:, None] > children[..., None]).sum(-1))


@pytest.mark.parametrize("warped", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_a_device_reads_is_what_the_host_reads(seed: int, *, warped: bool) -> None:
    record = random_record(["a", "b", "c"], seed=seed, vocabulary=5)
    if warped:
        logits = record.target_logits
        cut = (logits / 0.7).masked_fill(logits < 0, float("-inf"))
        record = replace(record, processed=cut)
    tree, submitted = record.pool, record.submitted
    parent_slot = gather(slot_of(submitted, tree.num_slots), tree.parent, -1)
    seen, slot = parent_slot >= 0, parent_slot.clamp(min=0)
    nodes = tree.token_ids, record.pool.sibling_rank
    here, there = (read([record], seen, slot, *nodes) for read in (read_on_host, read_on_device))
    assert 10 < int(seen.sum()) < seen.numel()
    for mine, theirs in zip(here, there, strict=True):
        torch.testing.assert_close(theirs[seen], mine[seen], rtol=0, atol=1e-6)


def test_sampled_law_is_logged_not_the_raw_one() -> None:
    record = cat_sat()
    cut = record.target_logits.masked_fill(record.target_logits < 3.0, float("-inf"))
    _, nodes = tables(replace(record, processed=cut))
    assert nodes[1]["target_logp"] == 0.0
    assert nodes[2]["target_logp"] == -math.inf
    assert nodes[2]["target_rank"] == 2  # ranks stay those of the raw logits


@pytest.mark.cuda
def test_rows_on_cuda_equal_rows_on_the_cpu() -> None:
    record = random_record(["a", "b"], seed=8, vocabulary=5)
    moved = move(record, torch.device("cuda"))
    for mine, theirs in zip(tables(moved), tables(record), strict=True):
        for name in mine[0]:
            assert column(mine, name) == pytest.approx(column(theirs, name), abs=1e-5), name


def test_stacked_rounds_give_the_rows_of_each() -> None:
    ends = RoundTimes(1.0, 2.0, 3.0, 4.0)
    shallow = cat_sat(num_emitted=2)
    shallow = replace(shallow, path=shallow.path[:, :3], round_idx=torch.tensor([1]))
    late = replace(cat_sat(num_emitted=1), times=ends, round_idx=torch.tensor([2]))
    sampled = replace(cat_sat(), processed=shallow.target_logits * 2)
    records = [cat_sat(), shallow, late, replace(sampled, round_idx=torch.tensor([3]))]
    groups = list(alike(records))
    assert [len(group) for group in groups] == [3, 1], "greedy rounds apart from sampled ones"
    one_by_one = round_tables(join([frame_of(record) for record in records]))
    together = round_tables(join([frame_of(*group) for group in groups]))
    for table in TABLES:
        assert together[table].equals(one_by_one[table])


def test_large_logits_are_not_copied_into_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "MAX_STACK_BYTES", 2 * cat_sat().target_logits.nbytes)
    groups = list(alike([cat_sat() for _ in range(5)]))
    assert [len(group) for group in groups] == [2, 2, 1]
