"""Families 1 to 11, 18 and 34: names, kinds of files, bytes that are not those listed."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import shutil
import stat
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from specctl.artifacts.files import MIB
from tests.artifacts.hostile import Hostile, Make, broken, given, sound, told, unlisted

NAMES = {
    "../../x": "E_PATH",
    "/abs": "E_PATH",
    "C:\\x": "E_PATH",
    "a\\..\\..\\b": "E_PATH",
    "%2e%2e%2f": "E_PATH",
    "a\x00b": "E_PATH",
    "a\nb": "E_PATH",
    ".": "E_PATH",
    "": "E_PATH",
    "a" * 256: "E_PATH",
    "CON": "E_PATH",
    "Config.json": "E_NAME",
    "polic\u0443.onnx": "E_NAME",
    "re\u0301port.json": "E_NAME",
    "\u202egnp.onnx": "E_NAME",
    "model.pkl": "E_EXTRA",
}


def _listing(name: str) -> Make:
    return told(lambda old: {"files": {**old["files"], name: old["files"]["policy.onnx"]}})


def _named() -> Iterator[tuple[str, Hostile]]:
    for name, code in NAMES.items():
        climbs = set("/\\") & set(name)
        number = {"E_EXTRA": 10, "E_NAME": 11}.get(code, 1 if climbs else 2)
        yield f"{number} {ascii(name)[:24]} listed", Hostile(_listing(name), code)
        if code != "E_PATH" or ("/" not in name and "\0" not in name and 2 < len(name) < 256):
            add = broken(lambda folder, name=name: (folder / name).write_bytes(b"x"))
            yield f"{number} {ascii(name)[:24]} there", Hostile(add, code)


def in_place_of(file: str, put: Callable[[Path, Path], object]) -> Make:
    """Moves a file out of the folder and puts something in its place that leads to it."""

    def write(folder: Path) -> None:
        outside = folder.parent / "outside"
        (folder / file).rename(outside)
        put(folder / file, outside)

    return broken(write)


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, outside: path.symlink_to(outside),
    "hard link": lambda path, outside: os.link(outside, path),
    "pipe": lambda path, outside: os.mkfifo(path),
    "socket": lambda path, outside: os.mknod(path, stat.S_IFSOCK | 0o600),
    "folder": lambda path, outside: path.mkdir(),
    "dangling link": lambda path, outside: path.symlink_to("nowhere"),
}


def _prepared(folder: Path) -> None:
    """The link of a race leads to the very bytes that are listed."""
    shutil.copy(sound(folder) / "policy.onnx", folder.parent / "outside")


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../archive/data.pkl", bytes(MIB))
    return file.getvalue()


OTHER_FORMATS: dict[str, Callable[[], bytes]] = {
    "6 an archive with a name that climbs": _zip,
    "7 a gzip bomb": lambda: gzip.compress(bytes(64 * MIB), 1),
    "34 a pickle": lambda: pickle.dumps([0] * 10**6),
    "34 a pickle of protocol 0": lambda: b"cposix\nsystem\n(S'touch /tmp/was-here'\ntR.",
}
"""None of them needs to be known: a file is refused for not being what its name says."""
PAYLOAD = ("policy.safetensors", "policy.onnx", "README.md")


def _damaged() -> Iterator[tuple[str, Hostile]]:
    for file in (*PAYLOAD, "config.json"):
        code = "E_MANIFEST" if file == "config.json" else "E_DIGEST"
        for part in range(4):
            cut = unlisted(file, lambda data, part=part: data[: len(data) * part // 4])
            yield f"8 {file}, {part}/4", Hostile(cut, code)
        yield f"8 {file}, more", Hostile(unlisted(file, lambda data: data + b"\0"), code)
        gone = broken(lambda folder, file=file: (folder / file).unlink())
        yield f"10 no {file}", Hostile(gone, "E_MISSING")
    for file in PAYLOAD:
        for part in range(4):
            flip = unlisted(file, lambda data, part=part: _flipped(data, part))
            yield f"9 {file}, bit {part}", Hostile(flip, "E_DIGEST")


def _flipped(data: bytes, part: int) -> bytes:
    """Bytes with a bit turned over, in one of four parts."""
    place = (len(data) - 1) * part // 3
    return data[:place] + bytes([data[place] ^ 1 << part]) + data[place + 1 :]


def _sparse(folder: Path) -> None:
    with (folder / "policy.onnx").open("r+b") as file:
        file.truncate(10 << 30)  # 10 GiB declared, nothing stored


def _mixed(folder: Path) -> None:
    shutil.copy(sound(folder.parent / "other", "echo") / "policy.safetensors", folder)


FAMILIES: dict[str, Hostile] = {
    **dict(_named()),
    **{
        f"4 {name}": Hostile(in_place_of("policy.onnx", put), "E_FILETYPE")
        for name, put in KINDS.items()
    },
    **{
        f"5 {kind} swapped in": Hostile(
            _prepared, "E_FILETYPE", race={"file": "policy.onnx", "kind": kind}
        )
        for kind in ("link", "hard link", "pipe")
    },
    **{
        name: Hostile(given("policy.safetensors", make), "E_WEIGHTS")
        for name, make in OTHER_FORMATS.items()
    },
    **dict(_damaged()),
    "7 10 GB declared": Hostile(broken(_sparse), "E_SIZE"),
    "10 known and unlisted": Hostile(
        broken(lambda folder: (folder / "report.json").write_bytes(b"{}")), "E_EXTRA"
    ),
    "10 lists itself": Hostile(_listing("config.json"), "E_EXTRA"),
    "18 tensors of another": Hostile(broken(_mixed), "E_DIGEST"),
}
