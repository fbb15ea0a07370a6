"""Does a draft go on as the text did before? Longest-suffix matches, for all nodes at once.

    text   the cat sat . the cat ■     node "sat": suffix "the cat sat" occurs, 3 tokens match
                                       node "ran": nothing ends in "cat ran", 0 tokens match

What prompt lookup and suffix decoding draft from (Saxena 2023, "Prompt Lookup Decoding";
arXiv:2411.04975) is here a signal about what a drafter proposed: a path that repeats the text is
accepted more often than its probability says, and its siblings less often.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

RECENT_TOKENS = 64
"""Committed tokens that a draft is compared with."""
SUFFIX_TOKENS = 4
"""Matches are counted up to this length, the node included."""
MAX_COUNT = 4
"""Matches of two tokens or more are counted up to here."""
NO_TEXT = -1
"""Before the text begins, in `recent`."""
_NO_TOKEN = -2


class SuffixMatch(NamedTuple):
    """What the recent text says of C nodes, `[B, C]`; 0 at roots.

    Attributes:
        length: int8, tokens of the longest suffix of text and path, the node the last of them,
            that occurs in the text; at most `SUFFIX_TOKENS`.
        offered: int8, the same of the parent, where some token follows; one less at most.
        support: float32, of the parent's longest matches the share that this token follows; -1
            where the parent matches nothing.
        count: int8, matches of two tokens or more, at most `MAX_COUNT`.
    """

    length: Tensor
    offered: Tensor
    support: Tensor
    count: Tensor


def suffix_match(token_ids: Tensor, parent: Tensor, recent: Tensor, start: int = 0) -> SuffixMatch:
    """Compares every path from pool index `start` on with the text.

    In words: for a node and a place j of the text, the match is the number of tokens that agree
    walking up from the node (parent, ..., root, then back through the text) and back from j.

    Args:
        token_ids, parent: `[B, P]` int64, a pool, root first; empty slots may hold anything.
        recent: `[B, W]` int64, committed tokens, the root last, `NO_TEXT` before they begin.
        start: first node asked about.
    """
    above = _upwards(token_ids, parent, recent, start)
    hit, *behind = (_equal(tokens, recent, steps) for steps, tokens in enumerate(above))
    run = behind[0]
    matched = run.to(torch.int8)
    for longer in behind[1:]:
        run = run & longer
        matched = matched + run
    length = (matched + 1) * hit
    offered = matched.amax(-1)
    longest = (matched == offered[..., None]) & behind[0]
    follows, places = (longest & hit).sum(-1), longest.sum(-1)
    support = (follows / places.clamp(min=1)).masked_fill(places == 0, -1.0)
    count = (length > 1).sum(-1, dtype=torch.int8).clamp(max=MAX_COUNT)
    is_draft = torch.arange(start, token_ids.shape[1], device=recent.device) > 0
    found = (length.amax(-1), offered, support, count)
    return SuffixMatch(*(values * is_draft for values in found))


def _upwards(token_ids: Tensor, parent: Tensor, recent: Tensor, start: int) -> list[Tensor]:
    """`SUFFIX_TOKENS` times `[B, C]`: the node's token, its parent's, ..., the text before the
    root's; `_NO_TOKEN` where the text begins later."""
    rows, last = len(token_ids), recent.shape[1] - 1
    node = torch.arange(start, token_ids.shape[1], device=recent.device).expand(rows, -1)
    before = torch.zeros_like(node)
    found = []
    for _ in range(SUFFIX_TOKENS):
        text = recent.gather(1, (last - before).clamp(min=0))
        text = text.masked_fill(text == NO_TEXT, _NO_TOKEN)
        found.append(torch.where(node == 0, text, token_ids.gather(1, node)))
        before = before + (node == 0)
        node = parent.gather(1, node).clamp(min=0)
    return found


def _equal(tokens: Tensor, recent: Tensor, steps: int) -> Tensor:
    """`[B, C, W]` bool: the text holds this token `steps` before place j."""
    shifted = recent.roll(steps, 1)
    shifted[:, :steps] = NO_TEXT
    return tokens[..., None] == shifted[:, None]


def recent_tokens(texts: list[list[int]], device: torch.device) -> Tensor:
    """`[B, RECENT_TOKENS]` int64: the ends of some texts."""
    ends = [text[-RECENT_TOKENS:] for text in texts]
    rows = [[NO_TEXT] * (RECENT_TOKENS - len(end)) + end for end in ends]
    return torch.tensor(rows, device=device)
