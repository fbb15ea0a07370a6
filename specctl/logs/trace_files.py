"""The files of a trace set (docs/trace-format.md): places, header and segments.

trace.json                       the header, written once
rounds/<time>-<sha256>.parquet   a segment: rounds, and in the footer the record of what it holds
nodes/<sha256>.parquet           its nodes, named by its record
snapshots/<sha256>.txt           a frozen list of segments
tmp/                             unfinished files of a folder, never read
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from specctl.errors import TraceCorruptError, TraceError, TraceMismatchError, TraceSchemaError
from specctl.records import Record, canonical_json, describe_violation
from specctl.stores import KeyAbsentError, ObjectStore, is_store_url, open_store
from specctl.stores.creating import read
from specctl.stores.local import TEMPORARY, LocalStore
from specctl.trace import TABLES, TRACE_VERSION, schema_id, token_mode

HEADER_NAME = "trace.json"
ROUNDS, NODES, SNAPSHOTS = "rounds", "nodes", "snapshots"
FOLDERS = frozenset({ROUNDS, NODES, SNAPSHOTS, TEMPORARY, "probe"})
RECORD_KEY = b"specctl.segment"
"""Key of the `SegmentRecord` in the footer of a rounds file."""
MAX_JSON_BYTES = 64 << 20
MAX_SEGMENT_BYTES = 1 << 30
NEWER = "read it with the specctl that wrote it, or collect again"
_SEGMENT_KEY = re.compile(
    rf"{ROUNDS}/(?P<name>[0-9]{{8}}T[0-9]{{9}}Z-(?P<hex>[0-9a-f]{{64}}))\.parquet"
)
_TIME = r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?)?"
_REFERENCE = re.compile(rf"(?P<place>.+)@(?P<part>sha256:[0-9a-f]{{64}}|{_TIME})\Z", re.DOTALL)

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]


# --------------------------------------------------------------------------- places


@dataclass(frozen=True)
class Place:
    """The folder or bucket of a trace set."""

    store: ObjectStore
    root: Path | None  # the folder; None for a bucket
    name: str  # as the user wrote it

    def at(self, key: str) -> str:
        """A key, for messages."""
        return f"{self.name.rstrip('/')}/{key}"

    def read(self, key: str) -> bytes:
        """The bytes of the header or of a snapshot.

        Raises:
            StoreError: absent (`KeyAbsentError`), too large, or unreadable.
        """
        return read(self.store, key, max_bytes=MAX_JSON_BYTES)

    def holds(self, key: str) -> bool:
        """Whether something is stored under a key."""
        try:
            self.read(key)
        except KeyAbsentError:
            return False
        return True

    def keys(self, prefix: str) -> list[str]:
        """Keys below a prefix, sorted."""
        return [found.key for found in self.store.objects(prefix)]


def open_place(place: str | Path) -> Place:
    """A folder, `file:///folder` or `s3://bucket/prefix`, without reading from it.

    Raises:
        UsageError: another kind of URL, or a missing package.
    """
    text = str(place)
    if not is_store_url(text):
        return Place(LocalStore(text), Path(text), text)
    store = open_store(text)
    return Place(store, store.root if isinstance(store, LocalStore) else None, text)


def sample_place(place: str | Path) -> str:
    """The place of the dense sample that belongs to a set of rounds, beside it."""
    return str(place).rstrip("/") + "-dense"


def split_reference(reference: str | Path) -> tuple[str, str | None]:
    """The place, and the snapshot or first UTC time, of `TRACES`, `TRACES@sha256:<hex>` or
    `TRACES@2026-01-31T12:00:00`."""
    found = _REFERENCE.fullmatch(str(reference))
    return (str(reference), None) if found is None else (found["place"], found["part"])


def enclosing_set(path: Path) -> Path | None:
    """The trace set that a path lies in, at any depth below its folder."""
    above = (folder for folder in path.resolve().parents if (folder / HEADER_NAME).is_file())
    return next(above, None)


# --------------------------------------------------------------------------- records


class Stored(Record):
    """Base of stored JSON: one version, canonical bytes."""

    trace_version: int = TRACE_VERSION

    def to_bytes(self) -> bytes:
        """Canonical JSON: equal records, equal bytes."""
        return canonical_json(self.model_dump(mode="json")).encode()


RecordT = TypeVar("RecordT", bound=Stored)


def parse_record(where: str, content: bytes, kind: type[RecordT]) -> RecordT:
    """A record from its bytes; the version is checked first, since it governs the fields."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _altered(where, f"its {len(content)} bytes are not JSON") from error
    found = value.get("trace_version") if isinstance(value, dict) else None
    if found != TRACE_VERSION:
        raise TraceSchemaError(
            f"{where} has trace_version {found!r}; this specctl reads {TRACE_VERSION}", hint=NEWER
        )
    try:
        record = kind.model_validate(value)
    except ValidationError as error:
        raise TraceSchemaError(
            f"{where} breaks docs/trace-format.md: {describe_violation(error)}", hint=NEWER
        ) from error
    if record.to_bytes() != content:
        raise _altered(where, "it is not canonical JSON")
    return record


