"""The user's `config.toml`: a registry, and defaults of options by verb."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer

from specctl.cli.app import TABLES, load_all_verbs
from tests.cli.command import USAGE, passes, refuses
from tests.cli.conftest import SMALL


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the file stands."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SPECCTL_REGISTRY", "")  # so that it is restored
    monkeypatch.delenv("SPECCTL_REGISTRY")
    (tmp_path / "config" / "specctl").mkdir(parents=True)
    return tmp_path / "config" / "specctl" / "config.toml"


def test_options_have_the_users_defaults(settings: Path, prompts: Path) -> None:
    settings.write_text('[run]\nlimit = 2\nmax-new-tokens = 5\npolicy = "chain"\n')
    [row] = json.loads(passes("run", prompts, "--json", *SMALL[2:]).out)
    assert (row["policy"], row["num_requests"], row["num_tokens"]) == ("chain", 2, 10)
    [typed] = json.loads(passes("run", prompts, "--limit", 1, "--json", *SMALL[2:]).out)
    assert typed["num_requests"] == 1, "what is typed wins"


def test_its_registry_stands_for_the_variable(
    settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.write_text(f'registry = "{tmp_path / "one"}"\n')
    passes("registry", "init")
    assert (tmp_path / "one" / "registry.json").exists()
    monkeypatch.setitem(os.environ, "SPECCTL_REGISTRY", str(tmp_path / "two"))
    passes("registry", "init")
    assert (tmp_path / "two" / "registry.json").exists()


def test_every_verb_may_have_a_table() -> None:
    command = typer.main.get_command(load_all_verbs())
    assert set(TABLES) == set(vars(command)["commands"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[run]\nlimt = 2",
            "config.toml, [run]: expected an option of the verb, found limt; did you",
        ),
        ("registri = 2", "found registri; did you mean registry?"),
        ("limit = 2", "put it into the table of a verb"),
        ("[rnu]\nlimit = 2", "found [rnu]; did you mean run?"),
        ("registry = 2", "registry to be a text, found 2"),
        ("[run", "config.toml: expected a TOML file"),
    ],
)
def test_a_slip_is_refused(text: str, says: str, settings: Path, prompts: Path) -> None:
    settings.write_text(text)
    assert says in refuses(USAGE, "run", prompts)
