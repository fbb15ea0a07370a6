"""Two CPU seconds, 256 MiB, nothing written, nothing run, the old policy live: whatever comes.

The families that could bloat are loaded by one child that is watched: an audit hook sees every
file that is opened to write, every process, connection and unpickled class.
"""

from __future__ import annotations

import gzip
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts.compatibility import Expectation
from specctl.artifacts.files import MAX_BYTES, MIB
from specctl.artifacts.onnx.wire import encode_varint
from specctl.artifacts.tensors import policy_tensors, policy_tree, write_tensors
from specctl.features import features_digest
from specctl.policy.parse import canonical_json
from specctl.policy.records import Policy, RootOnly, ScoredTree, StaticTree
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.sources import FolderSource
from specctl.runtime.watching import Watch
from tests.artifacts.examples import (
    PAIR,
    read_manifest,
    replace_file,
    write_artifact,
    write_manifest,
)
from tests.artifacts.hostile_onnx import many_nodes, nested_ifs
from tests.artifacts.test_attacks_content import SECRETS, stumps
from tests.cli.command import refuses
from tests.runtime.test_decode import loop_of
from tests.runtime.toy import toy_requests

SECONDS, GROWTH_MIB = 2.0, 256
Make = Callable[[Path], None]


def given(file: str, make: Callable[[], bytes]) -> Make:
    """An artifact with one file replaced and listed."""
    return lambda folder: replace_file(write_artifact(folder), file, make())


def manifest_of(make: Callable[[], bytes]) -> Make:
    def write(folder: Path) -> None:
        (write_artifact(folder) / "config.json").write_bytes(make())

    return write


def declared(length: int, header: bytes = b"") -> bytes:
    return length.to_bytes(8, "little") + header


def header_of(**tensors: object) -> bytes:
    text = json.dumps(tensors).encode()
    return declared(len(text), text)


def costly_trees(folder: Path) -> None:
    """Lawful numbers whose tables would take three gigabytes."""
    policy = Policy(shape=ScoredTree(scorer=stumps(21_000), beta=0.1))
    write_artifact(folder, "c2t_trees")
    names = ["joint_prob"]
    changes = {"policy": policy_tree(policy), "features": names}
    changes["feature_digest"] = features_digest(names)
    write_manifest(folder, {**read_manifest(folder), **changes})
    replace_file(folder, "policy.safetensors", write_tensors(policy_tensors(policy)))


def sparse(folder: Path) -> None:
    with (write_artifact(folder) / "policy.onnx").open("r+b") as file:
        file.truncate(10 << 30)


def field(number: int, data: bytes) -> bytes:
    return encode_varint(number << 3 | 2) + encode_varint(len(data)) + data


MANY = {f"k{i}": 0 for i in range(4096)}
HUGE = {"dtype": "F32", "shape": [2**30, 2**30], "data_offsets": [0, 2**62]}


def values(tree: dict[str, object]) -> Make:
    return manifest_of(lambda: canonical_json(tree).encode())


FAMILIES: dict[str, tuple[Make, str]] = {
    "7 10 GB declared": (sparse, "E_SIZE"),
    "7 gzip bomb": (given("policy.onnx", lambda: gzip.compress(bytes(64 * MIB))), "E_FORMAT"),
    "7 header of 2^63": (given("policy.safetensors", lambda: declared(2**63 - 1)), "E_WEIGHTS"),
    "7 header of 8 MiB": (
        given("policy.safetensors", lambda: declared(8 * MIB - 8, b"{" * (8 * MIB - 8))),
        "E_WEIGHTS",
    ),
    "22 shape of 2^60": (
        given("policy.safetensors", lambda: header_of(x=HUGE)),
        "E_WEIGHTS",
    ),
    "12 nesting": (manifest_of(lambda: b"[" * MIB), "E_MANIFEST"),
    "12 many keys": (values({f"{i}": 0 for i in range(60_000)}), "E_MANIFEST"),
    "12 list of half a million": (
        values({"artifact_version": 2, "x": [0] * 500_000}),
        "E_MANIFEST",
    ),
    "12 huge numbers": (
        manifest_of(lambda: b'{"artifact_version":2,"x":[' + b"1" * 900_000 + b"]}"),
        "E_MANIFEST",
    ),
    "12 objects in objects": (
        values({"artifact_version": 2, "x": [MANY] * 20}),
        "E_SCHEMA",
    ),
    "23 10^6 nodes": (given("policy.onnx", lambda: many_nodes(10**6)), "E_ONNX_GRAPH"),
    "23 10^4 deep": (given("policy.onnx", lambda: nested_ifs(10**4)), "E_ONNX_GRAPH"),
    "23 10^7 names": (
        given("policy.onnx", lambda: field(7, field(1, b"\x0a\x00" * 8_000_000))),
        "E_ONNX_GRAPH",
    ),
    "22 16 MiB of dims": (
        given("policy.onnx", lambda: field(7, field(5, b"\x08\x01" * 8_000_000))),
        "E_ONNX_GRAPH",
    ),
    "34 pickle": (given("policy.safetensors", lambda: pickle.dumps([0] * 10**6)), "E_FORMAT"),
    "35 3 GB of tables": (costly_trees, "E_COST"),
    "36 report of 2 MiB": (
        given("report.json", lambda: b"[" + b"0," * (MIB - 2) + b"0]"),
        "E_MANIFEST",
    ),
    "39 card of 1 MiB": (
        given("README.md", lambda: (b"aws_secret=://" * 74_000) + SECRETS["aws"].encode()),
        "E_PRIVACY",
    ),
}

