"""`trace.json`: what a trace set was collected from and how (docs/trace-format.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from specctl.collect.places import HEADER_NAME, Place
from specctl.errors import TraceCorruptError, TraceError, TraceMismatchError, TraceSchemaError
from specctl.policy import Policy, policy_digest
from specctl.policy.parse import canonical_json, describe_violation
from specctl.runtime.observe import Sampling
from specctl.stores import KeyAbsentError
from specctl.trace import TABLES, TRACE_VERSION, is_known_schema, schema_id

_REMEDY = {
    "collect.domain.hardware": "collect into another set on this machine, then join both with "
    "`specctl traces merge`, or name both where traces are read"
}
_TOKENS = "collect.tokens."
_RUN = "use the same pair and options, or another folder"
_RUN_TOKENS = "go on with the --tokens and --token-key that the set was begun with, or write to "
_RUN_TOKENS += "another folder"
_JOIN = "join sets of one pair, sampling and configuration, and keep others apart"
_JOIN_TOKENS = "join sets whose token ids were treated alike; to have such, collect one of them "
_JOIN_TOKENS += "again with the --tokens and --token-key of the other"
_READ = "name sets of one pair, sampling and treatment of token ids"
PAIR_FIELDS = ("target_digest", "drafter_digest", "tokenizer_digest")
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class TraceRecord(BaseModel):
    """Base of what is stored as JSON: frozen, strict, no unknown fields, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    trace_version: int = TRACE_VERSION

    def to_bytes(self) -> bytes:
        """Canonical JSON: equal records give equal bytes."""
        return canonical_json(self.model_dump(mode="json")).encode()


RecordT = TypeVar("RecordT", bound=TraceRecord)


class TraceHeader(TraceRecord):
    """Identity of a trace set; see the format page for each field."""

    schema_ids: dict[str, Digest]
    target_digest: Digest
    drafter_digest: Digest | None
    tokenizer_digest: Digest
    sampling: dict[str, JsonValue]
    policy: dict[str, JsonValue]
    policy_digest: Digest
    collect: dict[str, JsonValue]
    specctl_version: str


def make_header(
    policy: Policy,
    sampling: Sampling,
    *,
    target_digest: str,
    drafter_digest: str | None,
    tokenizer_digest: str,
    collect: dict[str, Any],
) -> TraceHeader:
    """The header of a collection that starts now.

    Args:
        collect: JSON values that must be equal on resume, e.g. `max_new_tokens`; leave out what
            may differ between sittings, such as a limit on prompts.
    """
    from specctl import __version__

    return TraceHeader(
        schema_ids={table: schema_id(table) for table in TABLES},
        target_digest=target_digest,
        drafter_digest=drafter_digest,
        tokenizer_digest=tokenizer_digest,
        sampling=vars(sampling).copy(),
        policy=policy.model_dump(mode="json"),
        policy_digest=policy_digest(policy),
        collect=collect,
        specctl_version=__version__,
    )


def read_header(place: Place) -> TraceHeader:
    """Reads `trace.json` strictly.

    Raises:
        TraceError: no such place, or not a trace set.
        TraceSchemaError: another version, unknown schema ids or fields.
        TraceCorruptError: not JSON.
    """
    where = place.at(HEADER_NAME)
    try:
        content = place.read(HEADER_NAME)
    except KeyAbsentError as error:
        is_there = place.root is None or place.root.is_dir()
        raise TraceError(
            f"trace set {place.name}",
            expected=f"a folder or bucket with {HEADER_NAME}",
            found="another folder" if is_there else "no such folder",
            fix="name what `specctl collect` wrote",
        ) from error
    header = parse_record(where, content, TraceHeader)
    for table in TABLES:
        check_schema_id(where, table, header.schema_ids.get(table, "none"))
    return header


def parse_record(path: str, content: bytes, kind: type[RecordT]) -> RecordT:
    """A record from its bytes; the version is judged before the fields, which it governs."""
    value = _parse_json(path, content)
    version = value.get("trace_version") if isinstance(value, dict) else None
    if version != TRACE_VERSION:
        raise TraceSchemaError(
            path,
            expected=f"trace_version {TRACE_VERSION}",
            found=f"{version!r}",
            fix="read it with the specctl that wrote it, or collect again",
        )
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise TraceSchemaError(
            path,
            expected="the fields of docs/trace-format.md",
            found=describe_violation(error),
            fix="read it with the specctl that wrote it, or collect again",
        ) from error


