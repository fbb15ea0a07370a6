"""Copies of the text as drafts: where its end stood before, what followed it there.

    text   the cat sat on the cat ■     match "the cat", 2 tokens; draft "sat on the cat sat on ..."

A round whose text has such a match submits that chain and asks no drafter; all other rounds are the
shape's. Prompt lookup (Saxena 2023, "Prompt Lookup Decoding") and suffix decoding
(arXiv:2411.04975) draft by copies alone, which `ar+copy` does. A copy is a point mass, so
point-mass verification of it is lossless; it has no draft probability.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from specctl.features import NO_TEXT, SUFFIX_TOKENS, Copy, copy_of
from specctl.lazy import Tensor, torch
from specctl.policy.family import Depth, Family, grid
from specctl.records import Record


class CopyText(Record):
    """The tokens that followed the end of the text where it stood before; the longest match counts
    (of `SUFFIX_TOKENS`, or `min_length` if that is more), and of equal ones the latest.

    Attributes:
        min_length: tokens at the text's end that must agree.
        max_draft_tokens: of a copy; one that reaches the text's end goes on in itself.
        window: tokens looked at, the text's last ones.
        prompt: the prompt is part of the text. Traces hold no prompts, so replay cannot tell.
    """

    kind: Literal["copy"] = "copy"
    min_length: Annotated[int, Field(ge=1, le=16)] = 2
    max_draft_tokens: Depth = 12
    window: Annotated[int, Field(ge=2, le=1 << 16)] = 1024
    prompt: bool = False

    def find(self, recent: Tensor) -> Copy:
        """The copies of B texts, of length 0 where a round asks its drafter.

        Args:
            recent: `[B, W]` int64, their ends, W at most `window`, `NO_TEXT` before they begin.
        """
        longest = max(self.min_length, SUFFIX_TOKENS)
        padded = torch.nn.functional.pad(recent, (longest, 0), value=NO_TEXT)
        copy = copy_of(padded, self.max_draft_tokens, longest)
        return copy._replace(length=copy.length * (copy.length >= self.min_length))


COPY = Family(
    record=CopyText,
    rule=lambda record: record.find,
    words={"copy": {}},
    grids={"copy": grid(min_length="1 2 3", max_draft_tokens="6 12")},
)
