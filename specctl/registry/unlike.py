"""Whether a name says what an artifact's manifest says: names are chosen by hand, facts are not."""

from __future__ import annotations

import re
from collections.abc import Iterator

from specctl.artifacts.manifest import Manifest
from specctl.artifacts.words import names, names_device
from specctl.plain_text import shown
from specctl.registry.names import parse_name

_NAME = re.compile(
    r"(?P<target>[^+@]+)(\+(?P<drafter>[^@]+))?(@(?P<hardware>[^:]+):(?P<workload>.+))?"
)
_EMBEDDED_DRAFTER = "embedded:eagle3"
"""What the drafter `embedded` is short for."""


def unlike(name: str, manifest: Manifest) -> list[str]:
    """One sentence for each part of a name that the manifest does not bear out.

    A part agrees where it is some whole words of the fact (`words`): `qwen3-8b` is in
    `Qwen/Qwen3-8B-Base`. What the manifest does not know is not compared.
    """
    return [
        f"the name says {part} {word}, the artifact was made on {shown(' or '.join(facts))}"
        for part, word, facts in _compared(name, manifest)
        if facts and not any(_agrees(part, word, fact) for fact in facts)
    ]


def _compared(name: str, manifest: Manifest) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Parts of the name: what it is, its word, and what the manifest knows of it."""
    found = _NAME.fullmatch(parse_name(name))
    assert found is not None
    pair, domain = manifest.pair, manifest.domain
    facts: dict[str, tuple[str, ...]] = {
        "target": (pair.target,),
        "drafter": (_EMBEDDED_DRAFTER if pair.drafter == "embedded" else pair.drafter,),
        "hardware": (domain.hardware if domain else None) or (),
        "workload": (domain.workload,) if domain and domain.workload else (),
    }
    for part, word in found.groupdict().items():
        if word is not None:
            yield part, word, facts[part]


def _agrees(part: str, word: str, fact: str) -> bool:
    return bool(names_device(word, fact) if part == "hardware" else names(word, fact))
