"""Text of strangers that a terminal or a browser would obey (W_TEXT): said, never shown raw."""

from __future__ import annotations

import logging
import re

from specctl.plain_text import shown

log = logging.getLogger("specctl.artifacts")
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
)
_ACTIVE = re.compile(
    r"(?i)<\s{0,4}/?\s{0,4}(?:script|iframe|object|embed|style|img|svg|form)\b|javascript:"
)
"""Repetitions are bounded: two of one class beside each other take quadratic time on a card of
white space, with the interpreter held. A browser reads no tag behind even one space."""


def find_active_text(text: str) -> str | None:
    """The first part of a text that would do something where it is shown; None for plain text.

    Returns:
        It is escaped, so that it can be shown.
    """
    found = _CONTROLS.search(text) or _ACTIVE.search(text)
    return None if found is None else shown(text[max(0, found.start() - 8) : found.end() + 16])


def warn_of_text(file: str, text: str) -> None:
    """Logs W_TEXT for a card that carries terminal escapes, hidden characters or active HTML.

    specctl shows no card itself, and escapes every text of an artifact that it does show
    (`strict_json.shown`). The warning is for who opens the file.
    """
    found = find_active_text(text)
    if found is not None:
        log.warning("W_TEXT %s holds what a terminal or browser would obey: %s", file, found)
