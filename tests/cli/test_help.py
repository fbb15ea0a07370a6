"""`--help` says of every option what it means and its default."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.cli.command import passes, specctl
from tests.cli.helps import VERBS, examples_of


def options_of(verb: str) -> list[Any]:
    return [param for param in VERBS[verb].params if param.name != "help"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_states_meaning_and_default(verb: str) -> None:
    for param in options_of(verb):
        which, said = f"{verb} {param.name}", (param.help or "").lower()
        assert said, f"{which} has no help"
        stated = param.required or param.default not in (None, "") or "default" in said
        assert stated, f"{which} states no default"


@pytest.mark.parametrize("verb", ["collect", "tune"])
def test_all_of_help_shows_every_option_and_its_default(verb: str) -> None:
    shown = passes(verb, "--help-all").out
    flat = re.sub(r"[\s│]+", "", shown)
    for param in options_of(verb):
        if param.param_type_name == "option":
            assert param.opts[0] in shown
            if param.default != "" and type(param.default) in (int, float, str):
                assert f"[default:{param.default}" in flat, param.name


@pytest.mark.parametrize("verb", VERBS)
def test_the_first_view_of_help_is_short_and_ends_with_examples(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = passes(*verb.split(), "--help").out.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    common = [
        param
        for param in options_of(verb)
        if getattr(param, "rich_help_panel", None) in (None, "common")
        and param.param_type_name == "option"
    ]
    assert len(common) <= 12
    if verb.split()[0] in ("collect", "run", "replay", "tune", "fit"):
        assert "Examples:" in lines


@pytest.mark.parametrize("verb", VERBS)
def test_options_of_examples_exist(verb: str) -> None:
    known = {name for one in options_of(verb) for name in (*one.opts, *one.secondary_opts)}
    for example in examples_of(verb):
        words = example.split()
        assert words[: len(verb.split())] == verb.split(), example
        assert {word for word in words if word.startswith("-")} <= known, example


@pytest.mark.parametrize("group", ["", "fit", "traces", "registry", "registry trust"])
def test_the_first_sentence_of_a_verb_fits_the_list(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = passes(*group.split(), "--help").out
    assert "..." not in shown.partition("Commands:")[2], shown


def test_version_and_bare_call() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", passes("--version").out)
    bare = specctl("fit")
    assert (bare.code, bare.err) == (2, "")
    assert "hetero" in bare.out
    named, alias = (passes("fit", name, "--help").out for name in ("hetero", "cart"))
    assert alias.replace("fit cart", "fit hetero") == named, "the algorithm's name works too"
