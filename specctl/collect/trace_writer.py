"""Writes a trace set: rows of whole prompts become published segments.

    nodes: write ─► digest ─► put          rounds: write ─► digest ─► put: published

A put syncs the file, links it to its name without overwriting, and syncs the folder; in a bucket it
is one put-if-absent. The set contains the prompts from the moment the rounds file has its name.
Writers share only the header, so any number of them work side by side.
"""

from __future__ import annotations

import hashlib
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from specctl.collect.config import TokenMode
from specctl.collect.prompts import Prompt
from specctl.durable import RESUME, check_folder, file_sha256, make_folder, output_errors
from specctl.errors import InvariantError, OutputError, StoreError, TraceMismatchError
from specctl.logs.trace_files import (
    FOLDERS,
    HEADER_NAME,
    MAX_SEGMENT_BYTES,
    RECORD_KEY,
    ROUNDS,
    RUN,
    NodesFile,
    Place,
    Segment,
    SegmentRecord,
    TraceHeader,
    check_equal,
    enclosing_set,
    open_place,
    read_header,
)
from specctl.logs.trace_set import Listing, read_listing
from specctl.policy import Policy, policy_digest
from specctl.records import canonical_json
from specctl.stores import KeyTakenError, create, probe
from specctl.stores.local import TEMPORARY, LocalStore
from specctl.trace import TABLES, TOKEN_COLUMNS, arrow_schema, schema_id, token_mode

if TYPE_CHECKING:
    import pyarrow as pa

    from specctl.artifacts.manifest import Domain, PairFingerprint

FLUSH_S = 30.0
"""Seconds between segments while finished prompts wait: the most that a crash costs."""
FLUSH_BYTES = 64 << 20
"""Memory of rows at which a segment is published earlier."""
ABANDONED_S = 24 * 3600.0
"""Age of an unfinished file whose writer must be dead."""
PATIENCE_S = 30.0
"""Time that Ctrl-C waits for the last segment, which takes some seconds to a slow bucket."""
AGAIN = "start the command again (with --resume, where it has that)"


def make_header(
    policy: Policy, sampling: object, *, collect: dict[str, Any], **digests: str | None
) -> TraceHeader:
    """The header of a collection that starts now.

    Args:
        sampling: a record of plain values.
        collect: JSON values that must be equal on resume, e.g. `max_new_tokens`, but not a limit
            on prompts.
        digests: `target_digest`, `drafter_digest`, `tokenizer_digest`.
    """
    from specctl.version import __version__

    fields = {
        "schema_ids": {table: schema_id(table) for table in TABLES},
        "sampling": vars(sampling).copy(),
        "policy": policy.model_dump(mode="json"),
        "policy_digest": policy_digest(policy),
        "collect": collect,
        "specctl_version": __version__,
    }
    return TraceHeader.model_validate(fields | digests)


def pair_header(
    policy: Policy,
    sampling: object,
    pair: PairFingerprint,
    domain: Domain,
    tokens: TokenMode = "keep",
    **collect: Any,
) -> TraceHeader:
    """The header of a collection with a pair.

    Args:
        collect: `max_new_tokens`, `draft_vocab_size` (None without a drafter), and further values,
            see `make_header`.
    """
    digests = pair.model_dump(include={"target_digest", "drafter_digest", "tokenizer_digest"})
    if collect["draft_vocab_size"] is None:
        digests["drafter_digest"] = None
    collect |= {"target": pair.target, "drafter": pair.drafter, "dtype": domain.dtype}
    collect |= {"domain": domain.model_dump(mode="json"), **token_header(tokens)}
    return make_header(policy, sampling, collect=collect, **digests)


def token_header(mode: TokenMode) -> dict[str, Any]:
    """The entry of `header.collect` that states the mode; empty for `keep`."""
    return {} if mode == "keep" else {"tokens": {"mode": mode}}


def check_place(place: Place, *, resume: bool) -> None:
    """Checks that a trace set may and can be written at a place, without making it.

    Args:
        resume: accept a place that holds traces.

    Raises:
        OutputError: it cannot be written, holds other files, or traces without `resume`, or lies in
            another set.
        TraceCorruptError: it holds segments and no header.
        StoreError: a bucket that cannot be reached.
    """

    def refuse(problem: str, fix: str = "choose another place") -> OutputError:
        return OutputError(f"trace folder {place.name} {problem}", hint=fix)

    if place.root is not None:
        with output_errors(place.root, "trace folder"):
            above = enclosing_set(place.root)
            if above is not None:
                raise refuse(f"lies in the trace set {above}")
            if place.root.exists() and not place.root.is_dir():
                raise refuse("is a file")
            names = {one.name for one in place.root.iterdir()} if place.root.is_dir() else set()
        # A writer killed before its header was published leaves an empty set: `tmp/` alone.
        if HEADER_NAME not in names and names - FOLDERS:
            raise refuse(f"holds {min(names - FOLDERS)!r} and no {HEADER_NAME}")
        check_folder(place.root, "trace folder")
    if resume and place.holds(HEADER_NAME):
        return
    if not place.keys(ROUNDS):
        return  # a header alone is of a run that finished no prompt
    if not place.holds(HEADER_NAME):
        read_header(place)  # raises, unless another writer has just begun
    else:
        raise refuse("holds traces already", "go on with --resume, or choose another folder")