def _parse_json(path: str, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TraceCorruptError(
            path, expected="JSON", found=f"{len(content)} other bytes", fix="restore the file"
        ) from error


def check_schema_id(path: str, table: str, found: str) -> None:
    """Refuses columns that this version was not built for.

    Raises:
        TraceSchemaError: the id is none that was ever the one of `table`.
    """
    if not is_known_schema(table, found):
        raise TraceSchemaError(
            f"{path}, table {table}",
            expected=f"schema {schema_id(table)[:19]}…",
            found=f"{found[:19]}…",
            fix="read it with the specctl that wrote it, or collect again",
        )


def check_same_run(place: Place, stored: TraceHeader, wanted: TraceHeader) -> None:
    """Refuses to go on with a set that was begun differently, naming the field.

    Columns may be of another time: all that are known are read alike. A set that was begun before
    headers held a domain has none to compare.

    Raises:
        TraceMismatchError: a field other than `specctl_version` and `schema_ids` differs.
    """
    fields = set(TraceHeader.model_fields) - {"specctl_version", "schema_ids"}
    if "domain" not in stored.collect:
        without = {name: value for name, value in wanted.collect.items() if name != "domain"}
        wanted = wanted.model_copy(update={"collect": without})
    _check_equal(place, stored, wanted, fields, fix=_RUN, tokens_fix=_RUN_TOKENS)


def check_same_source(place: Place, stored: TraceHeader, wanted: TraceHeader) -> None:
    """Refuses sets whose rows follow different laws: other pair, sampling or treatment of tokens.

    Policies may differ: every row carries its own policy digest.

    Raises:
        TraceMismatchError: naming the field.
    """
    fields = {*PAIR_FIELDS, "sampling"}
    _check_equal(place, stored, wanted, fields, fix=_READ, tokens_fix=_READ, also=(_TOKENS,))


def merged_header(places: Sequence[Place], headers: Sequence[TraceHeader]) -> TraceHeader:
    """The header of several sets as one; they may differ in policies and in machines.

    Raises:
        TraceMismatchError: naming another field that differs.
    """
    fields = {*PAIR_FIELDS, "sampling", "collect"}
    alike = [_without_hardware(header) for header in headers]
    for place, header in zip(places, alike, strict=True):
        _check_equal(place, header, alike[0], fields, fix=_JOIN, tokens_fix=_JOIN_TOKENS)
    machines = {name for header in headers for name in _hardware(header) or ()}
    if any(_hardware(header) is None for header in headers):
        return alike[0]  # some of the rows are of a machine that nothing names
    collect = alike[0].collect
    domain = {**collect["domain"], "hardware": sorted(machines)}  # type: ignore[dict-item]
    return alike[0].model_copy(update={"collect": {**collect, "domain": domain}})


def _hardware(header: TraceHeader) -> Any:
    domain = header.collect.get("domain")
    return domain.get("hardware") if isinstance(domain, dict) else None


def _without_hardware(header: TraceHeader) -> TraceHeader:
    domain = header.collect.get("domain")
    if not isinstance(domain, dict):
        return header
    collect = {**header.collect, "domain": {**domain, "hardware": None}}
    return header.model_copy(update={"collect": collect})


def _check_equal(
    place: Place,
    stored: TraceHeader,
    wanted: TraceHeader,
    fields: set[str],
    *,
    fix: str,
    tokens_fix: str,
    also: tuple[str, ...] = (),
) -> None:
    """Compares fields, and entries whose dotted name starts with one of `also`.

    Args:
        fix: what to do where a field differs. tokens_fix: where the treatment of token ids does.
    """
    have, want = (
        {
            name: value
            for name, value in _flat(header.model_dump()).items()
            if name.split(".")[0] in fields or name.startswith(also or "/")
        }
        for header in (stored, wanted)
    )
    # Identity before detail: another drafter is named as that, not by its vocabulary size.
    for name in sorted(have.keys() | want.keys(), key=lambda n: (n.startswith("collect."), n)):
        if have.get(name) == want.get(name):
            continue
        if name.startswith(_TOKENS):
            raise _treated_otherwise(place, stored, wanted, tokens_fix)
        raise TraceMismatchError(
            f"trace set {place.name}, field {name}",
            expected=repr(want.get(name)),
            found=repr(have.get(name)),
            fix=_REMEDY.get(name, fix),
        )


def token_mode(header: TraceHeader) -> str:
    """What became of a set's token ids: keep, hash or drop, as `--tokens` says it."""
    tokens = header.collect.get("tokens")
    return str(tokens.get("mode")) if isinstance(tokens, dict) else "keep"


def _treated_otherwise(
    place: Place, stored: TraceHeader, wanted: TraceHeader, fix: str
) -> TraceMismatchError:
    """Token ids were kept, hashed or dropped otherwise, in words of the options that say so."""
    expected, found = (f"--tokens {token_mode(header)}" for header in (wanted, stored))
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
