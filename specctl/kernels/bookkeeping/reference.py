"""Torch implementation of `bookkeeping`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from specctl.kernels.bookkeeping import FACTS, Laid, Opened, Settled, Walked
from specctl.kernels.tree_build import WORD_BITS, BuiltTree
from specctl.tree import PAD, ROOT, DraftPool


def open_tree(pool: DraftPool, root_ids: Tensor, vacant: Tensor, opened: Opened) -> None:
    pool.parent.fill_(PAD)
    pool.joint_logp.fill_(float("-inf"))
    pool.each(lambda column: column[:, 0].zero_())
    pool.token_ids[:, 0] = root_ids
    pool.parent[:, 0] = ROOT
    opened.slots[:, 0] = 0
    opened.keep[:, 0] = ~vacant


def open_level(
    pool: DraftPool,
    slots: Tensor,
    keep: Tensor,
    vacant: Tensor,
    stable: Tensor,
    above: Tensor | None,
    opened: Opened,
    start: int,
    top_k: int,
    depth: int,
    behind: int,
) -> None:
    width, num_words = slots.shape[1], opened.words.shape[2]
    parent = (slots - start) // top_k if depth > 1 else torch.zeros_like(slots)
    entry = behind + torch.arange(width, device=slots.device)
    own = _own_words(entry, num_words).expand(len(slots), -1, -1)
    if above is not None and depth > 1:
        own = own | above.gather(1, parent[..., None].expand(-1, -1, num_words))
    opened.slots[:, :width] = slots
    opened.keep[:, :width] = keep & ~vacant[:, None]
    opened.token_ids[:, :width] = pool.token_ids.gather(1, slots)
    opened.parent[:, :width] = parent
    opened.words[:, :width] = own
    opened.position_ids[:, :width] = stable[:, None] + (depth - 1)
    opened.place[:, :width] = stable[:, None] + entry


def _own_words(entry: Tensor, num_words: int) -> Tensor:
    """`[W, words]` int32: the bit of each entry alone."""
    words = torch.arange(num_words, device=entry.device)
    own = torch.ones_like(entry, dtype=torch.int32) << (entry % WORD_BITS).int()
    return own[:, None] * (entry[:, None] // WORD_BITS == words).int()


def lay_out(
    tree: BuiltTree, prefix: Tensor, positions: Tensor, num_tokens: int, last_place: int
) -> Laid:
    rows, columns = tree.parent.shape
    offsets = pad(tree.num_nodes.cumsum(0), (1, 0))
    slots, steps = (torch.arange(n, device=prefix.device) for n in (num_tokens, columns))
    is_token = slots < offsets[-1]
    row = torch.searchsorted(offsets[1:], slots, right=True).clamp(max=rows - 1)
    column = (slots - offsets[row]).clamp(max=columns - 1)
    row, column = row * is_token, column * is_token

    def packed(values: Tensor) -> Tensor:
        return values[row, column] * is_token.view(-1, *[1] * (values.ndim - 2)).to(values.dtype)

    return Laid(
        offsets=offsets,
        row=row,
        place=torch.where(is_token, prefix[row] + column, last_place),
        token_ids=packed(tree.token_ids),
        position_ids=packed(tree.position_ids),
        positions=packed(positions[:, None] + tree.depth),
        words=packed(tree.ancestor_bits),
        node_at=(offsets[:-1, None] + steps).clamp(max=num_tokens - 1),
    )


def settle(found: Walked, settled: Settled) -> None:
    rows, steps = found.path.shape
    count = (found.path >= 0).sum(1)
    slots = torch.arange(found.node_at.shape[1], device=count.device)
    finite = found.best.isfinite()[found.node_at] | (slots >= found.num_nodes[:, None])
    facts = (
        count,
        found.num_nodes,
        found.depth.masked_fill(found.parent <= PAD, 0).amax(1),
        found.faulty.long(),
        finite.all(1).long(),
        (found.submitted >= 0).sum(1),
    )
    settled.outcome[:rows, : len(FACTS)] = torch.stack(facts, 1)
    settled.outcome[:rows, len(FACTS) :] = found.token_ids
    settled.path[:rows] = found.path
    settled.path_at[:rows] = found.node_at.gather(1, found.path.clamp(min=0))
    read_ids, last = found.token_ids.clamp(min=0), (count - 1).clamp(min=0)
    settled.read_ids[:rows] = read_ids
    settled.read_place[:rows] = found.stable[:, None] + torch.arange(steps, device=count.device)
    settled.last[:rows] = last
    settled.next_root[:rows] = read_ids.gather(1, last[:, None])[:, 0]
