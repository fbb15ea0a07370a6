"""`--help` says of every option what it means, its unit and its default."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from specctl.cli import load_all_verbs
from tests.cli.command import passes, specctl
from tests.cli.helps import VERBS, examples_of

BY_UNIT = {
    "prompts": "limit",
    "tokens": (
        "max_new_tokens, contexts, offered_depth, top_k, fit "
        "c2t num_tokens, window, weights, min_samples, half_life"
    ),
    "nodes": (
        "widths, second_top_k, negatives, max_rows, fit c2t batch_size, fit echo "
        "width, fit echo max_width, fit echo num_tokens, fit echo max_tokens"
    ),
    "rounds": "fit cart max_rows",
    "positions": "max_positions, fit echo max_rows",
    "levels": "max_leaf_depth, fit c2t depth, fit echo depth, alpha",
    "children": "children, first_top_k",
    "requests": "batch_sizes",
    "answers": "num_seeds",
    "threads": "threads",
    "units": "fit c2t hidden",
    "steps": "min_steps",
    "area": "delta",
    "factor": "gammas",
    "forward": "draft_cost",
    "greedy": "temperature",
    "seed": "seed",
    "ms": "tpot_limit_ms",
    "per second": "arrival_rate",
    "[0, 1]": "max_misaligned",
    "mass, in (0, 1]": "top_p",
    "probability": "beta",
    "share of prompts": "held_out",
    "share of accepted tokens": "recall",
}
UNITS = {name: unit for unit, names in BY_UNIT.items() for name in names.split(", ")}


def options() -> Iterator[tuple[str, Any]]:
    """Every option of every verb."""
    root: Any = typer.main.get_command(load_all_verbs())
    for verb in VERBS:
        command = root
        for word in verb.split():
            command = command.commands[word]
        yield from ((verb, param) for param in command.params if param.name != "help")


def test_every_option_states_meaning_unit_and_default() -> None:
    for verb, param in options():
        which, said = f"{verb} {param.name}", (param.help or "").lower()
        assert said, f"{which} has no help"
        stated = param.required or param.default not in (None, "") or "default" in said
        assert stated, f"{which} states no default"
        assert UNITS.get(which, UNITS.get(param.name, "")) in said, which


MEANINGS = {
    "--allow-mismatch": "artifacts that were fitted elsewhere",
    "--batch-size": "requests together", "--beta": "acceptance to prune below",
    "--cost-model": "times of rounds", "--dense": "trees at every position",
    "--dense-every": "a dense sample beside rounds",
    "--depth": "levels drafted", "--drafter": "which drafter",
    "--expect": "digest before the move",
    "--family": "settings to search", "--format": "of a file",
    "--key": "to sign with",
    "--linear": "rates of rounds",
    "--max-rows": "rows fitted to at most", "--min-rows": "fewest rows to judge by",
    "--name": "name that a key signs for",
    "--num-tokens": "submitted at most", "--offline": "ask no registry",
    "--out": "place to write", "--policy": "policy to use",
    "--preset": "settings of a paper", "--reason": "why",
    "--registry": "a registry's place", "--resume": "go on with what is there",
    "--seed": "of all that is drawn", "--target": "which target", "--temperature": "of sampling",
    "--threads": "of the processor",
    "--tokens": "treatment of token ids", "--top-k": "of sampling", "--top-p": "of sampling",
    "--tpot-limit-ms": "of a good request", "--trace": "log of rounds",
    "--width": "nodes of a level", "--workload": "kind of the requests",
}  # fmt: skip
"""The one meaning of each option that several verbs describe in words of their own."""


def test_an_option_has_one_meaning_in_all_verbs() -> None:
    """A new pair must say here what both mean, which is when two meanings would show."""
    helps: dict[str, set[str]] = {}
    for _, param in options():
        if param.param_type_name == "option":
            helps.setdefault(param.opts[0], set()).add(param.help)
    assert {flag for flag, said in helps.items() if len(said) > 1} == set(MEANINGS)


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_every_option_and_its_default(verb: str) -> None:
    shown = passes(*verb.split(), "--help-all").out
    flat = re.sub(r"[\s│]+", "", shown)
    for other, param in options():
        if other == verb and param.param_type_name == "option":
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
        for other, param in options()
        if other == verb
        and getattr(param, "rich_help_panel", None) in (None, "common")
        and param.param_type_name == "option"
    ]
    assert len(common) <= 12
    has_more = sum(other == verb for other, _ in options()) > len(lines)
    assert not has_more or any("--help-all" in line for line in lines)
    if verb.split()[0] in ("collect", "run", "replay", "tune", "fit"):
        assert "Examples:" in lines


@pytest.mark.parametrize("verb", VERBS)
def test_options_of_examples_exist(verb: str) -> None:
    known = {name for other, param in options() if other == verb for name in param.opts}
    known |= {n for other, param in options() if other == verb for n in param.secondary_opts}
    for example in examples_of(verb):
        words = example.split()
        assert words[: len(verb.split())] == verb.split(), example
        assert {word for word in words if word.startswith("-")} <= known, example


def test_version_and_bare_call() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", passes("--version").out)
    bare = specctl("fit")
    assert (bare.code, bare.err) == (2, "")
    assert "cart" in bare.out
