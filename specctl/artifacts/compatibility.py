"""Whether an artifact fits a run, and the reasons where it does not.

Losslessness never depends on the policy: verification alone decides the text. So a lossless
policy of another pair costs speed at worst, and may be loaded where the user says so. A lossy
policy was judged on its own pair; on another one its cost is unknown, so it is never loaded there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from specctl.artifacts.manifest import Domain, Manifest, PairFingerprint, Range
from specctl.errors import ArtifactError, shown

UNKNOWN = "unknown"
OUT_OF_DOMAIN = "W_DOMAIN"
"""Measured elsewhere: the text is the same, its speed here is unknown."""
_PAIR_CODES = {"tokenizer": "E_TOKENIZER", "target": "E_TARGET", "drafter": "E_TARGET"}
_CONSEQUENCES = {
    "tokenizer": "entropies over another vocabulary: its thresholds mean something else",
    "target": "thresholds were fitted on another target: text the same, speed unknown",
    "drafter": "thresholds were fitted on another drafter: text the same, speed unknown",
    "hardware": "its times and budgets were measured elsewhere: text the same, speed unknown",
    "dtype": "probabilities round otherwise: near a threshold it decides otherwise",
    "batch_size": "it was measured at another load: text the same, speed unknown",
}
_OF_DENSE_TRACES = ["batch_size"]
"""All that is unknown of a fit on dense traces: no requests shared a round in them."""


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Expectation:
    """The run that an artifact is loaded for, and whether it may have been fitted elsewhere.

    Attributes:
        pair: the models. domain: this machine and load, of which `hardware`, `dtype` and
            `batch_size` are compared where they are given.
        allow_mismatch: load it with a warning for each difference, where losslessness allows it.
    """

    pair: PairFingerprint
    domain: Domain = field(default_factory=Domain)
    allow_mismatch: bool = False


Expected = PairFingerprint | Expectation
"""A pair alone asks for nothing but that pair."""


@dataclass(frozen=True)
class Difference:
    """A field in which an artifact is not as wanted; `found` is `unknown` where it does not say."""

    field: str
    wanted: str
    found: str

    @property
    def code(self) -> str:
        return _PAIR_CODES.get(self.field, OUT_OF_DOMAIN)

    @property
    def consequence(self) -> str:
        """What may be wrong if the artifact is loaded all the same."""
        return _CONSEQUENCES[self.field]


def check_expected(manifest: Manifest, expect: Expected | None) -> None:
    """Refuses an artifact of another pair (E_TOKENIZER, E_TARGET) or domain (W_DOMAIN: hardware,
    number format or load); with `allow_mismatch` only a lossy one of another pair.

    Names are not compared. Fields that are unknown, and differences that are allowed, are warned
    of.
    """
    if expect is None:
        return
    here = expect if isinstance(expect, Expectation) else Expectation(expect)
    differences = list(_differences(here, manifest))
    found = [one for one in differences if one.found != UNKNOWN]
    loadable = manifest.lossless or not any(one.field in _PAIR_CODES for one in found)
    if found and not (here.allow_mismatch and loadable):
        first, others = found[0], ", ".join(one.field for one in found[1:])
        also = f"; other too: {others}" if others else ""
        fix = "run it where it was fitted, or fit a policy for this pair and load"
        raise ArtifactError(
            first.code,
            first.field,
            f"it was fitted on {first.found}, and this run has {first.wanted} (fitted on "
            f"{manifest.pair.target} with {manifest.pair.drafter}{also})",
            hint=f"{fix}, or pass --allow-mismatch ({first.consequence})" if loadable else fix,
        )
    for one in found:
        facts = f"this run has {one.wanted}, the artifact {one.found}; {one.consequence}"
        log.warning("%s %s: %s", one.code, one.field, shown(facts))
    unknown = [one.field for one in differences if one.found == UNKNOWN]
    if unknown not in ([], _OF_DENSE_TRACES):
        log.warning(
            "%s %s: the artifact does not say what it was measured on; whether it fits here is "
            "unknown", OUT_OF_DOMAIN, ", ".join(unknown)
        )  # fmt: skip


def _differences(here: Expectation, manifest: Manifest) -> Iterator[Difference]:
    """Fields that are not as wanted, those of the pair first."""
    pair, fitted, domain = here.pair, manifest.pair, manifest.domain or Domain()
    for name, wanted, found in (
        ("tokenizer", pair.tokenizer_digest, fitted.tokenizer_digest),
        ("target", pair.target_digest, fitted.target_digest),
        ("drafter", pair.drafter_digest, fitted.drafter_digest),
    ):
        if wanted != found:
            also = "" if name == "tokenizer" else f" ({getattr(fitted, name)})"
            yield Difference(name, wanted, f"{found}{also}")
    devices, known = here.domain.hardware, domain.hardware
    if devices is not None and not set(devices) <= set(known or ()):
        yield Difference("hardware", ", ".join(devices), ", ".join(known or ()) or UNKNOWN)
    dtype = here.domain.dtype
    if dtype is not None and dtype != domain.dtype:
        yield Difference("dtype", dtype, domain.dtype or UNKNOWN)
    load, measured = here.domain.batch_size, domain.batch_size
    if load is not None and not _is_within(load, measured):
        yield Difference("batch_size", str(load), UNKNOWN if measured is None else str(measured))


def _is_within(load: Range, measured: Range | None) -> bool:
    return measured is not None and measured.low <= load.low and load.high <= measured.high
