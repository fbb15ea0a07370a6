"""Attention over cached text and draft trees of several requests, in transformers' interface.

Every forward of a model loaded with `attn_implementation=ATTENTION` states the visibility of its
tokens in the option `reads`: a `Pass` over nodes of draft trees or emitted text, or a `Prompt`. A
forward without it fails, where a default causal mask would silently give wrong text.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from specctl.errors import InvariantError, ModelConfigError
from specctl.kernels.dispatch import current, runs_fused
from specctl.kernels.tree_attention import pack_ancestors, tree_attention

ATTENTION = "specctl_tree"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True)
class Prompt:
    """Text read into one slot: causal, behind `before` entries."""

    before: int = 0


@dataclass
class Pass:
    """T tokens of B requests, packed end to end: nodes of draft trees, or text.

    Request b occupies slot b. Its tokens see the slot's first `prefixes[b]` entries; `words` or
    `visible` state which of the entries behind them, the tail, each token sees.
    """

    token_ids: Tensor
    position_ids: Tensor
    row: Tensor
    place: Tensor
    """`[T]` int64 each; `row` is the request of a token, `place` the slot entry that it writes."""
    prefixes: Tensor  # `[B]` int64
    offsets: Tensor  # `[B + 1]` int64, where each request's tokens start
    max_nodes: int  # tokens of the largest request
    behind: int  # tail entries written by earlier passes
    width: int
    """Entries of a slot that attention may cover; exactly those up to the end of the tail in an
    exact pass of one request."""
    words: Tensor | None = None  # `[T, W]` int32, see `kernels.tree_attention.pack_ancestors`
    visible: Tensor | None = None  # `[T, behind + max_nodes]` bool, in place of `words`
    exact: bool = False
    """All sizes are known on the host, so torch's attention may run; in a captured pass only the
    device knows them."""
    _elsewhere: dict[torch.device, Pass] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device) -> Pass:
        """A copy on another device, made once."""
        if device == self.row.device:
            return self
        if device not in self._elsewhere:
            given = {one.name: getattr(self, one.name) for one in fields(self)}
            moved: Any = {k: v.to(device) for k, v in given.items() if isinstance(v, Tensor)}
            self._elsewhere[device] = replace(self, _elsewhere={}, **moved)
        return self._elsewhere[device]

    @property
    def num_rows(self) -> int:
        return len(self.prefixes)

    @property
    def size(self) -> tuple[int, int]:
        """B and the tokens of each request, of an even pass."""
        return self.num_rows, self.max_nodes

    @cached_property
    def is_even(self) -> bool:
        """Whether all requests have the same number of tokens."""
        return len(self.row) == self.num_rows * self.max_nodes

    @cached_property
    def by_kernel(self) -> bool:
        """Whether the tree-attention op attends, rather than torch under a dense mask."""
        return not self.exact or runs_fused("tree_attention", self.token_ids)

    @cached_property
    def packed_words(self) -> Tensor:
        """`words`, packed from `visible` if only that was given."""
        if self.words is None:
            assert self.visible is not None
            self.words = pack_ancestors(self.visible)
        return self.words

    @cached_property
    def columns(self) -> Tensor:
        """`[T]` int64: place of each token in a table of `[B * max_nodes]`."""
        steps = torch.arange(len(self.row), device=self.row.device)
        return self.row * self.max_nodes + steps - self.offsets[self.row]

    @cached_property
    def mask(self) -> Tensor | None:
        """`[B, 1, max_nodes, width]` bool; padding sees everything, which keeps it finite.

        None for a single token: nothing is masked.
        """
        if len(self.row) == 1 and not self.behind:
            return None
        device, visible, size = self.row.device, self.visible, self.behind + self.max_nodes
        tail = torch.arange(size, device=device)
        if visible is None:
            assert self.words is not None
            visible = (self.words[:, tail // 32] >> (tail % 32) & 1).bool()
        if self.exact and self.num_rows == 1:  # attention ends where the tail does
            return F.pad(visible, (self.width - size, 0), value=True)[None, None]
        prefix = self.prefixes[self.row][:, None]
        mask = torch.arange(self.width, device=device) < prefix
        mask.scatter_(1, prefix + tail, visible)
        if not self.is_even:
            padded = mask.new_ones(self.num_rows * self.max_nodes, self.width)
            padded[self.columns] = mask
            mask = padded
        return mask.view(self.num_rows, 1, self.max_nodes, self.width)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None = None
    ) -> Tensor:
        """Attention of each token over its visible entries: `[1, T, Hq, D]` contiguous.

        Args:
            query: `[1, Hq, T, D]`. keys, values: `[B, Hkv, width, D]`, heads not repeated.
        """
        _, num_heads, _, dim = query.shape
        if self.by_kernel:
            found = tree_attention(
                query[0].transpose(0, 1),
                keys,
                values,
                self.prefixes,
                self.offsets,
                self.packed_words,
                scaling=dim**-0.5 if scaling is None else scaling,
                max_nodes=self.max_nodes,
                behind=self.behind,
            )
            return found[None]
        rows, nodes, table = len(keys), self.max_nodes, query
        if rows > 1:
            if not self.is_even:
                table = query.new_zeros(num_heads, rows * nodes, dim)
                table[:, self.columns] = query[0]
            table = table.view(num_heads, rows, nodes, dim).transpose(0, 1)
        grouped = num_heads != keys.shape[1]
        if is_slow(table):
            found = attend_by_products(table, keys, values, self.mask, scaling)
        else:
            found = F.scaled_dot_product_attention(
                table, keys, values, attn_mask=self.mask, scale=scaling, enable_gqa=grouped
            )
        found = found.transpose(1, 2)
        if rows == 1:
            return found
        found = found.reshape(1, rows * nodes, num_heads, dim)
        return found if self.is_even else found[:, self.columns]


@dataclass
class PassTables:
    """Tensors that depend on sizes alone, cached: in a graph each would cost a launch a round.

    Each key of a graph runs once before its capture, so none is made while recording.
    """

    device: torch.device
    _made: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)

    def rows(self, num_rows: int, num_each: int) -> Tensor:
        """`[B * n]` int64: the request of each token, with n tokens a request."""
        return self._get("rows", num_rows, num_each)

    def steps(self, size: int) -> Tensor:
        """`[size]` int64: 0, 1, 2, ..."""
        return self._get("rows", size, 1)

    def offsets(self, num_rows: int, num_each: int) -> Tensor:
        """`[B + 1]` int64: starts of requests with n tokens each, and the end."""
        return self._get("offsets", num_rows, num_each)

    def causal_words(self, num_rows: int, num_each: int) -> Tensor:
        """`[B * n, words]` int32: each of n new tokens sees itself and the ones before it."""
        return self._get("causal", num_rows, num_each)

    def _get(self, kind: str, rows: int, each: int) -> Tensor:
        key = (kind, rows, each)
        if key not in self._made:
            if kind == "rows":
                made = torch.arange(rows * each) // each
            elif kind == "offsets":
                made = torch.arange(rows + 1) * each
            else:
                made = pack_ancestors(torch.ones(each, each, dtype=torch.bool).tril())
                made = made.repeat(rows, 1)
            self._made[key] = made.to(self.device)
        return self._made[key]


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    reads: Pass | Prompt | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention: `[1, T, Hq, D]` contiguous, and no weights.

    Args:
        query: `[1, Hq, T, D]`. key, value: `[B, Hkv, S, D]`, heads not repeated.
        reads: visibility of the tokens.
    """
    del dropout, attention_mask
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise ModelConfigError(
                f"attention of {type(module).__name__} has option {name}, which this runtime "
                "would compute wrongly; use another model"
            )
    if reads is None:
        raise InvariantError(
            f"{type(module).__name__} does not pass its model's option 'reads' to attention",
            hint="report this model",
        )
    if isinstance(reads, Pass):
        with current(query.device):
            return reads.on(query.device).attend(query, key, value, scaling), None
    return attend_prompt(query, key, value, reads, scaling).transpose(1, 2).contiguous(), None


