"""The first load of an artifact happens in a child that may die of it, and only the first."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from specctl.artifacts import isolated as child
from specctl.artifacts import isolation, load_artifact, loading, verified
from specctl.artifacts.files import read_folder
from specctl.artifacts.isolation import PASSED, load_isolated
from specctl.artifacts.manifest import digest_of
from specctl.artifacts.selftest import selftest_bytes
from specctl.errors import ArtifactError
from tests.artifacts.attacks import checked, refused
from tests.artifacts.examples import POLICIES, write_artifact
from tests.artifacts.hostile.costs import quarter_of_a_million_nodes

READ = "import os, sys; os.write(1, b'ready\\n'); sys.stdin.buffer.read(); "


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has loaded nothing yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def isolated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests that went through a child, which is not started."""
    found: list[str] = []

    def note(contents: Mapping[str, bytes]) -> None:
        found.append(digest_of(contents["config.json"]))

    monkeypatch.setattr(loading, "load_isolated", note)
    return found


def forget(state: Path) -> None:
    for marker in state.rglob("verified/*/*"):
        marker.unlink()


def test_only_the_first_load_is_isolated(folder: Path, state: Path, isolated: list[str]) -> None:
    digest = load_artifact(folder).digest
    assert isolated == [], "the writer has just tried it"
    forget(state)
    load_artifact(folder)
    load_artifact(folder)
    assert isolated == [digest]


def test_a_marker_spares_no_check(folder: Path, isolated: list[str]) -> None:
    load_artifact(folder)
    (folder / "policy.onnx").write_bytes(b"x")
    refused(folder, "E_DIGEST")
    assert isolated == []


def test_another_loader_tries_again(
    folder: Path, isolated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified, "LOADER_VERSION", verified.LOADER_VERSION + 1)
    load_artifact(folder)
    assert len(isolated) == 1


