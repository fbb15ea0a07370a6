"""Whether an artifact fits a run, which of several fits best, and the reasons where none does.

Losslessness never depends on the policy: verification alone decides the text. So a lossless
policy of another pair costs speed at worst, and may be loaded where the user says so. A lossy
policy was judged on its own pair; on another one its cost is unknown, so it is never loaded there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from specctl.artifacts.manifest import Domain, Manifest, PairFingerprint, Range
from specctl.errors import ArtifactError, shown

UNKNOWN = "unknown"
OUT_OF_DOMAIN = "W_DOMAIN"
"""Measured elsewhere: the text is the same, its speed here is unknown."""
PAIR_FIELDS = ("tokenizer", "target", "drafter")
_CODES = {"tokenizer": "E_TOKENIZER", "target": "E_TARGET", "drafter": "E_TARGET"}
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
"""Kinds of mismatch, and the weight of each: identity of the pair above all else."""
LOSSY = "it may change the text, and was judged on its own pair alone: it is never loaded here"
_OF_DENSE_TRACES = ["batch_size"]
"""All that is unknown of a fit on dense traces: no requests shared a round in them."""


# ------------------------------------------------------------------ words and names


class Agreement(IntEnum):
    """Agreement of a word with a name.

    Attributes:
        PART: its letters and digits are some whole words of the name; `h200` of an H200 NVL.
        WHOLE: they are all of them.
    """

    NONE = 0
    PART = 1
    WHOLE = 2


_GPUS = frozenset({"nvidia", "tesla", "geforce", "quadro", "instinct", "radeon"})
"""In the names of graphics processors; no processor's own name says `cpu` for sure."""
_MAKERS = _GPUS | {"amd", "intel", "apple", "r", "tm", "processor"}
"""Words that people leave out of a device's name: NVIDIA H200, Intel(R) Xeon(R) Processor."""


def words(text: str) -> list[str]:
    """Runs of letters and digits, in lower case: `Qwen/Qwen3-8B` has `qwen`, `qwen3`, `8b`."""
    return re.findall(r"[^\W_]+", text.casefold())


def names(word: str, name: str) -> Agreement:
    """Agreement with a model or a workload, whose owner before a `/` may be left out."""
    return _agreement(words(word), words(name), words(name.rpartition("/")[2]))


def names_device(word: str, device: str) -> Agreement:
    """Agreement with a device, whose maker may be left out; `cpu` is any processor."""
    found = words(device)
    if words(word) == ["cpu"]:
        return Agreement.PART if _GPUS.isdisjoint(found) else Agreement.NONE
    return _agreement(words(word), found, [one for one in found if one not in _MAKERS])


def _agreement(wanted: list[str], name: list[str], short: list[str]) -> Agreement:
    """Whole words only: `l4` is no L40S, and RTX4090 is an RTX 4090."""
    text = "".join(wanted)
    if not text:
        return Agreement.NONE
    if text in ("".join(name), "".join(short)):
        return Agreement.WHOLE
    ends = range(1, len(name) + 1)
    is_part = any(text == "".join(name[start:end]) for end in ends for start in range(end))
    return Agreement.PART if is_part else Agreement.NONE


# ------------------------------------------------------------------ differences


@dataclass(frozen=True)
class Wanted:
    """The conditions of a run, as far as they are known; None stands for anything.

    Attributes:
        target_digest, drafter_digest, tokenizer_digest: compared exactly.
        target, drafter: names, compared where the digest is not given.
        hardware: the devices' own names, compared exactly; each must be known.
        gpu, workload: words, each of which must name what the artifact says (`names`).
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


_Side = tuple[Agreement, str, str]
"""Agreement of one field, the text that was wanted, the text that was found."""


def compare(wanted: Wanted, manifest: Manifest) -> tuple[tuple[Difference, ...], tuple[str, ...]]:
    """Differences, the weightiest first, and the fields that a word names only in part."""
    pair, domain = manifest.pair, manifest.domain or Domain()
    sides = {
        "tokenizer": _same(wanted.tokenizer_digest, pair.tokenizer_digest),
        "target": _model(wanted.target_digest, wanted.target, pair.target_digest, pair.target),
        "drafter": _model(wanted.drafter_digest, wanted.drafter, pair.drafter_digest, pair.drafter),
        "gpu": _device(wanted, domain.hardware or ()),
        "dtype": _same(wanted.dtype, domain.dtype),
        "batch_size": _within(wanted.batch_size, domain.batch_size),
        "workload": _word(wanted.workload, domain.workload),
        "context_tokens": _within(wanted.context_tokens, domain.context_tokens),
    }
    found, in_part = [], []
    for name, side in sides.items():
        if side is None or side[0] is Agreement.WHOLE:
            continue
        if side[0] is Agreement.PART:
            in_part.append(name)
            continue
        consequence, weight = _CONSEQUENCE[name]
        if name in PAIR_FIELDS and not manifest.lossless:
            consequence = LOSSY
        weight = weight / 2 if side[2] == UNKNOWN else weight
        found.append(Difference(name, side[1], side[2], consequence, weight))
    return tuple(found), tuple(in_part)


def _is_loadable(manifest: Manifest, found: Iterable[Difference]) -> bool:
    """Whether the differences leave an artifact that a flag may load."""
    return manifest.lossless or not any(one.field in PAIR_FIELDS for one in found)


def _exactly(is_same: bool) -> Agreement:  # noqa: FBT001
    return Agreement.WHOLE if is_same else Agreement.NONE


def _same(wanted: str | None, found: str | None) -> _Side | None:
    return None if wanted is None else (_exactly(wanted == found), wanted, found or UNKNOWN)


def _model(digest: str | None, name: str | None, found_digest: str, found: str) -> _Side | None:
    if digest is not None:
        return _exactly(digest == found_digest), digest, f"{found_digest} ({found})"
    return _word(name, found)


def _word(wanted: str | None, found: str | None) -> _Side | None:
    return None if wanted is None else (names(wanted, found or ""), wanted, found or UNKNOWN)


def _device(wanted: Wanted, devices: tuple[str, ...]) -> _Side | None:
    found = ", ".join(devices) or UNKNOWN
    if wanted.hardware is not None:
        are_known = set(wanted.hardware) <= set(devices)
        return _exactly(are_known), ", ".join(wanted.hardware), found
    if wanted.gpu is None:
        return None
    agreements = [names_device(wanted.gpu, device) for device in devices]
    return max(agreements, default=Agreement.NONE), wanted.gpu, found


def _within(wanted: int | Range | None, found: Range | None) -> _Side | None:
    if wanted is None:
        return None
    here = Range(low=wanted, high=wanted) if isinstance(wanted, int) else wanted
    is_within = found is not None and found.low <= here.low and here.high <= found.high
    return _exactly(is_within), str(here), UNKNOWN if found is None else str(found)


# ------------------------------------------------------------------ choosing one of several


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
class Match:
    """The fit of an artifact to a place.

    Attributes:
        by_name: fields in which the wanted word is a part of a longer name.
    """

    candidate: Candidate
    differences: tuple[Difference, ...] = ()
    by_name: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Nothing that is wanted differs or is unknown, and no name was met in part."""
        return not self.differences and not self.by_name

    @property
    def loadable(self) -> bool:
        """False if no flag loads it."""
        one = self.candidate
        return one.refusal is None and _is_loadable(one.manifest, self.differences)

    @property
    def score(self) -> float:
        """0 for an exact match, falling with each difference."""
        return -sum(one.weight for one in self.differences) or 0.0

    def closeness(self) -> str:
        """`yes`, `no`, or the fields in which it is exact by a part of the name alone."""
        if self.differences:
            return "no"
        return f"by name ({', '.join(self.by_name)})" if self.by_name else "yes"


