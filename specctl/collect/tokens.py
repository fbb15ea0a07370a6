"""Token ids in a trace set: kept, hashed, or left out.

Hashing is a permutation of the vocabulary that a secret key chooses. It keeps the equality of
tokens, which fits may need, and nothing else of their identity. A permutation is no cipher:
frequencies stay visible, and other columns tell rows apart (docs/trace-format.md, "Token ids").
"""

from __future__ import annotations

import hashlib
import secrets
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from specctl.collect.prompts import Naming, Prompt
from specctl.durable import (
    READ_AGAIN,
    beside,
    make_folder,
    output_errors,
    publish_link,
    write_new,
)
from specctl.errors import InputError, InvariantError, UsageError, reason_of
from specctl.logs.trace_files import HEADER_NAME, Place, read_header
from specctl.records import canonical_json
from specctl.trace import TOKEN_COLUMNS, arrow_schema, token_mode

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

TokenMode = Literal["keep", "hash", "drop"]
KEY_BYTES = 32


@dataclass(frozen=True)
class TokenTreatment:
    """A writer's way of storing token ids.

    Attributes:
        key: of the permutation; only with `hash`. vocab_size: its domain, token ids.
    """

    mode: TokenMode = "keep"
    key: bytes = b""
    vocab_size: int = 0

    @property
    def header(self) -> dict[str, Any]:
        """Its entry in `header.collect`; nothing where tokens are kept."""
        if self.mode == "keep":
            return {}
        named = {}
        if self.mode == "hash":
            # Keyed with another word than the permutation: the digest tells nothing of the order.
            digest = hashlib.blake2b(b"identity", key=self.key, digest_size=32).hexdigest()
            named = {"key_digest": f"blake2b:{digest}", "vocab_size": self.vocab_size}
        return {"tokens": {"mode": self.mode, **named}}

    def applied(self, table: str, rows: pa.Table) -> pa.Table:
        """Rows with their token columns treated."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self.mode == "keep":
            return rows
        rows = rows.cast(arrow_schema(table))
        for name in TOKEN_COLUMNS[table]:
            index, ids = rows.schema.get_field_index(name), rows[name]
            hidden = pa.nulls(len(ids), pa.int32())
            if self.mode == "hash":
                largest = pc.max(ids).as_py() or 0
                if len(ids) and largest >= self.vocab_size:
                    raise InvariantError(
                        "token ids",
                        expected=f"ids below the vocabulary's size, {self.vocab_size}",
                        found=str(largest),
                        fix="report this",
                    )
                hidden = pa.array(self._permutation).take(ids)
            rows = rows.set_column(index, rows.schema.field(index), hidden)
        return rows

    def text_digest(self, prompt: Prompt) -> str | None:
        """Of a prompt's text and how it is decoded, so that `--resume` notices another text.

        Nobody may try guesses where token ids are hidden: with `hash` it is keyed as they are, with
        `drop` there is none.
        """
        text = canonical_json({"chat": prompt.chat, "turns": list(prompt.turns)}).encode()
        if self.mode == "keep":
            return "sha256:" + hashlib.sha256(text).hexdigest()
        if self.mode == "drop":
            return None
        keyed = hashlib.blake2b(text, key=self.key, digest_size=32, person=b"prompt text")
        return f"blake2b:{keyed.hexdigest()}"

    @cached_property
    def _permutation(self) -> npt.NDArray[np.int32]:
        """`[V]` int32: the rank of each id by its keyed hash."""
        import numpy as np

        draws = [
            hashlib.blake2b(token.to_bytes(4, "big"), key=self.key, digest_size=16).digest()
            for token in range(self.vocab_size)
        ]
        ranked = np.empty(self.vocab_size, np.int32)
        ranked[sorted(range(self.vocab_size), key=draws.__getitem__)] = np.arange(self.vocab_size)
        return ranked


KEEP = TokenTreatment()


def token_treatment(mode: str, key_file: Path | None, vocab_size: int) -> TokenTreatment:
    """The treatment that `--tokens` and `--token-key` ask for.

    Args:
        key_file: made where it is absent, readable by its owner alone.

    Raises:
        UsageError: another mode, or a key without `hash` or none with it.
        InputError: a key file of another size.
        OutputError: one that cannot be written.
    """
    check_tokens(mode, key_file)
    if mode == "hash" and key_file is not None:
        return TokenTreatment("hash", _key(key_file), vocab_size)
    return TokenTreatment("drop") if mode == "drop" else KEEP


def prompt_naming(mode: str, key_file: Path | None) -> Naming:
    """Names of prompts without an id, which must not give away the texts that `mode` hides.

    Raises:
        As `token_treatment`.
    """
    check_tokens(mode, key_file)
    return Naming(b"" if key_file is None else _key(key_file), by_file=mode == "drop")


def check_key_file(place: Place, key_file: Path | None) -> None:
    """Refuses a key inside the set, and one to be made for a set that was hashed with another.

    Whoever gets the set would get the key too. It is not made yet.

    Raises:
        UsageError: the file lies, or would lie, below the folder.
        InputError: the set has a key, and there is no such file.
        TraceError: the set's header cannot be read.
    """
    if key_file is None:
        return
    if place.root is not None and key_file.resolve().is_relative_to(place.root.resolve()):
        raise UsageError(
            f"--token-key {key_file}",
            expected="a file outside of the trace set",
            found=f"one in {place.root}",
            fix="keep it where the set is not shared from",
        )
    if key_file.exists() or not place.holds(HEADER_NAME):
        return
    if token_mode(read_header(place).collect) == "hash":
        raise InputError(
            f"--token-key {key_file}",
            expected=f"the key that {place.name} was hashed with",
            found="no such file",
            fix="name that file; without it the set cannot be gone on with",
        )


def check_tokens(mode: str, key_file: Path | None) -> None:
    """Refuses options that do not fit each other, before a model is loaded.

    Raises:
        UsageError: another mode, or a key without `hash` or none with it.
    """
    if mode not in get_args(TokenMode):
        raise UsageError("--tokens", expected="keep, hash or drop", found=repr(mode), fix="choose")
    if (mode == "hash") != (key_file is not None):
        raise UsageError(
            f"--tokens {mode}",
            expected="--token-key FILE with hash, and with nothing else",
            found="none" if key_file is None else str(key_file),
            fix="name a file outside of the trace set, or leave --token-key out",
        )


def _key(path: Path) -> bytes:
    """The bytes of a key file, which is made where it is absent.

    Whole or not at all; of several processes that start at once, one makes it for all.
    """
    with output_errors(path, "key file"):
        if not path.exists():
            make_folder(path.parent.absolute())
            staged = beside(path.absolute())
            try:
                write_new(staged, secrets.token_bytes(KEY_BYTES), mode=0o600)
                with suppress(FileExistsError):
                    publish_link(staged, path.absolute())
            finally:
                staged.unlink(missing_ok=True)

    def refuse(expected: str, found: str, fix: str) -> InputError:
        return InputError(f"key file {path}", expected=expected, found=found, fix=fix)

    try:
        key = path.read_bytes()
    except OSError as error:
        found = reason_of(error)
        raise refuse("a file that can be read", found, READ_AGAIN) from error
    if len(key) != KEY_BYTES:
        fix = "name the right file, or one that does not exist yet"
        raise refuse(f"{KEY_BYTES} bytes that `--tokens hash` made", f"{len(key)} bytes", fix)
    return key