WATCHED = """
import json, logging, sys, time
import specctl.artifacts as artifacts
from specctl.errors import ArtifactError
import safetensors.numpy
logging.disable()
seen = []
def hook(event, args):
    writes = event == "open" and args[1] not in (None, "r", "rb") and "/proc/self" not in str(args)
    if writes or event.startswith(("pickle", "subprocess", "socket", "os.system", "os.exec")):
        seen.append([event, repr(args)[:80]])
    if event == "import" and args[0] in ("joblib", "onnx", "onnxruntime"):
        seen.append([event, args[0]])
def memory():
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024
def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
folders, told = json.load(sys.stdin), {}
sys.addaudithook(hook)
for name, folder in folders.items():
    forget_peak()
    before, start = memory(), time.process_time()
    try:
        artifacts.load_artifact(folder)
        code = "loaded"
    except ArtifactError as error:
        code = error.code
    told[name] = [code, time.process_time() - start, memory() - before]
print(json.dumps({"told": told, "seen": seen}))
"""


def watched(code: str, folders: dict[str, str]) -> Any:
    command, asked = [sys.executable, "-c", code], json.dumps(folders)
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def texts_of(loop: DecodeLoop) -> dict[str, list[int]]:
    return {done.request.request_id: done.token_ids for done in loop.run(toy_requests(2))}


def test_what_could_bloat_is_refused_in_time_and_memory(tmp_path: Path) -> None:
    folders = {name: str(tmp_path / str(i)) for i, name in enumerate(FAMILIES)}
    for name, (make, _) in FAMILIES.items():
        make(Path(folders[name]))
    before = sorted(tmp_path.rglob("*"))
    found = watched(WATCHED, folders)
    assert {name: told[0] for name, told in found["told"].items()} == {
        name: code for name, (_, code) in FAMILIES.items()
    }
    slow = {name: told for name, told in found["told"].items() if told[1] > SECONDS}
    large = {name: told for name, told in found["told"].items() if told[2] > GROWTH_MIB}
    assert not slow, slow
    assert not large, large
    assert found["seen"] == [], "written, run, unpickled or asked on the way"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_sound_artifact_is_loaded_without_pickle_or_onnx(tmp_path: Path) -> None:
    """The same watch over what passes, with every kind of twin, where onnx is not installed."""
    names = ("hetero", "c2t_ffn", "c2t_trees", "echo", "mars")
    folders = {name: str(write_artifact(tmp_path / name, name)) for name in names}
    hidden = "import sys\nsys.modules['onnx'] = sys.modules['onnxruntime'] = None\n"
    found = watched(hidden + WATCHED, folders)
    assert {name: told[0] for name, told in found["told"].items()} == dict.fromkeys(names, "loaded")
    assert found["seen"] == []


def test_caps_add_up_to_less_than_the_message_of_the_child() -> None:
    from specctl.artifacts.isolated import MOST_BYTES

    assert sum(MAX_BYTES.values()) + 4096 < MOST_BYTES


SAMPLE = ("7 10 GB declared", "12 huge numbers", "22 shape of 2^60", "23 10^4 deep", "34 pickle")


@pytest.mark.parametrize("name", SAMPLE)
def test_the_command_line_refuses_in_one_line_with_exit_3(name: str, tmp_path: Path) -> None:
    make, code = FAMILIES[name]
    make(tmp_path / "artifact")
    line = refuses(3, "show", tmp_path / "artifact")
    assert code in line
    assert line.rstrip("\n").isprintable()


def test_a_hostile_artifact_leaves_the_old_policy_live(tmp_path: Path) -> None:
    """One after the other under a loop that decodes: none takes over, the text is plain's."""
    plain = texts_of(loop_of(Policy(shape=RootOnly())))
    policy = Policy(shape=StaticTree(depth=4, top_k=3, num_tokens=12))
    loop, done = loop_of(policy), {}
    for request in toy_requests(2):
        loop.submit(request)
    refusals = []
    for i, name in enumerate(SAMPLE):
        watch = Watch(FolderSource(tmp_path / str(i), Expectation(PAIR)), loop)
        FAMILIES[name][0](tmp_path / str(i))
        assert not watch.poll()
        refusals.append(getattr(watch.last_error, "code", None))
        done |= {c.request.request_id: c.token_ids for c in loop.step()} if loop.busy else {}
        assert loop.policy == policy
    assert refusals == [FAMILIES[name][1] for name in SAMPLE]
    while loop.busy:
        done |= {c.request.request_id: c.token_ids for c in loop.step()}
    assert done == plain