def is_slow(query: Tensor) -> bool:
    """Whether torch's attention takes longer for `[B, Hq, N, D]` than the two products it fuses.

    On a CPU it is slow where a request has few queries of bfloat16: 64 requests of one token over
    300 entries took 20 ms, and the products 1.4 (torch 2.13, AMD EPYC, 1 thread).
    """
    few = query.shape[2] <= 32
    return few and query.dtype == torch.bfloat16 and query.device.type == "cpu"


def attend_by_products(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Attention `[B, Hq, N, D]` with its softmax in float32.

    Args:
        query: `[B, Hq, N, D]`. keys, values: `[B, Hkv, S, D]`, heads not repeated.
        mask: `[B, 1, N, S]` bool, true where a query sees an entry.
        scaling: of the products, by default D ** -0.5.
    """
    rows, num_heads, size, dim = query.shape
    num_kv = keys.shape[1]
    groups = query.reshape(rows, num_kv, num_heads // num_kv * size, dim)
    # Keys stand first: as the second factor a part of the cache is copied.
    scores = (keys @ groups.mT).mT.float().contiguous().view(rows, num_heads, size, -1)
    scores *= dim**-0.5 if scaling is None else scaling
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    weights = scores.softmax(-1).to(values.dtype).view(rows, num_kv, groups.shape[2], -1)
    return (weights @ values).view(rows, num_heads, size, dim)


def attend_prompt(
    query: Tensor, key: Tensor, value: Tensor, reads: Prompt, scaling: float | None = None
) -> Tensor:
    """`[1, Hq, T, D]`: causal attention of one text's next tokens.

    At the start of a text no mask is made: a mask leaves only torch's slowest kernel for grouped
    heads, and 8,000 tokens then need tens of gigabytes.
    """
    mask, grouped = None, query.shape[1] != key.shape[1]
    if reads.before:
        size = query.shape[2]
        mask = torch.ones(size, reads.before + size, dtype=torch.bool, device=query.device)
        mask = mask.tril(reads.before)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )


AttentionInterface.register(ATTENTION, attention)
# Without a mask function transformers refuses the name; the mask itself is never read.
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
