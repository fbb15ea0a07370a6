"""Every family of notes/reliability.md 3.3 that is a folder, held to all that is promised of each.

One process loads all of them and is watched: an audit hook sees every file that is opened to
write, every process, connection and unpickled class. Then the command line and a loop that decodes
meet each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer

from specctl.artifacts.compatibility import Expectation
from specctl.artifacts.files import MAX_BYTES
from specctl.artifacts.isolated import MOST_BYTES
from specctl.cli.app import app
from specctl.policy.records import Policy, RootOnly, StaticTree
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.watching import PolicyWatch
from tests.artifacts.examples import PAIR, write_artifact
from tests.artifacts.hostile import FAMILIES, family
from tests.artifacts.hostile.files import may_make_devices
from tests.artifacts.hostile.making import sound
from tests.cli.command import refuses
from tests.runtime.test_decode import loop_of
from tests.runtime.toy import toy_requests

SECONDS, GROWTH_MIB = 2.0, 256
NOT_FOLDERS = {14, 15, 16, 17, 37}
"""Signatures, logs and aliases: `signing/` and `registry/`."""
WATCHED = Path(__file__).parent / "watched.py"
CODE = """
import runpy, sys
sys.modules.update(dict.fromkeys({hidden!r}))
runpy.run_path({path!r}, run_name="__main__")
"""


@dataclass
class Live:
    """A loop that decodes while artifacts are thrown at it."""

    loop: DecodeLoop
    policy: Policy
    num_batches: int = 0

    def __post_init__(self) -> None:
        self.texts: dict[str, list[int]] = {}

    def step(self) -> None:
        if not self.loop.busy:
            self.num_batches += 1
            for request in toy_requests(2):
                name = f"{request.request_id}/{self.num_batches}"
                self.loop.submit(replace(request, request_id=name))
        for done in self.loop.step():
            self.texts[done.request.request_id] = done.token_ids


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """Its texts, at the end, are what the target says by itself."""
    plain = {
        done.request.request_id: done.token_ids
        for done in loop_of(Policy(shape=RootOnly())).run(toy_requests(2))
    }
    policy = Policy(shape=StaticTree(depth=4, top_k=3, num_tokens=12))
    live = Live(loop_of(policy), policy)
    yield live
    while live.loop.busy:
        live.step()
    assert live.texts
    for name, text in live.texts.items():
        assert text == plain[name.split("/")[0]], name


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A room of its own for each, with the artifact in it."""
    whole = tmp_path_factory.mktemp("hostile")
    made = {}
    for i, (name, hostile) in enumerate(FAMILIES.items()):
        made[name] = whole / str(i)
        made[name].mkdir()
        if name != "4 device" or may_make_devices(made[name]):
            hostile.make(made[name] / "artifact")
    return made


def _asked(folder: Path, expect: Expectation | None, race: dict[str, str]) -> dict[str, Any]:
    pair = None if expect is None else expect.pair.model_dump(mode="json")
    domain = None if expect is None else expect.domain.model_dump(mode="json")
    return {"folder": str(folder), "pair": pair, "domain": domain, "race": race}


def watch_loads(
    asked: dict[str, Any], *, state: Path | None = None, hidden: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What `watched.py` says of loads, where some libraries are not installed."""
    environment = {**os.environ, **({"XDG_STATE_HOME": str(state)} if state else {})}
    command = [sys.executable, "-c", CODE.format(hidden=hidden, path=str(WATCHED))]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, env=environment,
        check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def watched(rooms: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each load said, cost and did, of a user who has loaded nothing yet."""
    asked = {
        name: _asked(rooms[name] / "artifact", hostile.expect, hostile.race)
        for name, hostile in FAMILIES.items()
    }
    asked["sound"] = _asked(sound(tmp_path_factory.mktemp("sound") / "artifact"), None, {})
    return watch_loads(asked, state=tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def command() -> Any:
    """The command line, built once: `main` builds it anew, which takes longer than a load."""
    return typer.main.get_command(app)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_must_not_be_loaded_is_not(
    name: str, rooms: dict[str, Path], watched: dict[str, Any], live: Live,
    command: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A typed error with its five facts, exit code 3, one line, in time and memory, nothing
    written, and the policy that was live stays so."""
    folder, hostile, told = rooms[name] / "artifact", FAMILIES[name], watched[name]
    if not folder.exists():
        pytest.skip("this user may make no devices")
    assert told["code"] == hostile.code, told
    assert told["artifact"] == str(folder)
    assert told["field"]
    assert told["line"] == (
        f"{hostile.code} {told['field']} of {folder}: expected {told['expected']}, found "
        f"{told['found']}; {told['fix']}"
    )
    assert told["line"].isprintable()
    assert len(told["line"]) < 1500
    assert told["exit_code"] == 3
    assert told["cpu_s"] < SECONDS
    assert told["grown_mib"] < GROWTH_MIB
    assert told["child_cpu_s"] - watched["sound"]["child_cpu_s"] < SECONDS
    assert told["child_mib"] - watched["sound"]["child_mib"] < GROWTH_MIB
    assert told["did"] == [["subprocess.Popen", sys.executable]] * hostile.is_tried
    monkeypatch.setattr("specctl.artifacts.loading.load_isolated", lambda *_: None)
    monkeypatch.setattr(sys.modules["specctl.cli.app"], "app", command)
    if hostile.expect is None and not hostile.race and (folder / "config.json").exists():
        assert refuses(3, "show", folder) == f"error: {told['line']}\n"
    _keeps_the_old_policy(live, folder, hostile.expect, hostile.code)


def _keeps_the_old_policy(live: Live, folder: Path, expect: Expectation | None, code: str) -> None:
    published = folder.parent / "live"
    watch = PolicyWatch(published, expect or Expectation(PAIR))
    folder.rename(published)  # in one step, as whoever publishes well does
    live.step()
    assert not watch.poll(live.loop)
    assert live.loop.policy == live.policy
    if all(path.exists() for path in published.iterdir()):  # else it waits for a whole copy
        assert getattr(watch.last_error, "code", None) == code


def test_a_sound_artifact_is_loaded_without_pickle_or_onnx(tmp_path: Path) -> None:
    """The same watch over what passes, with every kind of twin, where onnx is not installed."""
    names = ("hetero", "c2t_ffn", "c2t_trees", "echo", "mars")
    asked = {name: _asked(write_artifact(tmp_path / name / "a", name), None, {}) for name in names}
    told = watch_loads({"sound": asked["hetero"], **asked}, hidden=("onnx", "onnxruntime"))
    assert {name: told[name]["code"] for name in names} == dict.fromkeys(names, "loaded")
    assert [told[name]["did"] for name in names] == [[]] * len(names)


def test_caps_add_up_to_less_than_the_message_of_the_child() -> None:
    assert sum(MAX_BYTES.values()) + 4096 < MOST_BYTES


def test_every_family_is_here_or_said_to_be_elsewhere() -> None:
    assert {family(name) for name in FAMILIES} == set(range(1, 40)) - NOT_FOLDERS


def test_nothing_is_written_beside_what_was_there(
    rooms: dict[str, Path], watched: dict[str, Any]
) -> None:
    assert watched["places"]["before"] == watched["places"]["after"]
    assert len(watched["places"]["before"]) > len(rooms)
