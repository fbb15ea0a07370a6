"""Whether an artifact fits a run.

Under a lossless policy verification alone decides the text. On another pair such a policy costs
speed at worst, and may be loaded if the user allows it. A lossy policy was judged on its own pair
and is never loaded on another.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from specctl.artifacts.manifest import Domain, Manifest, PairFingerprint
from specctl.errors import ArtifactError, shown

UNKNOWN = "unknown"
OUT_OF_DOMAIN = "W_DOMAIN"
"""Measured elsewhere: same text, unknown speed."""
_PAIR_CODES = {"tokenizer": "E_TOKENIZER", "target": "E_TARGET", "drafter": "E_TARGET"}
_CONSEQUENCES = {
    "tokenizer": "its thresholds are for entropies over another vocabulary",
    "target": "thresholds were fitted on another target: text the same, speed unknown",
    "drafter": "thresholds were fitted on another drafter: text the same, speed unknown",
    "hardware": "its times and budgets were measured elsewhere: text the same, speed unknown",
    "dtype": "probabilities round differently, so decisions near a threshold can differ",
    "batch_size": "it was measured at another load: text the same, speed unknown",
}
_OF_DENSE_TRACES = ["batch_size"]
"""Unknown fields of a fit on dense traces, where requests share no rounds."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Expectation:
    """The run that an artifact is loaded for."""

    pair: PairFingerprint  # the models to run
    domain: Domain = field(default_factory=Domain)
    """This machine and load: `hardware`, `dtype` and `batch_size` are compared if given."""
    allow_mismatch: bool = False
    """Warn of differences instead of refusing, where losslessness allows it."""


Expected = PairFingerprint | Expectation
"""For a pair alone, only the pair is compared."""


@dataclass(frozen=True)
class Difference:
    """A field of an artifact that differs from the run; `found` may be `unknown`."""

    field: str
    wanted: str
    found: str

    @property
    def code(self) -> str:
        return _PAIR_CODES.get(self.field, OUT_OF_DOMAIN)


def check_expected(manifest: Manifest, expect: Expected | None) -> None:
    """Refuses an artifact of another pair (E_TOKENIZER, E_TARGET) or domain (W_DOMAIN: hardware,
    number format or load); with `allow_mismatch` only a lossy one of another pair.

    Names are not compared. Unknown fields and allowed differences are logged as warnings.
    """
    if expect is None:
        return
    here = expect if isinstance(expect, Expectation) else Expectation(expect)
    differences = list(_differences(here, manifest))
    found = [one for one in differences if one.found != UNKNOWN]
    loadable = manifest.lossless or not any(one.field in _PAIR_CODES for one in found)
    if found and not (here.allow_mismatch and loadable):
        first, others = found[0], ", ".join(one.field for one in found[1:])
        also = f"; also different: {others}" if others else ""
        fix = "run it where it was fitted, or fit a policy for this pair and load"
        raise ArtifactError(
            first.code,
            first.field,
            f"it was fitted on {first.found}, but this run has {first.wanted} (fitted on "
            f"{manifest.pair.target} with {manifest.pair.drafter}{also})",
            hint=f"{fix}, or pass --allow-mismatch ({_CONSEQUENCES[first.field]})"
            if loadable
            else fix,
        )
    for one in found:
        facts = f"this run has {one.wanted}, the artifact {one.found}; {_CONSEQUENCES[one.field]}"
        log.warning("%s %s: %s", one.code, one.field, shown(facts))
    unknown = [one.field for one in differences if one.found == UNKNOWN]
    if unknown not in ([], _OF_DENSE_TRACES):
        log.warning(
            "%s %s: the artifact does not record this; whether it fits this run is unknown",
            OUT_OF_DOMAIN, ", ".join(unknown),
        )  # fmt: skip


def _differences(here: Expectation, manifest: Manifest) -> Iterator[Difference]:
    """Fields that differ, the pair's first."""
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
    fits = load is None or (
        measured is not None and measured.low <= load.low and load.high <= measured.high
    )
    if not fits:
        yield Difference("batch_size", str(load), UNKNOWN if measured is None else str(measured))
