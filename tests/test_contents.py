"""Files of another content than a reader's: read, or named for what they are with a next step."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save as safetensors

from specctl.collect.prompts import load_prompts
from specctl.collect.responses import load_responses
from specctl.contents import encoding_of
from specctl.engines.export import read_exported
from specctl.engines.settings import read_settings
from specctl.errors import SpecctlError
from specctl.logs.importing import import_files
from specctl.logs.sources import Source
from specctl.replay.cost.files import load_cost_model
from specctl.replay.facts import read_result
from specctl.replay.results import ReplayScores
from specctl.runtime.identity import read_config
from tests.logs.import_cases import vllm_log

TEXT = "\n".join(vllm_log()) + "\n"
LINES = '{"prompt": "a", "response": "b", "prompt_id": "1"}\n' * 2


def made(write: Callable[[Any], object]) -> bytes:
    """What a library writes into a file."""
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def zipped(name: str, content: bytes = b"a") -> bytes:
    def write(buffer: Any) -> None:
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(name, content)

    return made(write)


def tape(buffer: Any) -> None:
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.log"))


PARQUET = made(lambda file: pq.write_table(pa.table({"n": [1, 2]}), file))
ONE = {"w": torch.zeros(2)}
NO_TEXT: dict[str, tuple[bytes, str]] = {
    "zip": (zipped("a.log"), "a zip archive; unpack it, and give the file inside"),
    "an empty zip": (made(lambda file: zipfile.ZipFile(file, "w").close()), "an empty zip archive"),
    "xlsx": (zipped("[Content_Types].xml"), "a spreadsheet or document of an office; save it as C"),
    "PyTorch": (made(lambda file: torch.save(ONE, file)), r"a model's weights \(PyTorch\)"),
    "arrays": (made(lambda file: np.savez(file, a=np.zeros(2))), "arrays of NumPy"),
    "array": (made(lambda file: np.save(file, np.zeros(2))), "an array of NumPy"),
    "tar": (made(tape), "a tar archive; unpack it"),
    "7z": (b"7z\xbc\xaf\x27\x1c\0\4", "a 7z archive; unpack it"),
    "zstd": (b"\x28\xb5\x2f\xfdrest", "compressed by zstd; decompress it: zstd -d FILE"),
    "lz4": (b"\x04\x22\x4d\x18rest", "compressed by lz4; decompress it: lz4 -d FILE"),
    "pickle": (pickle.dumps({"a": 1}), "a pickle, which is never run"),
    "safetensors": (safetensors(ONE), r"a model's weights \(safetensors\)"),
    "GGUF": (b"GGUF\3\0\0\0" + bytes(16), r"a model's weights \(GGUF\)"),
    "picture": (b"\x89PNG\r\n\x1a\n", "a picture; copy its text"),
    "PDF": (b"%PDF-1.7\n", "a PDF; copy its text"),
    "database": (b"SQLite format 3\0", "a database; export it as CSV or JSON lines"),
    "Arrow": (b"ARROW1\0\0", "an Arrow file; write it as Parquet or JSON lines"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS.*; fetch it"),
}
PACKED = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be")


def of_json(name: str) -> Callable[[Path], object]:
    """Readers of JSON, by the name of the file."""
    return {
        "cost model": load_cost_model,
        "result": lambda path: read_result(path, ReplayScores, "specctl replay"),
        "config": read_config,
        "exported": lambda path: read_exported(path),
        "plugin": lambda path: read_settings(str(path)),
    }[name]


def imported(path: Path) -> object:
    return import_files([Source.of(path)])["num_rounds"]


READERS: dict[str, Callable[[Path], object]] = {
    "log": imported,
    "prompts": load_prompts,
    "responses": load_responses,
    **{name: of_json(name) for name in ("cost model", "result", "config", "exported", "plugin")},
}
NAMES = {"exported": "speculative-config.json", "config": "config.json"}
"""Names by which a file is read; others have any."""


def placed(folder: Path, reader: str, content: bytes) -> Path:
    path = folder / NAMES.get(reader, "a.json")
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", NO_TEXT)
def test_what_is_no_text_is_named_by_every_reader(tmp_path: Path, kind: str, reader: str) -> None:
    content, says = NO_TEXT[kind]
    with pytest.raises(SpecctlError, match=f"is (no text: it is )?{says}") as refused:
        READERS[reader](placed(tmp_path, reader, content))
    assert refused.value.hint


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("form", PACKED)
def test_compressed_files_are_unpacked_or_named(tmp_path: Path, form: str, reader: str) -> None:
    """Logs, prompts and responses are unpacked; what they hold then is told too."""
    pack = PACKED[form]
    if reader in ("log", "prompts", "responses"):
        text = TEXT if reader == "log" else LINES
        assert READERS[reader](placed(tmp_path, reader, pack(text.encode())))
        inner = {"a Parquet file": PARQUET, f"compressed by {form}": pack(b"x"), **{
            says.partition(";")[0]: content for content, says in NO_TEXT.values()
        }}  # fmt: skip
        for says, content in inner.items():
            with pytest.raises(SpecctlError, match=f"is compressed, and what it holds is {says}"):
                READERS[reader](placed(tmp_path, reader, pack(content)))
        return
    with pytest.raises(SpecctlError, match=f"is compressed by {form}; decompress it"):
        READERS[reader](placed(tmp_path, reader, pack(b"{}")))


@pytest.mark.parametrize("reader", ["log", "prompts", "responses"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_texts_are_read_in_their_encoding(tmp_path: Path, encoding: str, reader: str) -> None:
    """With and without a mark, compressed or not; PowerShell and Excel write UTF-16."""
    text, read = TEXT if reader == "log" else LINES, READERS[reader]
    plain = placed(tmp_path, reader, text.encode())
    expected = repr(read(plain))
    for pack in (bytes, *PACKED.values()):
        found = read(placed(tmp_path, reader, pack(text.encode(encoding))))
        assert reader != "log" or repr(found) == expected
        assert found


@pytest.mark.parametrize("reader", ["cost model", "result", "config", "exported", "plugin"])
@pytest.mark.parametrize("encoding", ENCODINGS[2:])
def test_json_in_another_encoding_is_named(tmp_path: Path, encoding: str, reader: str) -> None:
    text = json.dumps({"architectures": ["LlamaForCausalLM"], "kind": "replay"})
    path = placed(tmp_path, reader, text.encode(encoding))
    with pytest.raises(SpecctlError, match=r"is a text in UTF-(16|32); save it as UTF-8"):
        READERS[reader](path)


def test_json_with_a_mark_is_read(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8-sig")
    assert read_config(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "GGUF files are small",
        "SQLite is a database",
        "PK",
        "日本語の文",
        "%PDF is",
        "\0" * 600,
    ],
)
def test_texts_that_look_like_another_kind_stay_texts(tmp_path: Path, text: str) -> None:
    """Zeros stand at the beginning of a log that was rotated by copying."""
    assert encoding_of(text.encode()) == ("utf-8", 0)
    log = placed(tmp_path, "log", text.encode() + b"\n" + TEXT.encode())
    assert imported(log) == 12
