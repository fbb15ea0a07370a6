"""Whether a word that people use names a model or a device: whole words, never pieces of one.

`l4` is no L40S and `qwen3-1` no Qwen3-14B. Case and what stands between words do not matter.
"""

from __future__ import annotations

import re
from enum import IntEnum

_GPUS = frozenset({"nvidia", "tesla", "geforce", "quadro", "instinct", "radeon"})
"""In the names of graphics processors; no processor's own name says `cpu` for sure."""
_MAKERS = _GPUS | {"amd", "intel", "apple", "r", "tm", "processor"}
"""What people leave out of the name of a device: NVIDIA H200, Intel(R) Xeon(R) Processor."""


class Agreement(IntEnum):
    """How well a word names something.

    Attributes:
        PART: its letters and digits are some whole words of the name; `h200` of an H200 NVL.
        WHOLE: they are all of them.
    """

    NONE = 0
    PART = 1
    WHOLE = 2

    @classmethod
    def of(cls, is_same: bool) -> Agreement:  # noqa: FBT001  the one thing that it is made of
        """Of values that are the same or are not."""
        return cls.WHOLE if is_same else cls.NONE


def words(text: str) -> list[str]:
    """Runs of letters and digits, in lower case: `Qwen/Qwen3-8B` has `qwen`, `qwen3`, `8b`."""
    return re.findall(r"[^\W_]+", text.casefold())


def names(word: str, name: str) -> Agreement:
    """How well a word names a model or a workload; the owner before a `/` may be left out."""
    return _agreement(words(word), words(name), words(name.rpartition("/")[2]))


def names_device(word: str, device: str) -> Agreement:
    """How well a word names a device; its maker may be left out, and `cpu` is any processor."""
    found = words(device)
    if words(word) == ["cpu"]:
        return Agreement.PART if _GPUS.isdisjoint(found) else Agreement.NONE
    return _agreement(words(word), found, [one for one in found if one not in _MAKERS])


def _agreement(asked: list[str], name: list[str], short: list[str]) -> Agreement:
    text = "".join(asked)  # RTX4090 is an RTX 4090
    if not text:
        return Agreement.NONE
    if text in ("".join(name), "".join(short)):
        return Agreement.WHOLE
    ends = range(1, len(name) + 1)
    is_part = any(text == "".join(name[start:end]) for end in ends for start in range(end))
    return Agreement.PART if is_part else Agreement.NONE
