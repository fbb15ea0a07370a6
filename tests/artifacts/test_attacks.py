"""Every artifact of `hostile`, held to all that is promised of a refusal.

One process loads all of them and is watched: an audit hook sees every file that is opened to
write, every process, connection and unpickled class. The command line meets one of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.artifacts.hostile import families, sound
from tests.cli.command import refuses

FAMILIES = families()
SECONDS, GROWTH_MIB = 2.0, 256
"""Of CPU time, which a busy machine does not lengthen; the most costly refusal takes a third."""
SOUND = ("hetero", "c2t_ffn", "survival", "echo", "mars")
"""Policies with every kind of twin."""
WATCHED = Path(__file__).parent / "watched.py"
CODE = f"""
import runpy, sys
sys.modules["onnx"] = sys.modules["onnxruntime"] = None
runpy.run_path({str(WATCHED)!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A room of its own for each, with the artifact in it."""
    whole = tmp_path_factory.mktemp("hostile")
    made = {}
    for i, (name, hostile) in enumerate(FAMILIES.items()):
        made[name] = whole / str(i)
        made[name].mkdir()
        hostile.make(made[name] / "artifact")
    return made


@pytest.fixture(scope="module")
def watched(rooms: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each load said, cost and did, where onnx is not installed; sound ones among them."""
    asked: dict[str, dict[str, Any]] = {}
    for name, hostile in FAMILIES.items():
        asked[name] = {"folder": str(rooms[name] / "artifact"), "race": hostile.race}
    for policy in SOUND:
        folder = sound(tmp_path_factory.mktemp(policy) / "a", policy)
        asked[policy] = {"folder": str(folder), "race": {}}
    command = [sys.executable, "-c", CODE, SOUND[0]]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, check=True, timeout=300
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_what_must_not_be_loaded_is_not(
    name: str, rooms: dict[str, Path], watched: dict[str, Any]
) -> None:
    """A typed error with its facts, one line, in time and memory, and nothing written or run."""
    folder, code, told = rooms[name] / "artifact", FAMILIES[name].code, watched[name]
    assert told["code"] == code, told
    assert told["artifact"] == str(folder)
    assert told["field"]
    assert told["line"] == (
        f"{code} {told['field']} of {folder}: {told['problem']}; {told['hint']}"
    )
    assert told["line"].isprintable()
    assert len(told["line"]) < 1500
    assert told["exit_code"] == 3
    assert told["cpu_s"] < SECONDS
    assert told["grown_mib"] < GROWTH_MIB
    assert told["did"] == []


@pytest.mark.parametrize("name", SOUND)
def test_sound_artifacts_load_without_pickle_or_onnx(name: str, watched: dict[str, Any]) -> None:
    """The same watch over what passes, with every kind of twin."""
    assert watched[name]["code"] == "loaded", watched[name]
    assert watched[name]["did"] == []
    assert watched["loaded"] == {"libraries": []}


def test_the_verb_says_it(rooms: dict[str, Path]) -> None:
    told = refuses(3, "show", rooms["7 10 GB declared"] / "artifact")
    assert told.startswith("error: E_SIZE ")
    assert told.count("\n") == 1
