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
from torch.nn.functional import pad

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
        repeats: int8, matches of two tokens or more, at most `MAX_COUNT`.
    """

    length: Tensor
    offered: Tensor
    support: Tensor
    repeats: Tensor


def suffix_match(token_ids: Tensor, parent: Tensor, recent: Tensor, start: int = 0) -> SuffixMatch:
    """Compares every path from pool index `start` on with the text.

    In words: for a node and a place j of the text, the match is the number of tokens that agree
    walking up from the node (parent, ..., root, then back through the text) and back from j.

    Args:
        token_ids, parent: `[B, P]` int64, a pool, root first (its token is read from `recent`);
            empty slots may hold anything.
        recent: `[B, W]` int64, committed tokens, the root last, `NO_TEXT` before they begin.
        start: first node asked about.
    """
    above = _upwards(token_ids, parent, recent, start)
    hit, run, *longer = (_equal(above[..., k], recent, k) for k in range(SUFFIX_TOKENS))
    behind, matched = run, run.to(torch.int8)
    for one_more in longer:
        run = run & one_more
        matched += run
    length = (matched + 1) * hit
    offered = matched.amax(-1)
    longest = (matched == offered[..., None]) & behind
    follows, places = (longest & hit).sum(-1), longest.sum(-1)
    support = torch.where(places > 0, follows / places, -1.0)
    repeats = (length > 1).sum(-1, dtype=torch.int8).clamp(max=MAX_COUNT)
    found = SuffixMatch(length.amax(-1), offered, support, repeats)
    if start == 0:
        for values in found:
            values[:, 0] = 0
    return found


def _upwards(token_ids: Tensor, parent: Tensor, recent: Tensor, start: int) -> Tensor:
    """`[B, C, SUFFIX_TOKENS]`: the node's token, its parent's, ..., and on through the text before
    the root; `_NO_TOKEN` where that begins later."""
    tail = SUFFIX_TOKENS - 1  # more than these are never reached: the path has its root at least
    text = recent[:, -SUFFIX_TOKENS:]  # its last is the root, whose token a pool need not hold
    tokens = torch.cat([text.masked_fill(text == NO_TEXT, _NO_TOKEN), token_ids[:, 1:]], 1)
    # A root's parent is -1, which is the last token of the text.
    before = torch.arange(tail, device=recent.device) - tail - 1
    above = (torch.cat([before.expand(len(recent), -1), parent], 1) + tail).clamp(min=0)
    nodes = [
        torch.arange(start + tail, tokens.shape[1], device=recent.device).expand(len(recent), -1)
    ]
    for _ in range(tail):
        nodes.append(above.gather(1, nodes[-1]))
    return torch.stack([tokens.gather(1, node) for node in nodes], -1)


def _equal(tokens: Tensor, recent: Tensor, steps: int) -> Tensor:
    """`[B, C, W]` bool: the text holds the token `steps` before place j."""
    width = recent.shape[1]
    return tokens[..., None] == pad(recent, (steps, 0), value=NO_TEXT)[:, None, :width]


def recent_tokens(texts: list[list[int]], device: torch.device) -> Tensor:
    """`[B, RECENT_TOKENS]` int64: the ends of some texts."""
    ends = [text[-RECENT_TOKENS:] for text in texts]
    rows = [[NO_TEXT] * (RECENT_TOKENS - len(end)) + end for end in ends]
    return torch.tensor(rows, device=device)
