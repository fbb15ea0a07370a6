"""`specctl` alone prints commands that work; `doctor` says what works here."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import typer

from specctl.cli import load_all_verbs
from specctl.cli.app import FIRST_SCREEN
from specctl.embedded import embedded_path
from specctl.engines.export import ENGINES
from specctl.errors import SetupError
from tests.cli.command import passes, specctl
from tests.cli.conftest import SMALL
from tests.runtime.checkpoints import publish

SHORTER: dict[str, tuple[object, ...]] = {
    "collect": (*SMALL, "--batch-size", 8, "--limit", 16),
    "run": (*SMALL, "--limit", 2),
    "profile": ("--quick", "--batch-sizes", 1, "--contexts", 16),
    "tune": ("--held-out", 0.5),
}
"""Options that a test adds to verbs."""


def commands() -> dict[str, list[str]]:
    """By the heading in front of them, without what follows it."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in FIRST_SCREEN.splitlines():
        if line.startswith("  "):
            found.setdefault(heading, []).append(line.strip())
        elif line:
            heading = line.partition(":")[0].partition(",")[0]
    return found


def test_no_verb_prints_three_commands_for_each_kind_of_engine() -> None:
    assert passes().out == FIRST_SCREEN
    assert max(map(len, FIRST_SCREEN.splitlines())) <= 100
    (_, [of_log]), (_, [profile]), *engines = commands().items()
    assert of_log == "specctl import server.log"
    command: Any = typer.main.get_command(load_all_verbs())
    assert len(command.commands) <= 16
    known = {name for param in command.commands["profile"].params for name in param.opts}
    assert {word for word in profile.split() if word.startswith("-")} <= known
    assert [name for name, _ in engines] == ["vLLM", "SGLang", "llama.cpp", "transformers"]
    assert [len(lines) for _, lines in engines] == [3, 3, 5, 3]
    # Two clocks: that of llama.cpp's server is read by its block alone.
    for name, lines in engines:
        [clock] = {
            words[words.index("--cost-model") + 1]
            for words in map(str.split, lines)
            if "tune" in words
        }
        assert clock == ("llamacpp.json" if name == "llama.cpp" else "cost_model.json")


@pytest.mark.usefixtures("busy_machine")
def test_its_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cost: Path) -> None:
    """On the embedded pair, as its last sentence tells: one collection serves all, and stands for
    that of vLLM's plugin."""
    monkeypatch.chdir(tmp_path)
    for clock in ("cost_model.json", "llamacpp.json"):
        (tmp_path / clock).write_bytes(cost.read_bytes())
    told = re.search(r"leave (--.*) out, and take\s+`(\w+)` for PROMPTS", FIRST_SCREEN)
    assert told
    out, prompts = re.compile("|".join(f" {one}" for one in told[1].split(" and "))), told[2]
    for line in chain(
        *(commands()[name] for name in ("SGLang", "vLLM", "llama.cpp", "transformers"))
    ):
        line = out.sub("", line).replace("PROMPTS", prompts)
        assert not re.search("[A-Z]{3}", line), line
        program, *words = shlex.split(line)
        if program != "specctl":
            assert line.startswith("llama-server -m TARGET.gguf -md DRAFTER.gguf --spec-type")
        elif words[0] != "collect" or not (tmp_path / "traces").exists():
            lacks_gguf = find_spec("gguf") is None or find_spec("xllamacpp") is None
            if words[0] != "tune" and "llamacpp" in words and lacks_gguf:
                continue
            short = SHORTER.get(words[0], ())
            assert specctl(*words, *short).code == 0, line
    assert (tmp_path / "tuned" / "policy").is_dir()


# --------------------------------------------------------------------------- doctor


NOT_ENGINES = ("device", "models", "drafter", "registry")


def test_doctor_says_ok_and_what_to_do(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {one["what"]: one["found"] for one in json.loads(passes("doctor", "--json").out)}
    assert shown["registry"] == f"{registry}: 0 names"
    monkeypatch.delenv("SPECCTL_REGISTRY", raising=False)
    found = {one["what"]: one for one in json.loads(passes("doctor", "--json").out)}
    states = {what: one["state"] for what, one in found.items()}
    assert found.keys() - {one.title for one in ENGINES.values()} == set(NOT_ENGINES)
    assert [states[what] for what in NOT_ENGINES] == ["ok", "ok", "ok", "-"]
    for engine in ENGINES.values():
        assert engine.checked.partition(":")[0] in found[engine.title]["found"]
        assert (states[engine.title] == "-") == ("not installed" in found[engine.title]["found"])
    assert "inputs of layers 2, 4, 5, as config.json lists them" in found["drafter"]["found"]
    assert "8 tokens decoded" in found["models"]["found"]
    assert "torch 2" in found["device"]["found"]
    monkeypatch.setenv("SPECCTL_REGISTRY", str(tmp_path / "absent"))
    ended = specctl("doctor", "--json")
    assert ended.code == SetupError.exit_code
    assert "registry wrong" in ended.err
    assert {one["what"]: one for one in json.loads(ended.out)}["registry"]["fix"]


def test_doctor_takes_a_pair_and_says_what_was_assumed(tmp_path: Path) -> None:
    """Of a drafter that cannot run, its kind, as `run` does."""
    head = shutil.copytree(embedded_path("eagle3"), tmp_path / "head")
    config = json.loads((head / "config.json").read_text())
    lists = ("eagle_config", "eagle_aux_hidden_state_layer_ids")
    (head / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if name not in lists})
    )
    shown = json.loads(passes("doctor", "embedded", head, "--json").out)
    [said] = [one["found"] for one in shown if one["what"] == "drafter"]
    assert "inputs of layers 2, 4, 5 assumed, as config.json lists none" in said
    assert "of 64 tokens of its target" in said
    block = publish(tmp_path / "block", {"architectures": ["DFlashDraftModel"]}, ())
    ended = specctl("doctor", "embedded", block, "--json")
    assert ended.code == SetupError.exit_code
    found = {one["what"]: one for one in json.loads(ended.out)}
    assert (found["models"]["state"], found["drafter"]["state"]) == ("wrong", "-")
    assert found["drafter"]["found"] == "not read, as the models do not load"
    assert "is a DFlash block drafter" in found["models"]["found"]
    assert "given twice" in specctl("doctor", "a", "b", "--drafter", "c").err


def test_the_readme_shows_commands_for_the_embedded_pair() -> None:
    """And tests/test_docs.py runs them, in an empty folder."""
    page = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    [collect, tune, _] = commands()["transformers"]
    assert collect.partition(" --target")[0].replace("PROMPTS", "embedded") in page
    assert tune in page