def rank(wanted: Wanted, candidates: Iterable[Candidate]) -> list[Match]:
    """Every artifact: exact matches, matches by name, the nearest first; refused ones last."""
    found = (Match(one, *compare(wanted, one.manifest)) for one in candidates)
    return sorted(
        found,
        key=lambda match: (
            match.candidate.refusal is not None,
            2 if match.differences else int(not match.exact),
            not match.loadable,
            -match.score,
            match.candidate.reference,
        ),
    )


# ------------------------------------------------------------------ loading one to run it


def _silent(_: str) -> None:
    """For callers that have nobody to warn."""


@dataclass(frozen=True)
class Expectation:
    """The run that an artifact is loaded for, and whether it may have been fitted elsewhere.

    Attributes:
        pair: the models. domain: this machine and load; null fields are not compared.
        allow_mismatch: load it with a warning for each difference, where losslessness allows it.
        warn: takes those warnings, one line each, and one for the fields that are unknown.
    """

    pair: PairFingerprint
    domain: Domain = field(default_factory=Domain)
    allow_mismatch: bool = False
    warn: Callable[[str], None] = _silent


Expected = PairFingerprint | Expectation
"""A pair alone asks for nothing but that pair."""


def check_expected(manifest: Manifest, expect: Expected | None) -> None:
    """Refuses an artifact of another pair or domain; names are not compared.

    An unknown condition is no reason to refuse; it is warned of.

    Args:
        expect: None asks for nothing.

    Raises:
        ArtifactError: E_TOKENIZER, E_TARGET, or W_DOMAIN for other hardware, number format or load.
            With `allow_mismatch` only for a policy that may change the text, on another pair.
    """
    if expect is None:
        return
    here = expect if isinstance(expect, Expectation) else Expectation(expect)
    pair, domain = here.pair, here.domain
    wanted = Wanted(
        target_digest=pair.target_digest,
        drafter_digest=pair.drafter_digest,
        tokenizer_digest=pair.tokenizer_digest,
        hardware=domain.hardware,
        workload=domain.workload,
        dtype=domain.dtype,
        batch_size=domain.batch_size,
        context_tokens=domain.context_tokens,
    )
    differs, _ = compare(wanted, manifest)
    found = [one for one in differs if one.found != UNKNOWN]
    loadable = _is_loadable(manifest, found)
    if found and not (here.allow_mismatch and loadable):
        first, others = found[0], ", ".join(one.field for one in found[1:])
        also = f"; other too: {others}" if others else ""
        fitted = f"fitted on {manifest.pair.target} with {manifest.pair.drafter}{also}"
        fix = "run it where it was fitted, or fit a policy for this pair and load"
        raise ArtifactError(
            _CODES.get(first.field, OUT_OF_DOMAIN),
            first.field,
            expected=f"this run's, {first.wanted}",
            found=f"{first.found} ({fitted})",
            fix=f"{fix}, or pass --allow-mismatch ({first.consequence})" if loadable else fix,
        )
    for one in found:
        here.warn(f"{_CODES.get(one.field, OUT_OF_DOMAIN)} {shown(one.sentence())}")
    unknown = [one.field for one in differs if one.found == UNKNOWN]
    if unknown not in ([], _OF_DENSE_TRACES):
        here.warn(
            f"{OUT_OF_DOMAIN} {', '.join(unknown)}: the artifact does not say what it was measured "
            "on; whether it fits here is unknown"
        )
