"""Whether an artifact may run here: on its own pair and domain, or because the user says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from specctl.artifacts.facts import Domain, PairFingerprint
from specctl.artifacts.lookup import UNKNOWN, Difference, Wanted, differences, is_loadable
from specctl.artifacts.manifest import Manifest
from specctl.errors import ArtifactError
from specctl.plain_text import shown

_CODES = {"tokenizer": "E_TOKENIZER", "target": "E_TARGET", "drafter": "E_TARGET"}
OUT_OF_DOMAIN = "W_DOMAIN"
"""Measured elsewhere: the text is the same, and whether it is faster here nobody knows."""
_OF_DENSE_TRACES = ["batch_size"]
"""All that is unknown of what was fitted from them: no rounds were run that requests shared."""


def _silent(_: str) -> None:
    """For callers that have nobody to tell."""


@dataclass(frozen=True)
class Expectation:
    """What is about to run, and whether a policy that was fitted elsewhere may run in it.

    Attributes:
        domain: this machine and load; null fields are not compared.
        allow_mismatch: load it with a warning for each difference, where losslessness allows it.
        warn: takes those warnings, one line each, and one of what the artifact does not say.
    """

    pair: PairFingerprint
    domain: Domain = field(default_factory=Domain)
    allow_mismatch: bool = False
    warn: Callable[[str], None] = _silent


Expected = PairFingerprint | Expectation
"""A pair alone asks for nothing but that pair."""


def check_expected(manifest: Manifest, expect: Expected | None) -> None:
    """Refuses an artifact of another pair or domain; names are not compared.

    What the artifact does not say is no reason to refuse it; it is told.

    Args:
        expect: None asks for nothing.

    Raises:
        ArtifactError: E_TOKENIZER, E_TARGET, or W_DOMAIN for other hardware, number format or load.
            With `allow_mismatch` only for a policy that may change the text, on another pair.
    """
    if expect is None:
        return
    here = expect if isinstance(expect, Expectation) else Expectation(expect)
    all_found = differences(Wanted.of(here.pair, here.domain), manifest)
    found = [one for one in all_found if one.found != UNKNOWN]
    loadable = is_loadable(manifest, found)
    if found and not (here.allow_mismatch and loadable):
        raise _refusal(manifest, found, loadable=loadable)
    for one in found:
        here.warn(f"{_CODES.get(one.field, OUT_OF_DOMAIN)} {shown(one.sentence())}")
    unknown = [one.field for one in all_found if one.found == UNKNOWN]
    if unknown not in ([], _OF_DENSE_TRACES):
        here.warn(_untold(unknown))


def _untold(fields: list[str]) -> str:
    return (
        f"{OUT_OF_DOMAIN} {', '.join(fields)}: the artifact does not say what it was measured on; "
        "whether it fits here is unknown"
    )


def _refusal(manifest: Manifest, found: list[Difference], *, loadable: bool) -> ArtifactError:
    first, pair = found[0], manifest.pair
    others = ", ".join(one.field for one in found[1:])
    also = f"; other too: {others}" if others else ""
    fix = "run it where it was fitted, or fit a policy for this pair and load"
    return ArtifactError(
        _CODES.get(first.field, OUT_OF_DOMAIN),
        first.field,
        expected=f"this run's, {first.wanted}",
        found=f"{first.found} (fitted on {pair.target} with {pair.drafter}{also})",
        fix=f"{fix}, or pass --allow-mismatch ({first.consequence})" if loadable else fix,
    )
