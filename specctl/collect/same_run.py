"""Whether two headers are of one run, of one source, or of sets that may become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specctl.collect.header import PAIR_FIELDS, TraceHeader
from specctl.collect.places import Place
from specctl.errors import TraceMismatchError
from specctl.trace import token_mode

_REMEDY = {
    "collect.domain.hardware": "collect into another set on this machine, then join both with "
    "`specctl traces merge`, or name both where traces are read"
}
_TOKENS = "collect.tokens."
_OF_THE_WRITER = frozenset({"specctl_version", "schema_ids", "body_digest"})
"""Fields that say nothing of the run."""


@dataclass(frozen=True)
class Law:
    """What must be equal in two headers.

    Attributes:
        fields: of the header. also: beginnings of dotted names of further entries.
        fix: what to do where a field differs. tokens_fix: where the treatment of token ids does.
    """

    fields: frozenset[str]
    fix: str
    tokens_fix: str
    also: tuple[str, ...] = ()

    def entries(self, header: TraceHeader) -> dict[str, Any]:
        """What it compares, by dotted name."""
        return {
            name: value
            for name, value in _flat(header.model_dump()).items()
            if name.split(".")[0] in self.fields or name.startswith(self.also or "/")
        }


_SOURCE = frozenset({*PAIR_FIELDS, "sampling"})
_READ = "name sets of one pair, sampling and treatment of token ids"
RUN = Law(
    frozenset(TraceHeader.model_fields) - _OF_THE_WRITER,
    fix="use the same pair and options, or another folder",
    tokens_fix="go on with the --tokens and --token-key that the set was begun with, or write to "
    "another folder",
)
READ_TOGETHER = Law(_SOURCE, fix=_READ, tokens_fix=_READ, also=(_TOKENS,))
JOINED = Law(
    _SOURCE | {"collect"},
    fix="join sets of one pair, sampling and configuration, and keep others apart",
    tokens_fix="join sets whose token ids were treated alike; to have such, collect one of them "
    "again with the --tokens and --token-key of the other",
)


def check_same_run(place: Place, stored: TraceHeader, wanted: TraceHeader) -> None:
    """Refuses to go on with a set that was begun differently, naming the field.

    Columns may be of another time: all that are known are read alike. A set that was begun before
    headers held a domain has none to compare.

    Raises:
        TraceMismatchError: a field other than `specctl_version` and `schema_ids` differs.
    """
    if "domain" not in stored.collect:
        without = {name: value for name, value in wanted.collect.items() if name != "domain"}
        wanted = wanted.model_copy(update={"collect": without})
    _check_equal(place, stored, wanted, RUN)


def check_same_source(place: Place, stored: TraceHeader, wanted: TraceHeader) -> None:
    """Refuses sets whose rows follow different laws: other pair, sampling or treatment of tokens.

    Policies may differ: every row carries its own policy digest.

    Raises:
        TraceMismatchError: naming the field.
    """
    _check_equal(place, stored, wanted, READ_TOGETHER)


def merged_header(places: Sequence[Place], headers: Sequence[TraceHeader]) -> TraceHeader:
    """The header of several sets as one; they may differ in policies and in machines.

    Raises:
        TraceMismatchError: naming another field that differs.
    """
    alike = [_without_hardware(header) for header in headers]
    for place, header in zip(places, alike, strict=True):
        _check_equal(place, header, alike[0], JOINED)
    machines = {name for header in headers for name in _hardware(header) or ()}
    if any(_hardware(header) is None for header in headers):
        return alike[0].sealed()  # some of the rows are of a machine that nothing names
    collect = alike[0].collect
    domain = {**collect["domain"], "hardware": sorted(machines)}  # type: ignore[dict-item]
    return alike[0].model_copy(update={"collect": {**collect, "domain": domain}}).sealed()


def _hardware(header: TraceHeader) -> Any:
    domain = header.collect.get("domain")
    return domain.get("hardware") if isinstance(domain, dict) else None


def _without_hardware(header: TraceHeader) -> TraceHeader:
    domain = header.collect.get("domain")
    if not isinstance(domain, dict):
        return header
    collect = {**header.collect, "domain": {**domain, "hardware": None}}
    return header.model_copy(update={"collect": collect})


def _check_equal(place: Place, stored: TraceHeader, wanted: TraceHeader, law: Law) -> None:
    have, want = law.entries(stored), law.entries(wanted)
    # Identity before detail: another drafter is named as that, not by its vocabulary size.
    for name in sorted(have.keys() | want.keys(), key=lambda n: (n.startswith("collect."), n)):
        if have.get(name) == want.get(name):
            continue
        if name.startswith(_TOKENS):
            raise _treated_otherwise(place, stored, wanted, law.tokens_fix)
        raise TraceMismatchError(
            f"trace set {place.name}, field {name}",
            expected=_told(want.get(name)),
            found=_told(have.get(name)),
            fix=_REMEDY.get(name, law.fix),
        )


def _told(value: object) -> str:
    return "none" if value is None else repr(value)


def _treated_otherwise(
    place: Place, stored: TraceHeader, wanted: TraceHeader, fix: str
) -> TraceMismatchError:
    """Token ids were kept, hashed or dropped otherwise, in words of the options that say so."""
    expected, found = (f"--tokens {token_mode(header.collect)}" for header in (wanted, stored))
    if expected == found:
        expected, found = f"{expected} with the same --token-key", f"{found} with another one"
    return TraceMismatchError(
        f"trace set {place.name}, token ids", expected=expected, found=found, fix=fix
    )


def _flat(value: dict[str, Any], stem: str = "") -> dict[str, Any]:
    """Nested dicts as one, so that a message names `sampling.seed` and not all of `sampling`."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{stem}{key}"
        flat |= _flat(inner, f"{name}.") if isinstance(inner, dict) else {name: inner}
    return flat
