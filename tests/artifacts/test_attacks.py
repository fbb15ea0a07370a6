"""Every family of notes/reliability.md 3.3 that is a folder, held to all that is promised of each.

One process loads all of them and is watched: an audit hook sees every file that is opened to
write, every process, connection and unpickled class. Then the command line and a loop that decodes
meet each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from specctl.artifacts.compatibility import Expectation
from specctl.artifacts.files import MAX_BYTES, MIB
from specctl.cli.app import app
from specctl.policy import Policy, RootOnly, StaticTree
from specctl.runtime.sources import FolderSource
from specctl.runtime.watching import Watch
from tests.artifacts.examples import PAIR
from tests.artifacts.hostile import families, family, sound
from tests.artifacts.hostile.files import may_make_devices
from tests.cli.command import refuses
from tests.runtime.toy import toy_requests
from tests.runtime.toy_loops import loop_of

FAMILIES = families()
SECONDS, GROWTH_MIB = 2.0, 256
"""Of CPU time, which a busy machine does not lengthen; the most costly refusal takes a fifth."""
SOUND = ("hetero", "c2t_ffn", "c2t_trees", "echo", "mars")
"""Policies with every kind of twin."""
NOT_FOLDERS = {14, 15, 16, 17, 36, 37}
"""Signatures, logs and aliases: `signing/` and `registry/`; forged figures."""
WATCHED = Path(__file__).parent / "watched.py"
CODE = """
import runpy, sys
sys.modules["onnx"] = sys.modules["onnxruntime"] = None
runpy.run_path({path!r}, run_name="__main__")
"""


class Live:
    """A loop that decodes while artifacts are thrown at it."""

    STEP_EVERY = 8

    def __init__(self, policy: Policy) -> None:
        self.loop, self.policy = loop_of(policy), policy
        self.texts: dict[str, list[int]] = {}
        self.num_thrown = self.num_batches = 0

    def thrown(self) -> None:
        """Decodes a round now and then, of requests that never end."""
        self.num_thrown += 1
        if self.num_thrown % self.STEP_EVERY == 1:
            if not self.loop.busy:
                self._submit()
            self.step()

    def _submit(self) -> None:
        self.num_batches += 1
        for request in toy_requests(2):
            name = f"{request.request_id}/{self.num_batches}"
            self.loop.submit(replace(request, request_id=name))

    def step(self) -> None:
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
    live = Live(policy)
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


@pytest.fixture(scope="module")
def watched(rooms: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each load said, cost and did, of a user who has loaded nothing but the sound ones, where
    onnx is not installed."""
    asked = {
        name: _asked(rooms[name] / "artifact", hostile.expect, hostile.race)
        for name, hostile in FAMILIES.items()
    }
    for policy in SOUND:
        asked[policy] = _asked(sound(tmp_path_factory.mktemp(policy) / "a", policy), None, {})
    command = [sys.executable, "-c", CODE.format(path=str(WATCHED)), SOUND[0]]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True,
        check=True, timeout=300,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


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
    assert told["did"] == []
    monkeypatch.setattr(sys.modules["specctl.cli.app"], "app", command)
    if hostile.expect is None and not hostile.race and (folder / "config.json").exists():
        assert refuses(3, "show", folder) == f"error: {told['line']}\n"
    _keeps_the_old_policy(live, folder, hostile.expect, hostile.code)


def _keeps_the_old_policy(live: Live, folder: Path, expect: Expectation | None, code: str) -> None:
    published = folder.parent / "live"
    watch = Watch(FolderSource(published, expect or Expectation(PAIR)), live.loop)
    folder.rename(published)  # in one step, as whoever publishes well does
    live.thrown()
    assert not watch.poll()
    assert live.loop.policy == live.policy
    if all(path.exists() for path in published.iterdir()):  # else it waits for a whole copy
        assert getattr(watch.last_error, "code", None) == code


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_artifact_is_loaded_without_pickle_or_onnx(
    name: str, watched: dict[str, Any]
) -> None:
    """The same watch over what passes, with every kind of twin."""
    assert watched[name]["code"] == "loaded", watched[name]
    assert watched[name]["did"] == []


def test_caps_add_up_to_a_small_part_of_what_a_refusal_may_take() -> None:
    assert sum(MAX_BYTES.values()) < GROWTH_MIB * MIB / 4


def test_every_family_is_here_or_said_to_be_elsewhere() -> None:
    assert {family(name) for name in FAMILIES} == set(range(1, 40)) - NOT_FOLDERS


def test_nothing_is_written_beside_what_was_there(
    rooms: dict[str, Path], watched: dict[str, Any]
) -> None:
    assert watched["places"]["before"] == watched["places"]["after"]
    assert len(watched["places"]["before"]) > len(rooms)
