"""Families 1 to 11, 18 and 34: names, kinds of files, bytes that are not those listed."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import pickle
import shutil
import socket
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

from specctl.artifacts.files import MIB
from tests.artifacts.hostile.making import Hostile, broken, given, sound, told, unlisted

NAMES = {
    "../../x": "E_PATH",
    "/abs": "E_PATH",
    "C:\\x": "E_PATH",
    "a\\..\\..\\b": "E_PATH",
    "%2e%2e%2f": "E_PATH",
    "%252e": "E_PATH",
    "a\x00b": "E_PATH",
    "a\nb": "E_PATH",
    ".": "E_PATH",
    "..": "E_PATH",
    "": "E_PATH",
    "a" * 256: "E_PATH",
    "CON": "E_PATH",
    "con.json": "E_PATH",
    "Config.json": "E_NAME",
    "polic\u0443.onnx": "E_NAME",
    "re\u0301port.json": "E_NAME",
    "\u202egnp.onnx": "E_NAME",
    "policy\u200b.onnx": "E_NAME",
    "model.pkl": "E_EXTRA",
    "policy.joblib": "E_EXTRA",
}


def family_of(name: str) -> int:
    """The family of an unlawful name."""
    if NAMES[name] == "E_EXTRA":
        return 10
    return 11 if NAMES[name] == "E_NAME" else 1 if set("/\\") & set(name) else 2


def _listing(name: str) -> Callable[[Path], object]:
    return told(lambda old: {"files": {**old["files"], name: old["files"]["policy.onnx"]}})


def _named() -> Iterator[tuple[str, Hostile]]:
    for name, code in NAMES.items():
        label = f"{family_of(name)} {ascii(name)[:24]}"
        yield f"{label} listed", Hostile(_listing(name), code)
        if code != "E_PATH" or ("/" not in name and "\0" not in name and 2 < len(name) < 256):

            def add(folder: Path, name: str = name) -> None:
                (folder / name).write_bytes(b"x")

            yield f"{label} there", Hostile(broken(add), code)


def in_place_of(file: str, put: Callable[[Path, Path], object]) -> Callable[[Path], object]:
    """Moves a file out of the folder and puts something in its place that leads to it."""

    def write(folder: Path) -> None:
        outside = folder.parent / "outside"
        (folder / file).rename(outside)
        put(folder / file, outside)

    return broken(write)


def _socket(path: Path, outside: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the address of a socket may have only 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def _zeros(path: Path, outside: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero: it never ends


def may_make_devices(room: Path) -> bool:
    """Whether this user may: only root may."""
    try:
        _zeros(room / "zero", room)
    except PermissionError:
        return False
    (room / "zero").unlink()
    return True


KINDS = {
    "link": lambda path, outside: path.symlink_to(outside),
    "hard link": lambda path, outside: os.link(outside, path),
    "pipe": lambda path, outside: os.mkfifo(path),
    "folder": lambda path, outside: path.mkdir(),
    "socket": _socket,
    "device": _zeros,
    "dangling link": lambda path, outside: path.symlink_to("nowhere"),
}


def _prepared(folder: Path) -> None:
    """What the link of a race leads to has the very bytes that are listed."""
    shutil.copy(sound(folder) / "policy.onnx", folder.parent / "outside")


def _tar(kind: bytes, name: str = "policy.onnx") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "../../../etc/passwd"
        archive.addfile(member)
    return file.getvalue()


def _zip(name: str, size: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, bytes(size))
    return file.getvalue()


def zstd_bomb(size: int) -> bytes:
    """A Zstandard frame of zeros: each block is 4 bytes that grow to 128 KiB (RFC 8878, 3.1.1)."""
    num_blocks, block = size >> 17, 1 << 17
    blocks = [(block << 3 | 1 << 1 | (i == num_blocks - 1)) for i in range(num_blocks)]
    frame = b"\x28\xb5\x2f\xfd" + b"\x00\x38"  # no size is declared; a window of 128 KiB
    return frame + b"".join(head.to_bytes(3, "little") + b"\0" for head in blocks)


XZ = partial(lzma.compress, preset=0)


@cache
def _zeros_in(pack: Callable[[bytes], bytes]) -> bytes:
    return pack(bytes(64 * MIB))


FOREIGN: dict[str, Callable[[], bytes]] = {
    "6 tar, a link that climbs": lambda: _tar(tarfile.SYMTYPE),
    "6 tar, a hard link": lambda: _tar(tarfile.LNKTYPE),
    "6 tar, a name that climbs": lambda: _tar(tarfile.REGTYPE, "../../x"),
    "6 zip slip": lambda: _zip("../../x", 1),
    "7 gzip bomb": lambda: _zeros_in(gzip.compress),
    "7 zstd bomb": lambda: zstd_bomb(1 << 27),
    "7 xz bomb": lambda: _zeros_in(XZ),
    "34 pickle": lambda: pickle.dumps([0] * 10**6),
    "34 pt": lambda: _zip("archive/data.pkl", MIB),
    "34 joblib": lambda: gzip.compress(pickle.dumps({})),
}
PICKLE_0 = b"cposix\nsystem\n(S'touch /tmp/specctl-was-here'\ntR."
"""Of protocol 0, which has no mark: refused for what it is not."""


def _sparse(folder: Path) -> None:
    with (folder / "policy.onnx").open("r+b") as file:
        file.truncate(10 << 30)  # 10 GiB declared, nothing stored


def _cuts(file: str) -> Iterator[tuple[str, Hostile]]:
    code = "E_MANIFEST" if file == "config.json" else "E_DIGEST"
    for part in (0, 5, 15):

        def cut(data: bytes, part: int = part) -> bytes:
            return data[: len(data) * part // 16]

        yield f"8 {file}, {part}/16", Hostile(unlisted(file, cut), code)
    yield f"8 {file}, more", Hostile(unlisted(file, lambda data: data + b"\0"), code)


def _flip(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _mixed(folder: Path) -> None:
    other = sound(folder.parent / "other", "echo")
    shutil.copy(other / "policy.safetensors", folder)


PAYLOAD = ("policy.safetensors", "selftest.safetensors", "policy.onnx", "README.md")
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
        f"{name}, {file}": Hostile(given(file, make), code)
        for name, make in FOREIGN.items()
        for file, code in (("policy.onnx", "E_TWIN"), ("policy.safetensors", "E_FORMAT"))
    },
    "34 pickle, selftest.safetensors": Hostile(
        given("selftest.safetensors", FOREIGN["34 pickle"]), "E_SIZE"
    ),
    "34 pickle of protocol 0, twin": Hostile(given("policy.onnx", lambda: PICKLE_0), "E_TWIN"),
    **{
        f"34 pickle of protocol 0, {file}": Hostile(given(file, lambda: PICKLE_0), "E_WEIGHTS")
        for file in ("policy.safetensors", "selftest.safetensors")
    },
    "7 10 GB declared": Hostile(broken(_sparse), "E_SIZE"),
    **{name: hostile for file in (*PAYLOAD, "config.json") for name, hostile in _cuts(file)},
    **{f"9 {file}": Hostile(unlisted(file, _flip), "E_DIGEST") for file in PAYLOAD},
    **{
        f"10 no {file}": Hostile(broken(lambda folder, f=file: (folder / f).unlink()), "E_MISSING")  # type: ignore[misc]
        for file in (*PAYLOAD, "config.json")
    },
    "10 known and unlisted": Hostile(
        broken(lambda folder: (folder / "report.png").write_bytes(b"x")), "E_EXTRA"
    ),
    "10 lists itself": Hostile(_listing("config.json"), "E_EXTRA"),
    "18 tensors of another": Hostile(broken(_mixed), "E_DIGEST"),
}
