"""A captured round as observers know rounds: copies, since the buffers are the next round's too."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.kernels.tree_build import Pool
from specctl.runtime.graphs.round import Played
from specctl.runtime.graphs.selecting import draft_pool
from specctl.runtime.graphs.state import Rows
from specctl.runtime.observe import Request, RoundRecord, RoundTimes
from specctl.tree import TokenTree


def record_of(
    played: Played,
    before: Rows,
    requests: list[Request],
    *,
    round_idx: Tensor,
    num_emitted: Tensor,
    times: RoundTimes,
) -> RoundRecord:
    """Of the round that was just played.

    Args:
        before: the state that the round began with, copied.
        round_idx, num_emitted: see `RoundRecord`.
    """
    rows, verified = len(requests), played.verified
    assert verified is not None, "the round was not observed"
    tree, at, rules = verified.tree, verified.laid.node_at[:rows], played.part.rules
    pool = played.part.drafting.of_rows(rows)
    copied = Pool(*(column.clone() for column in pool))
    logits = verified.logits[at]
    is_plain = verified.law is verified.logits
    levels = torch.tensor(played.num_levels)
    return RoundRecord(
        requests=requests,
        round_idx=round_idx,
        position=before.positions,
        context_tokens=before.prefix + 1,
        pool=draft_pool(copied),
        offered_depth=levels.to(pool.parent.device, non_blocking=True),
        offered_width=rules.shape.width,
        top_k=rules.shape.top_k,
        submitted=tree.submitted[:rows],
        tree=TokenTree(
            tree.token_ids[:rows],
            tree.parent[:rows],
            tree.depth[:rows],
            tree.draft_logp[:rows],
        ),
        target_logits=logits,
        target_logp_source=logits if is_plain else verified.law[at],
        target_ids=verified.target_ids[:rows],
        path=verified.path[:rows],
        num_emitted=num_emitted,
        times=times,
        policy_digest=rules.digest,
    )
