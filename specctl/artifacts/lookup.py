"""Which artifact fits what is about to run: exact matches, then the nearest, and why not exact.

Losslessness never depends on the policy: verification alone decides the text. So a lossless
policy of another pair costs speed at worst, and may be loaded where the user says so. A lossy
one was judged on its pair; on another nothing is known of what it costs, so it never is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specctl.artifacts.facts import Domain, PairFingerprint, Range
from specctl.artifacts.manifest import Manifest

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Wanted:
    """What is about to run, as far as it is known; None stands for anything.

    Attributes:
        target_digest, drafter_digest, tokenizer_digest: compared exactly.
        target, drafter: names, compared where the digest is not given.
        hardware: the device's own name, compared exactly.
        gpu, workload: words; an artifact's own name must contain them, whatever the case.
        batch_size: requests that share a round. context_tokens: length of the text.
    """

    target_digest: str | None = None
    drafter_digest: str | None = None
    tokenizer_digest: str | None = None
    target: str | None = None
    drafter: str | None = None
    hardware: str | None = None
    gpu: str | None = None
    workload: str | None = None
    dtype: str | None = None
    batch_size: int | None = None
    context_tokens: int | None = None

    @classmethod
    def of(cls, pair: PairFingerprint, domain: Domain) -> Wanted:
        """A loaded pair on this machine; of a range of batch sizes the largest."""
        return cls(
            target_digest=pair.target_digest,
            drafter_digest=pair.drafter_digest,
            tokenizer_digest=pair.tokenizer_digest,
            hardware=None if domain.hardware is None else domain.hardware[0],
            workload=domain.workload,
            dtype=domain.dtype,
            batch_size=None if domain.batch_size is None else domain.batch_size.high,
        )


@dataclass(frozen=True)
class Candidate:
    """An artifact that may be chosen, by what the user can name it with.

    Attributes:
        refusal: why it is not loaded whatever it fits, e.g. as it has expired; None if it may be.
    """

    reference: str
    digest: str
    manifest: Manifest
    refusal: str | None = None


@dataclass(frozen=True)
class Difference:
    """One thing that is not as wanted.

    Attributes:
        found: `unknown` where the artifact does not say.
        consequence: what may be wrong if it is loaded all the same.
        weight: how far away it makes the artifact.
    """

    field: str
    wanted: str
    found: str
    consequence: str
    weight: float

    def sentence(self) -> str:
        return f"{self.field}: wanted {self.wanted}, found {self.found}; {self.consequence}"


@dataclass(frozen=True)
class Match:
    """How well an artifact fits.

    Attributes:
        exact: nothing that was asked for differs or is unknown.
        loadable: False if no flag loads it.
        refusal: why it is not loaded whatever it fits; None if it may be.
        score: 0 for an exact match, falling with each difference.
    """

    reference: str
    digest: str
    exact: bool
    loadable: bool
    differences: tuple[Difference, ...]
    score: float
    refusal: str | None = None


PAIR_FIELDS = ("tokenizer", "target", "drafter")
_CONSEQUENCE = {
    "tokenizer": ("entropies over another vocabulary: its thresholds mean something else", 64.0),
    "target": ("thresholds were fitted on another target: text the same, speed unknown", 32.0),
    "drafter": ("thresholds were fitted on another drafter: text the same, speed unknown", 32.0),
    "gpu": ("its times and budgets were measured elsewhere: text the same, speed unknown", 8.0),
    "dtype": ("probabilities round otherwise: near a threshold it decides otherwise", 4.0),
    "batch_size": ("it was measured at another load: text the same, speed unknown", 4.0),
    "workload": ("it was measured on other prompts: acceptance may differ", 4.0),
    "context_tokens": ("it was measured on texts of other lengths: costs may differ", 2.0),
}
"""What may be wrong, and how much that weighs: identity of the pair above all else."""
LOSSY = "it may change the text, and was judged on its own pair alone: it is never loaded here"


def rank(wanted: Wanted, candidates: Iterable[Candidate]) -> list[Match]:
    """Every artifact and its differences: exact ones, then loadable ones, nearest first.

    Those that are refused whatever they fit come last.
    """
    found = [_match(wanted, candidate) for candidate in candidates]
    return sorted(found, key=_order)


def _order(match: Match) -> tuple[bool, bool, bool, float, str]:
    is_refused = match.refusal is not None
    return is_refused, not match.exact, not match.loadable, -match.score, match.reference


def differences(wanted: Wanted, manifest: Manifest) -> tuple[Difference, ...]:
    """All that is not as wanted, or not known, of an artifact; the weightiest first."""
    pair, domain = manifest.pair, manifest.domain or Domain()
    compared = (
        ("tokenizer", _same(wanted.tokenizer_digest, pair.tokenizer_digest)),
        ("target", _model(wanted.target_digest, wanted.target, pair.target_digest, pair.target)),
        (
            "drafter",
            _model(wanted.drafter_digest, wanted.drafter, pair.drafter_digest, pair.drafter),
        ),
        ("gpu", _device(wanted, domain)),
        ("dtype", _same(wanted.dtype, domain.dtype)),
        ("batch_size", _within(wanted.batch_size, domain.batch_size)),
        ("workload", _word(wanted.workload, domain.workload)),
        ("context_tokens", _within(wanted.context_tokens, domain.context_tokens)),
    )
    return tuple(_difference(name, *sides, manifest) for name, sides in compared if sides)


def is_loadable(manifest: Manifest, found: Iterable[Difference]) -> bool:
    """Whether the differences leave an artifact that a flag may load."""
    return manifest.lossless or not any(one.field in PAIR_FIELDS for one in found)


def _match(wanted: Wanted, candidate: Candidate) -> Match:
    found = differences(wanted, candidate.manifest)
    weight = sum(one.weight for one in found)
    return Match(
        reference=candidate.reference,
        digest=candidate.digest,
        exact=not found,
        loadable=candidate.refusal is None and is_loadable(candidate.manifest, found),
        differences=found,
        score=-weight if found else 0.0,
        refusal=candidate.refusal,
    )


def _difference(field: str, wanted: str, found: str, manifest: Manifest) -> Difference:
    consequence, weight = _CONSEQUENCE[field]
    if field in PAIR_FIELDS and not manifest.lossless:
        consequence = LOSSY
    return Difference(field, wanted, found, consequence, weight / 2 if found == UNKNOWN else weight)


Sides = tuple[str, str] | None
"""What was wanted and what was found; None where they agree, or nothing was asked."""


def _same(wanted: str | None, found: str | None) -> Sides:
    return None if wanted is None or wanted == found else (wanted, found or UNKNOWN)


def _model(digest: str | None, name: str | None, found_digest: str, found_name: str) -> Sides:
    if digest is not None:
        return None if digest == found_digest else (digest, f"{found_digest} ({found_name})")
    return _word(name, found_name)


def _word(wanted: str | None, found: str | None) -> Sides:
    if wanted is None or (found is not None and wanted.casefold() in found.casefold()):
        return None
    return wanted, found or UNKNOWN


def _device(wanted: Wanted, domain: Domain) -> Sides:
    names = domain.hardware or ()
    if wanted.hardware is not None:
        return None if wanted.hardware in names else (wanted.hardware, ", ".join(names) or UNKNOWN)
    return _word(wanted.gpu, ", ".join(names) or None)


def _within(wanted: int | None, found: Range | None) -> Sides:
    if wanted is None or (found is not None and found.low <= wanted <= found.high):
        return None
    return str(wanted), UNKNOWN if found is None else str(found)
