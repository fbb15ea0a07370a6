"""Which artifact fits what is about to run: exact matches, then the nearest, and why not exact.

Losslessness never depends on the policy: verification alone decides the text. So a lossless
policy of another pair costs speed at worst, and may be loaded where the user says so. A lossy
one was judged on its pair; on another nothing is known of what it costs, so it never is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from specctl.artifacts.facts import Domain, PairFingerprint, Range
from specctl.artifacts.manifest import Manifest
from specctl.artifacts.words import Agreement, names, names_device

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Wanted:
    """What is about to run, as far as it is known; None stands for anything.

    Attributes:
        target_digest, drafter_digest, tokenizer_digest: compared exactly.
        target, drafter: names, compared where the digest is not given.
        hardware: the devices' own names, compared exactly; each must be known.
        gpu, workload: words, each of which must name what the artifact says (`words`).
        batch_size: requests that share a round. context_tokens: length of the text. Of a range the
            whole must lie in the artifact's.
    """

    target_digest: str | None = None
    drafter_digest: str | None = None
    tokenizer_digest: str | None = None
    target: str | None = None
    drafter: str | None = None
    hardware: tuple[str, ...] | None = None
    gpu: str | None = None
    workload: str | None = None
    dtype: str | None = None
    batch_size: int | Range | None = None
    context_tokens: int | Range | None = None

    @classmethod
    def of(cls, pair: PairFingerprint, domain: Domain) -> Wanted:
        """A loaded pair on this machine."""
        return cls(
            target_digest=pair.target_digest,
            drafter_digest=pair.drafter_digest,
            tokenizer_digest=pair.tokenizer_digest,
            hardware=domain.hardware,
            workload=domain.workload,
            dtype=domain.dtype,
            batch_size=domain.batch_size,
            context_tokens=domain.context_tokens,
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
        exact: nothing that was asked for differs or is unknown, and no name was met in part.
        by_name: fields in which the word that was asked for is a part of a longer name.
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
    by_name: tuple[str, ...] = ()

    def closeness(self) -> str:
        """`yes`, `no`, or in which fields it is exact by a part of the name alone."""
        if self.differences:
            return "no"
        return f"by name ({', '.join(self.by_name)})" if self.by_name else "yes"


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
    """Every artifact and its differences: exact ones, those by name, loadable ones, nearest first.

    Those that are refused whatever they fit come last.
    """
    found = [_match(wanted, candidate) for candidate in candidates]
    return sorted(found, key=_order)


def _order(match: Match) -> tuple[bool, int, bool, float, str]:
    is_refused = match.refusal is not None
    distance = 2 if match.differences else int(not match.exact)
    return is_refused, distance, not match.loadable, -match.score, match.reference


def differences(wanted: Wanted, manifest: Manifest) -> tuple[Difference, ...]:
    """All that is not as wanted, or not known, of an artifact; the weightiest first."""
    return tuple(
        _difference(field, side.wanted, side.found, manifest)
        for field, side in _compared(wanted, manifest)
        if side.agreement is Agreement.NONE
    )


def _by_name(wanted: Wanted, manifest: Manifest) -> tuple[str, ...]:
    sides = _compared(wanted, manifest)
    return tuple(field for field, side in sides if side.agreement is Agreement.PART)


@dataclass(frozen=True)
class _Side:
    """What was wanted of a field and what was found, and whether they agree."""

    agreement: Agreement
    wanted: str
    found: str


def _compared(wanted: Wanted, manifest: Manifest) -> Iterator[tuple[str, _Side]]:
    """Fields that something is wanted of."""
    pair, domain = manifest.pair, manifest.domain or Domain()
    model = _model(wanted.target_digest, wanted.target, pair.target_digest, pair.target)
    drafter = _model(wanted.drafter_digest, wanted.drafter, pair.drafter_digest, pair.drafter)
    sides = {
        "tokenizer": _same(wanted.tokenizer_digest, pair.tokenizer_digest),
        "target": model,
        "drafter": drafter,
        "gpu": _device(wanted, domain.hardware or ()),
        "dtype": _same(wanted.dtype, domain.dtype),
        "batch_size": _within(wanted.batch_size, domain.batch_size),
        "workload": _word(wanted.workload, domain.workload),
        "context_tokens": _within(wanted.context_tokens, domain.context_tokens),
    }
    yield from ((field, side) for field, side in sides.items() if side is not None)


def is_loadable(manifest: Manifest, found: Iterable[Difference]) -> bool:
    """Whether the differences leave an artifact that a flag may load."""
    return manifest.lossless or not any(one.field in PAIR_FIELDS for one in found)


def _match(wanted: Wanted, candidate: Candidate) -> Match:
    found = differences(wanted, candidate.manifest)
    by_name = _by_name(wanted, candidate.manifest)
    weight = sum(one.weight for one in found)
    return Match(
        reference=candidate.reference,
        digest=candidate.digest,
        exact=not found and not by_name,
        loadable=candidate.refusal is None and is_loadable(candidate.manifest, found),
        differences=found,
        score=-weight if found else 0.0,
        refusal=candidate.refusal,
        by_name=by_name,
    )


def _difference(field: str, wanted: str, found: str, manifest: Manifest) -> Difference:
    consequence, weight = _CONSEQUENCE[field]
    if field in PAIR_FIELDS and not manifest.lossless:
        consequence = LOSSY
    return Difference(field, wanted, found, consequence, weight / 2 if found == UNKNOWN else weight)


def _same(wanted: str | None, found: str | None) -> _Side | None:
    if wanted is None:
        return None
    return _Side(Agreement.of(wanted == found), wanted, found or UNKNOWN)


def _model(digest: str | None, name: str | None, found_digest: str, found: str) -> _Side | None:
    if digest is not None:
        return _Side(Agreement.of(digest == found_digest), digest, f"{found_digest} ({found})")
    return _word(name, found)


def _word(wanted: str | None, found: str | None) -> _Side | None:
    return None if wanted is None else _Side(names(wanted, found or ""), wanted, found or UNKNOWN)


def _device(wanted: Wanted, devices: tuple[str, ...]) -> _Side | None:
    found = ", ".join(devices) or UNKNOWN
    if wanted.hardware is not None:
        are_known = Agreement.of(set(wanted.hardware) <= set(devices))
        return _Side(are_known, ", ".join(wanted.hardware), found)
    if wanted.gpu is None:
        return None
    agreements = [names_device(wanted.gpu, device) for device in devices]
    return _Side(max(agreements, default=Agreement.NONE), wanted.gpu, found)


def _within(wanted: int | Range | None, found: Range | None) -> _Side | None:
    if wanted is None:
        return None
    asked = Range(low=wanted, high=wanted) if isinstance(wanted, int) else wanted
    is_within = found is not None and found.low <= asked.low and asked.high <= found.high
    return _Side(Agreement.of(is_within), str(asked), UNKNOWN if found is None else str(found))