def _altered(where: str, problem: str) -> TraceCorruptError:
    return TraceCorruptError(f"{where} was altered: {problem}", hint="restore the file")


class _Tokens(Record):
    """`collect.tokens`: how token ids are stored."""

    mode: Literal["keep", "drop"]


class _Engine(BaseModel, extra="allow", strict=True):
    """`collect.engine`: the serving engine that wrote the rows."""

    name: str
    version: str


class _Collect(BaseModel, extra="allow", strict=True):
    """Entries of `collect` that readers use; others are compared alone."""

    engine: _Engine | None = None
    tokens: _Tokens = _Tokens(mode="keep")


def _check_collect(collect: dict[str, JsonValue]) -> dict[str, JsonValue]:
    try:
        _Collect.model_validate(collect)
    except ValidationError as error:
        raise ValueError(describe_violation(error)) from error
    return collect


class TraceHeader(Stored):
    """`trace.json`: the source of a set and its collection; docs/trace-format.md has each field."""

    schema_ids: dict[str, Digest]
    target_digest: Digest
    drafter_digest: Digest | None
    tokenizer_digest: Digest
    sampling: dict[str, JsonValue]
    policy: dict[str, JsonValue]
    policy_digest: Digest
    collect: Annotated[dict[str, JsonValue], AfterValidator(_check_collect)]
    specctl_version: str

    @cached_property
    def digest(self) -> str:
        """`sha256:<hex>` of the bytes of `trace.json`."""
        return "sha256:" + hashlib.sha256(self.to_bytes()).hexdigest()


def read_header(place: Place) -> TraceHeader:
    """Reads `trace.json` strictly.

    Raises:
        TraceError: no such place, or not a trace set.
        TraceSchemaError: another version, or other columns or fields.
        TraceCorruptError: not JSON, or altered bytes.
    """
    where = place.at(HEADER_NAME)
    try:
        content = place.read(HEADER_NAME)
    except KeyAbsentError as error:
        if place.keys(ROUNDS):
            raise TraceCorruptError(
                f"{where} is missing, and its segments are there", hint="restore the file"
            ) from error
        found, fix = f"it has no {HEADER_NAME}", "name a folder that `specctl collect` wrote"
        if place.root is not None and place.root.is_file():
            found, fix = "it is a file", "`specctl import` reads logs and metrics of engines"
        elif place.root is not None and not place.root.is_dir():
            found = "no such folder"
        raise TraceError(f"{place.name} is no trace set: {found}", hint=fix) from error
    header = parse_record(where, content, TraceHeader)
    known = {table: schema_id(table) for table in TABLES}
    if header.schema_ids != known:
        odd = min(
            name
            for name in header.schema_ids.keys() | known.keys()
            if header.schema_ids.get(name) != known.get(name)
        )
        raise TraceSchemaError(
            f"{where}: table {odd} has schema {header.schema_ids.get(odd, 'none')[:19]}, not "
            f"{known.get(odd, 'none')[:19]}",
            hint=NEWER,
        )
    return header


class StoredFile(NamedTuple):
    """A file of a set, with the hex SHA-256 of its bytes and, if known, their number."""

    key: str
    sha256: str
    size_bytes: int | None = None


class NodesFile(Record):
    """The nodes file of a segment, as the footer of its rounds file names it."""

    sha256: Digest
    size_bytes: Annotated[int, Field(ge=0, le=MAX_SEGMENT_BYTES)]
    num_rows: Count

    @property
    def key(self) -> str:
        """Key of the file, derived from the digest so that it stays inside the set."""
        return f"{NODES}/{self.sha256.removeprefix('sha256:')}.parquet"


class SegmentRecord(Stored):
    """Counts and names of a segment; canonical JSON in the footer of its rounds file."""

    header_digest: Digest
    policy: dict[str, JsonValue]
    nodes: NodesFile | None
    prompt_ids: list[str]
    text_digests: list[Digest | None] | None = None

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        if any(one >= other for one, other in pairwise(self.prompt_ids)):
            raise ValueError("prompt_ids: sorted, each once")
        if self.text_digests is not None and len(self.text_digests) != len(self.prompt_ids):
            raise ValueError("text_digests: one for each of prompt_ids")
        return self