def test_markers_of_another_user_count_for_nothing(
    folder: Path, isolated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    load_artifact(folder)
    assert len(isolated) == 1


def test_what_is_refused_in_the_child_is_not_marked(
    folder: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(contents: Mapping[str, bytes]) -> None:
        raise ArtifactError("E_ONNX_LOAD", "child", expected="life", found="death")

    forget(state)
    monkeypatch.setattr(loading, "load_isolated", refuse)
    refused(folder, "E_ONNX_LOAD")
    assert not list(state.rglob("verified/*/*"))


def test_a_state_folder_that_cannot_be_written_is_said_once(
    folder: Path, state: Path, isolated: list[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    forget(state)
    (state.parent / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(state.parent / "file"))
    monkeypatch.setattr(verified, "_said", set())
    load_artifact(folder)
    load_artifact(folder)
    assert len(isolated) == 2
    assert caplog.text.count("cannot be written") == 1


# ------------------------------------------------------------------ a real child


def ask(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends two small files to a child that runs this code instead of the loader."""
    monkeypatch.setattr(isolation, "CODE", code + "  # {path!r}")
    load_isolated({"config.json": b"{}", "README.md": b""})


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        (READ + "os.kill(os.getpid(), 11)", "E_ONNX_LOAD"),
        (READ + "os._exit(0)", "E_ONNX_LOAD"),
        (READ + "os.write(1, b'passed, or so')", "E_ONNX_LOAD"),
        (READ + "os.write(1, b'[1]')", "E_ONNX_LOAD"),
        (READ + "os.write(1, b'[' * 60000)", "E_ONNX_LOAD"),
        (READ + "import time; time.sleep(60)", "E_COST"),
        (READ + "os.kill(os.getpid(), 24)", "E_COST"),
        ("import os; os.write(1, b'ready\\n'); os.kill(os.getpid(), 9)", "E_ONNX_LOAD"),
        ("raise SystemExit", "E_ONNX_LOAD"),
    ],
    ids=[
        "crash",
        "silence",
        "noise",
        "other JSON",
        "deep JSON",
        "sleep",
        "CPU",
        "killed early",
        "no start",
    ],
)
def test_a_child_that_does_not_answer_is_a_refusal(
    code: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "WALL_LIMIT_S", 0.5)
    start = time.monotonic()
    with pytest.raises(ArtifactError) as caught:
        ask(code, monkeypatch)
    checked(caught.value, wanted)
    assert time.monotonic() - start < 30, "one that sleeps is killed, and not waited for"


def test_the_child_sees_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    ask(READ + "assert 'hidden' not in os.environ.values(); os.write(1, b'passed')", monkeypatch)


def test_nothing_but_the_package_decides_what_the_child_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No `sitecustomize` of the folder one stands in, nor of the user; no `PYTHON...` variable."""
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    ask(READ + "assert sys.flags.isolated and os.getcwd() == '/' and not sys.warnoptions; "
        "os.write(1, b'passed')", monkeypatch)  # fmt: skip


def test_the_child_can_neither_write_nor_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One child, since importing takes seconds: each attempt must fail as its limit says."""
    place = tmp_path / "written"
    script = tmp_path / "attempts.py"
    script.write_text(
        f"""
import os, resource, signal, sys
from specctl.artifacts.isolated import CPU_LIMIT_S, limit
def fails(what):
    try:
        what()
    except (OSError, MemoryError):
        return True
    return False
def write():
    with open({str(place)!r}, "wb") as file:
        file.write(b"x")
def opening():
    kept = [open("/dev/null") for _ in range(64)]
assert not fails(lambda: bytearray(300 << 20))
limit()
os.write(1, b"ready\\n")
sys.stdin.buffer.read()
tried = [fails(write), fails(opening), fails(lambda: bytearray(300 << 20))]
tried.append(not fails(lambda: bytearray(200 << 20)))
tried.append(resource.getrlimit(resource.RLIMIT_CORE) == (0, 0))
tried.append(resource.getrlimit(resource.RLIMIT_CPU)[1] < 600)
tried.append(0 < signal.getitimer(signal.ITIMER_PROF)[0] <= CPU_LIMIT_S)
os.write(1, b"passed" if all(tried) else repr(tried).encode())
"""
    )
    root = Path(__file__).parents[2]
    ask(f"import sys; sys.path.insert(0, {str(root)!r}); exec(open({str(script)!r}).read())",
        monkeypatch)  # fmt: skip
    assert not place.exists() or place.stat().st_size == 0


@pytest.mark.parametrize(
    ("told", "kind", "pages", "more"),
    [
        ("900 400 300 5 0 123 0", resource.RLIMIT_DATA, 123, child.MORE_MEMORY_BYTES),
        ("900 400 0 0 0 0 0", resource.RLIMIT_AS, 900, child.MORE_ADDRESS_BYTES),
    ],
    ids=["Linux", "a sandbox that tells the address space alone"],
)
def test_memory_is_limited_beyond_what_the_imports_took(
    told: str,
    kind: int,
    pages: int,
    more: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond nothing every artifact would be refused, as torch alone takes more."""
    (tmp_path / "statm").write_text(told)
    monkeypatch.setattr(child, "STATM", str(tmp_path / "statm"))
    assert child._memory_limit() == (kind, pages * resource.getpagesize() + more)


def with_twin(body: str) -> str:
    """The real child and its limits, but for what it does when it comes to the twin."""
    head = "import sys; sys.path[:] = {path!r}\nfrom specctl.artifacts import isolated\n"
    return f"{head}{body}\nisolated.main()"


@pytest.mark.parametrize(
    ("body", "code", "wanted"),
    [
        ("isolated.run_twin = lambda *_: bytearray(1 << 31)", "E_COST", "at most 256 MiB more"),
        ("def spin(*_):\n while True: pass\nisolated.run_twin = spin", "E_COST", "out of CPU time"),
        (
            "run = isolated.twin_decisions\n"
            "isolated.twin_decisions = lambda *given: [table + 1 for table in run(*given)]",
            "E_SELFTEST",
            "policy.onnx",
        ),
    ],
    ids=["2 GB arena", "endless", "another runtime"],
)
def test_a_twin_that_costs_too_much_or_decides_otherwise_is_refused_by_the_child(
    body: str, code: str, wanted: str, folder: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Families 35 and 33 with a real child: its limits hold, and it does run the twin."""
    forget(state)
    monkeypatch.setattr(isolation, "CODE", with_twin(body))
    monkeypatch.setattr(loading, "check_selftest", lambda *_: pytest.fail("the child came first"))
    assert wanted in str(refused(folder, code))


def test_rules_that_take_more_memory_than_there_is_are_refused_for_their_cost(
    tmp_path: Path,
) -> None:
    """In the child, whose limit it is; their decisions are not what is wrong with them."""
    quarter_of_a_million_nodes(tmp_path / "large")
    assert "allocate memory" in refused(tmp_path / "large", "E_COST").found


def test_a_child_loads_what_is_sound_and_runs_its_twin(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "trees", "c2t_trees")
    load_isolated(read_folder(folder))


@pytest.mark.parametrize(
    ("policy", "run"),
    [
        ("hetero", "twin_decisions"),
        ("echo", "twin_stops"),
        ("c2t_ffn", "twin_log_odds"),
        ("c2t_trees", "twin_log_odds"),
    ],
)
def test_a_twin_of_any_kind_must_decide_as_the_vectors_say(
    policy: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_artifact(tmp_path / policy, policy)
    artifact, files, real = load_artifact(folder), read_folder(folder), getattr(child, run)
    child.run_twin(artifact, files)
    monkeypatch.setattr(child, run, lambda *given: np.asarray(real(*given)) + 1)
    with pytest.raises(ArtifactError, match=r"E_SELFTEST policy\.onnx"):
        child.run_twin(artifact, files)


LOUD = """
import os
find, run = isolated.find_spec, isolated.run_twin
isolated.find_spec = lambda name: print(name, flush=True) or find(name)
isolated.run_twin = lambda *given: (os.write(1, b"!"), run(*given))
"""


def test_what_libraries_print_is_no_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While they are imported, and while they run a twin; from Python or from C."""
    monkeypatch.setattr(isolation, "CODE", with_twin(LOUD))
    load_isolated(read_folder(folder))


def test_a_python_that_greets_is_told_from_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError, match=r"found one that says b'hello,' first"):
        ask("print('hello, world', flush=True)", monkeypatch)


def test_the_messages_of_the_pipe_are_what_they_say() -> None:
    files = {"config.json": b"{}", "policy.onnx": b"\n\n"}
    head, _, body = isolation.frame(files).partition(b"\n")
    assert json.loads(head) == {"config.json": 2, "policy.onnx": 2}
    assert body == b"{}\n\n"
    assert PASSED != b""
    assert selftest_bytes(POLICIES["ar"])


@pytest.mark.parametrize("executable", ["", "/nowhere/python"])
def test_a_python_that_cannot_be_started_is_a_typed_refusal(
    executable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", executable)
    with pytest.raises(ArtifactError) as caught:
        load_isolated({})
    checked(caught.value, "E_ONNX_LOAD")


def test_a_child_that_never_stops_talking_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = READ + "\nwhile True: os.write(1, b'x' * 65536)"
    monkeypatch.setattr(isolation, "CODE", endless.replace("{", "{{").replace("}", "}}"))
    with pytest.raises(ArtifactError) as caught:
        load_isolated({"README.md": b"y" * (1 << 20)})
    checked(caught.value, "E_COST")
    assert "at most 65536 bytes" in str(caught.value)


def test_a_marker_that_is_a_link_or_a_folder_counts_for_nothing(
    folder: Path, state: Path, isolated: list[str]
) -> None:
    digest = load_artifact(folder).digest
    marker = verified._marker(digest)
    marker.unlink()
    marker.symlink_to(state)
    assert not verified.is_verified(digest)
    marker.unlink()
    marker.mkdir()
    assert not verified.is_verified(digest)
    load_artifact(folder)
    assert isolated == [digest]