class TraceWriter:
    """Publishes segments into one set; not thread-safe.

    Attributes:
        finished: prompts of the set when it was opened, and of this writer's segments.
    """

    def __init__(self, place: Place, listing: Listing, policy: dict[str, Any]) -> None:
        self.place, self.finished = place, set(listing.prompt_ids)
        self._last_time = datetime.min.replace(tzinfo=UTC)
        self._texts: dict[str, str] = {}
        for segment in reversed(listing.segments):
            self._texts |= segment.texts
        self._header_digest, self._policy = listing.header.digest, policy
        self._keeps_tokens = token_mode(listing.header.collect) == "keep"
        self._stopped: str | None = None
        self._spool: tempfile.TemporaryDirectory[str] | None = None
        if place.root is None:
            self._spool = tempfile.TemporaryDirectory(prefix="specctl-segments-")
            self._staging = Path(self._spool.name)
        else:
            self._staging = place.root / TEMPORARY

    @classmethod
    def open(
        cls,
        path: str | Path,
        header: TraceHeader,
        *,
        resume: bool = False,
        own_prompts: bool = False,
    ) -> Self:
        """Starts a set, or joins one of the same run.

        Args:
            path: a folder or `s3://bucket/prefix`.
            resume: accept a set that holds finished prompts.
            own_prompts: no other writer has prompts of these ids, so that the segments of the set,
                of which there may be many, need not be read.

        Raises:
            OutputError: a place that cannot be written, holds other files, or traces without
                `resume`.
            TraceMismatchError: traces of another pair, policy, sampling or configuration.
            TraceError: damaged traces.
            StoreError: a bucket that refuses, or that cannot create exclusively.
        """
        place = open_place(path)
        check_place(place, resume=resume)
        if isinstance(place.store, LocalStore):
            with output_errors(place.store.root, "trace folder", RESUME):
                make_folder(place.store.root)
                place.store.clear_temporary(ABANDONED_S)
        else:
            probe(place.store)
        if not place.holds(HEADER_NAME):
            with suppress(KeyTakenError):  # another writer was first
                create(place.store, HEADER_NAME, header.to_bytes())
        fix = "use the same pair and options, or another folder"
        check_equal(place, read_header(place), header, RUN, fix)
        if own_prompts:
            listing = Listing(place, read_header(place), ())
        else:
            listing = read_listing(path, verify=False)
        return cls(place, listing, header.policy)

    def plan(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts that are not finished yet, in order.

        Segments will record digests of their texts, unless tokens are left out: a digest would
        confirm a guessed text.

        Raises:
            TraceMismatchError: a prompt that was finished with another text.
        """
        for prompt in prompts if self._keeps_tokens else ():
            # All that decides how the prompt is decoded.
            facts: dict[str, Any] = {"chat": prompt.chat, "turns": list(prompt.turns)}
            if prompt.before:
                facts["before"] = [list(one) for one in prompt.before]
            text = canonical_json(facts).encode()
            digest = "sha256:" + hashlib.sha256(text).hexdigest()
            before = self._texts.setdefault(prompt.prompt_id, digest)
            if before != digest:
                raise TraceMismatchError(
                    f"trace set {self.place.name} has prompt {prompt.prompt_id!r} with another "
                    f"text: {before[:19]}…, not {digest[:19]}…",
                    hint="give changed prompts ids of their own, or collect into another set",
                )
        return [prompt for prompt in prompts if prompt.prompt_id not in self.finished]

    def commit(
        self,
        prompt_ids: Iterable[str],
        tables: Mapping[str, pa.Table],
        *,
        policy: dict[str, Any] | None = None,
    ) -> Segment:
        """Publishes some prompts; they are durable when this returns.

        Args:
            prompt_ids: finished ones.
            tables: all their rows, by name; one without rows may be absent.
            policy: that decoded them, if it is not the writer's own.

        Raises:
            OutputError: the segment was not published, or may have been; the writer is closed.
            InvariantError: a prompt that is finished already, or twice in the call.
        """
        prompts, what = sorted(prompt_ids), f"trace set {self.place.name}"
        if len(set(prompts) - self.finished) < len(prompts):
            again = [p for p in prompts if p in self.finished] or prompts
            raise InvariantError(f"{what}: prompts are committed twice, among {again[:3]!r}")
        if self._stopped:
            raise OutputError(f"{what} cannot be written after {self._stopped}", hint=AGAIN)
        self._stopped = "an earlier segment failed"  # until this one is published
        digests = [self._texts.get(prompt) for prompt in prompts]
        try:
            with output_errors(Path(self.place.name), "trace folder"):
                segment = self._publish(
                    tables,
                    policy=self._policy if policy is None else policy,
                    prompt_ids=prompts,
                    text_digests=digests if any(digests) else None,
                )
        except StoreError as error:
            raise OutputError(
                f"trace set {error.message}",
                hint=(
                    "free space, correct permissions or reach the store, then run it again "
                    "(with --resume, where the command has it)"
                ),
            ) from error
        self._stopped = None
        self.finished.update(prompts)
        return segment

    def _publish(self, tables: Mapping[str, pa.Table], **fields: Any) -> Segment:
        """Publishes the nodes, then the rounds with a record of both."""
        rounds, nodes = (
            tables[name] if name in tables else arrow_schema(name).empty_table() for name in TABLES
        )
        file, size_bytes = None, 0
        if len(nodes):
            digest, size_bytes = self._put("nodes", nodes)
            file = NodesFile(sha256=f"sha256:{digest}", size_bytes=size_bytes, num_rows=len(nodes))
        record = SegmentRecord(header_digest=self._header_digest, nodes=file, **fields)
        now = datetime.now(UTC)
        # Names ascend even if the clock goes back: `watch` reads prompts in their order.
        now = self._last_time = max(now, self._last_time + timedelta(milliseconds=1))
        stem = f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03d}Z-"
        name, rounds_bytes = self._put("rounds", rounds, stem, {RECORD_KEY: record.to_bytes()})
        return Segment(name, record, len(rounds), size_bytes + rounds_bytes)

    def _put(
        self,
        table: str,
        rows: pa.Table,
        stem: str = "",
        footer: Mapping[bytes, bytes] | None = None,
    ) -> tuple[str, int]:
        """Writes and stores a file; returns its name, `stem` and digest, and its size."""
        make_folder(self._staging.absolute())
        path = self._staging / f"{uuid.uuid4().hex}.parquet"
        try:
            if not self._keeps_tokens:
                rows = without_tokens(table, rows)
            write_parquet(path, table, rows, footer)
            size_bytes = path.stat().st_size
            if size_bytes > MAX_SEGMENT_BYTES:
                raise OutputError(
                    f"a segment of {size_bytes} bytes is above the limit of {MAX_SEGMENT_BYTES}",
                    hint="publish fewer prompts at a time",
                )
            name = stem + file_sha256(path)
            create(self.place.store, f"{table}/{name}.parquet", path)
            return name, size_bytes
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Ends the writer; its segments are durable already."""
        self._stopped = "its writer was closed"
        if self._spool is not None:
            self._spool.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def without_tokens(table: str, rows: pa.Table) -> pa.Table:
    """Rows whose token columns are null."""
    import pyarrow as pa

    rows = rows.cast(arrow_schema(table))
    for name in TOKEN_COLUMNS[table]:
        index = rows.schema.get_field_index(name)
        rows = rows.set_column(index, rows.schema.field(index), pa.nulls(len(rows), pa.int32()))
    return rows


def write_parquet(
    path: Path, table: str, rows: pa.Table, footer: Mapping[bytes, bytes] | None = None
) -> None:
    """Writes rows with the encodings of trace sets, page checksums and more metadata, `footer`.

    Strings that repeat are dictionaries, bytes of floats are split (sign and exponent compress
    well), and zstd compresses everything.
    """
    import pyarrow.parquet as pq

    columns, schema = TABLES[table], arrow_schema(table)
    with (
        path.open("xb") as stream,
        pq.ParquetWriter(
            stream,
            schema,
            compression="zstd",
            use_dictionary=[column.name for column in columns if column.dtype == "dictionary"],
            use_byte_stream_split=[column.name for column in columns if column.dtype == "float32"],
            write_page_checksum=True,
        ) as writer,
    ):
        writer.write_table(rows.cast(schema))
        writer.add_key_value_metadata(dict(footer or {}))


# --------------------------------------------------------------------------- the last segment

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def finishing() -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM until the block ends, for at most `PATIENCE_S`.

    Raises:
        KeyboardInterrupt: after the block, if one came meanwhile.
        OutputError: the block took longer, and an interrupt ended it.
    """
    if threading.current_thread() is not threading.main_thread():  # signals arrive elsewhere
        yield
        return
    begun, waiting = time.monotonic(), list[int]()
    found = {number: signal.getsignal(number) for number in SIGNALS}
    handlers = {number: one for number, one in found.items() if callable(one)}

    def handle(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - begun < PATIENCE_S:
            waiting.append(number)
        else:
            handlers[signal.Signals(number)](number, frame)

    for number in handlers:
        signal.signal(number, handle)
    try:
        yield
    except KeyboardInterrupt:
        raise OutputError(
            f"the last segment of the trace set was interrupted after {PATIENCE_S:g} s",
            hint="decode again what it held, with --resume",
        ) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for arrived in waiting[:1]:
        signal.raise_signal(arrived)
