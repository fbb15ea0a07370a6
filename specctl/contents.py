"""Contents of files by their first bytes: texts in their encoding, compressed ones, and others."""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specctl.errors import SpecctlError

HEAD_BYTES = 512
"""Bytes that tell a content: a tape archive is named at byte 257."""
_PACKED: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=stream),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ": lzma.LZMAFile,
}
_ARCHIVE = "unpack it, and give the file inside"
_PICTURE = ("a picture", "copy its text")
_TABLE = "save it as CSV"
_KINDS: dict[bytes, tuple[str, str]] = {
    b"\x1f\x8b": ("compressed by gzip", "decompress it: gunzip FILE"),
    b"BZh": ("compressed by bzip2", "decompress it: bunzip2 FILE"),
    b"\xfd7zXZ": ("compressed by xz", "decompress it: unxz FILE"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "decompress it: zstd -d FILE"),
    b"\x04\x22\x4d\x18": ("compressed by lz4", "decompress it: lz4 -d FILE"),
    b"PK\x03\x04": ("a zip archive", _ARCHIVE),
    b"PK\x05\x06": ("an empty zip archive", _ARCHIVE),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", _ARCHIVE),
    b"PAR1": ("a Parquet file", ""),
    b"ARROW1\0\0": ("an Arrow file", "write it as Parquet or JSON lines"),
    b"SQLite format 3\0": ("a database", "export it as CSV or JSON lines"),
    b"GGUF\2\0": ("a model's weights (GGUF)", ""),
    b"GGUF\3\0": ("a model's weights (GGUF)", ""),
    b"\x93NUMPY": ("an array of NumPy", ""),
    b"\x89HDF": ("a file of HDF5", ""),
    b"\x89PNG": _PICTURE,
    b"\xff\xd8\xff": _PICTURE,
    b"GIF87a": _PICTURE,
    b"GIF89a": _PICTURE,
    b"%PDF-": ("a PDF", "copy its text"),
    b"version https://git-lfs": ("a pointer of Git LFS, not the file", "fetch it: git lfs pull"),
    **{bytes([128, protocol]): ("a pickle, which is never run", "") for protocol in range(2, 6)},
}
"""By first bytes, what a file is, and what makes a text of it, where something does."""
_IN_ZIP = {
    b"data.pkl": ("a model's weights (PyTorch)", ""),
    b".npy": ("arrays of NumPy", ""),
    b"[Content_Types].xml": ("a spreadsheet or document of an office", _TABLE),
    b"mimetypeapplication/vnd.oasis": ("a spreadsheet or document of an office", _TABLE),
}
_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",  # begins as UTF-16 does
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_ZEROS: dict[tuple[int, ...], str] = {
    (0, 1, 1, 1): "utf-32-le",
    (1, 1, 1, 0): "utf-32-be",
    (0, 1, 0, 1): "utf-16-le",
    (1, 0, 1, 0): "utf-16-be",
}
"""Encodings by the bytes of four that are zero where a text is mostly ASCII."""


def unpacked(stream: Any) -> Any:
    """A stream from its beginning, decompressed if it is of gzip, bzip2 or xz."""
    head = stream.read(8)
    stream.seek(0)
    unpack = [made for magic, made in _PACKED.items() if head.startswith(magic)]
    return unpack[0](stream) if unpack else stream


def encoding_of(head: bytes) -> tuple[str, int]:
    """The encoding of a text by its first bytes, and the length of its mark; UTF-8 where nothing
    tells another."""
    for mark, name in _MARKS.items():
        if head.startswith(mark):
            return name, len(mark)
    columns = [head[: len(head) // 4 * 4][place::4] for place in range(4)]
    shares = [column.count(0) / max(len(column), 1) for column in columns]
    if all(not 0.1 < share < 0.9 for share in shares):
        return _ZEROS.get(tuple(round(share) for share in shares), "utf-8"), 0
    return "utf-8", 0


def no_text(head: bytes) -> tuple[str, str] | None:
    """Name of a file that is no text, by its first bytes, and what makes a text of it, empty where
    nothing does; None for a text, in whatever encoding."""
    if head.startswith(b"PK\x03\x04"):
        for mark, found in _IN_ZIP.items():
            if mark in head:
                return found
    for magic, kind in _KINDS.items():
        if head.startswith(magic):
            return kind
    if head[257:262] == b"ustar":
        return "a tar archive", _ARCHIVE
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 1 << 27:
        return "a model's weights (safetensors)", ""
    return None


def utf8_of(path: Path, refusal: type[SpecctlError], hint: str) -> bytes:
    """The bytes of a file of UTF-8 without its mark, for a reader of JSON.

    Args:
        refusal: raised for another file, which it names.
        hint: the next step where no conversion helps.
    """
    data = path.read_bytes()
    encoding, mark = encoding_of(data[:HEAD_BYTES])
    what, fix = no_text(data[:HEAD_BYTES]) or ("", "")
    if encoding != "utf-8":
        what, fix = f"a text in {encoding[:6].upper()}", "save it as UTF-8"
    if what:
        raise refusal(f"{path} is {what}", hint=fix or hint)
    return data[mark:]
