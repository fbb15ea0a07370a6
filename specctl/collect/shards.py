"""Which writer collects which prompts, where several share a set."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from specctl.errors import UsageError


@dataclass(frozen=True)
class Shard:
    """One part of the prompts, by their ids alone: no two shards of one count share a prompt.

    Attributes:
        index: 1-based. count: writers in all.
    """

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`2/4` is the second of four.

        Raises:
            UsageError: anything else.
        """
        found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
        shard = None if found is None else cls(int(found[1]), int(found[2]))
        if shard is None or not 1 <= shard.index <= shard.count:
            raise UsageError(
                "--shard", expected="I/N with 1 <= I <= N", found=repr(text), fix="correct it"
            )
        return shard

    def holds(self, prompt_id: str) -> bool:
        """Whether a prompt is of this part."""
        number = int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:8], "big")
        return number % self.count == self.index - 1


WHOLE = Shard()