@dataclass(frozen=True)
class Segment:
    """A published segment: all rows of its prompts."""

    name: str  # `<time>-<sha256>`, which is also its order
    record: SegmentRecord
    num_rounds: int  # rows of the rounds file
    size_bytes: int  # of both files
    # prompts that an earlier segment owns; their rows here are skipped
    repeats: frozenset[str] = field(default=frozenset())

    @property
    def key(self) -> str:
        """Key of the rounds file."""
        return f"{ROUNDS}/{self.name}.parquet"

    @property
    def files(self) -> dict[str, StoredFile]:
        """Files by table; tables without rows are absent."""
        found, nodes = {}, self.record.nodes
        if self.num_rounds:
            found[ROUNDS] = StoredFile(self.key, self.name.rpartition("-")[2])
        if nodes is not None:
            hex_digest = nodes.sha256.removeprefix("sha256:")
            found[NODES] = StoredFile(nodes.key, hex_digest, nodes.size_bytes)
        return found

    @property
    def prompt_ids(self) -> tuple[str, ...]:
        """Prompts that the segment owns."""
        return tuple(p for p in self.record.prompt_ids if p not in self.repeats)

    @property
    def num_rows(self) -> int:
        """Rows of both files."""
        return self.num_rounds + (self.record.nodes.num_rows if self.record.nodes else 0)

    @property
    def texts(self) -> dict[str, str]:
        """Recorded digests of the texts, by prompt."""
        pairs = zip(self.record.prompt_ids, self.record.text_digests or (), strict=False)
        return {prompt: digest for prompt, digest in pairs if digest is not None}


def parse_segment_key(where: str, key: str) -> tuple[str, str]:
    """The name of a segment and the hex digest of its rounds file, from a key below `rounds/`."""
    found = _SEGMENT_KEY.fullmatch(key)
    if found is None:
        raise TraceCorruptError(
            f"{where} has another name than {ROUNDS}/<time>-<sha256>.parquet",
            hint="give the file its name back; remove it, if no writer of traces made it",
        )
    return found["name"], found["hex"]


def check_header_digest(place: Place, header: TraceHeader, segment: Segment) -> None:
    """Refuses a header other than the one that a segment was collected under."""
    if segment.record.header_digest != header.digest:
        raise _altered(
            place.at(HEADER_NAME),
            f"{segment.key} was collected under {segment.record.header_digest[:19]}…, and its "
            f"digest is {header.digest[:19]}…",
        )


# --------------------------------------------------------------------------- headers compared


RUN = frozenset(TraceHeader.model_fields) - {"specctl_version"}
"""Fields that a resumed run must repeat."""
SOURCE = frozenset(
    {"target_digest", "drafter_digest", "tokenizer_digest", "sampling", "collect.tokens"}
)
"""Fields that must be equal in sets read together; policies may differ, as each row has its own."""


def _differences(
    have: Mapping[str, Any], want: Mapping[str, Any], stem: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Pairs of different values by dotted name; None for an absent one."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in have.keys() | want.keys():
        pair = one, other = have.get(key), want.get(key)
        if isinstance(one, dict | None) and isinstance(other, dict | None):
            found |= _differences(one or {}, other or {}, f"{stem}{key}.")
        elif one != other:
            found[f"{stem}{key}"] = pair
    return found


def check_equal(
    place: Place, stored: TraceHeader, wanted: TraceHeader, fields: Iterable[str], fix: str
) -> None:
    """Raises `TraceMismatchError` of the first of these fields, or fields below, that differs."""
    stems = tuple(f"{name}." for name in fields)
    every = _differences(stored.model_dump(), wanted.model_dump())
    names = [name for name in every if f"{name}.".startswith(stems)]
    if not names:
        return
    # Identity before detail: another drafter rather than its vocabulary size.
    name = min(names, key=lambda name: (name.startswith("collect."), name))
    found, expected = ("none" if value is None else repr(value) for value in every[name])
    what = f"field {name}"
    if name.startswith("collect.tokens"):
        what = "token ids"
        expected, found = (f"--tokens {token_mode(one.collect)}" for one in (wanted, stored))
    elif name == "collect.domain.hardware":
        fix = "collect into another set on this machine, and name both where traces are read"
    raise TraceMismatchError(
        f"trace set {place.name} differs in {what}: it has {found}, not {expected}", hint=fix
    )
