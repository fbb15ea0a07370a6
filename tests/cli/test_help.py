"""`--help` says of every option what it means, its unit and its default."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from specctl.cli import load_all_verbs
from tests.cli.command import passes, specctl


def verbs(group: Any = None, words: tuple[str, ...] = ()) -> Iterator[str]:
    """Every verb, those of groups too."""
    root: Any = group or typer.main.get_command(load_all_verbs())
    for name, command in root.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, (*words, name))
        else:
            yield " ".join((*words, name))


VERBS = tuple(verbs())
UNITS = {
    "limit": "prompts",
    "max_new_tokens": "Tokens",
    "batch_sizes": "Requests",
    "contexts": "tokens",
    "arrival_rate": "per second",
    "tpot_limit_ms": "ms",
    "max_misaligned": "[0, 1]",
    "offered_depth": "tokens",
    "k_table": "tokens",
    "widths": "Nodes",
    "threads": "threads",
    "top_k": "tokens",
    "collect top_k": "children",
    "sample_top_k": "tokens",
    "top_p": "mass, in (0, 1]",
    "held_out": "Share of prompts",
    "max_leaf_depth": "levels",
    "fit c2t hidden": "units",
    "beta": "probability",
    "recall": "Share of accepted tokens",
    "fit c2t depth": "Levels",
    "first_top_k": "children",
    "second_top_k": "Nodes",
    "fit c2t num_tokens": "tokens",
    "negatives": "nodes",
    "max_rows": "Nodes",
    "fit c2t batch_size": "Nodes",
    "min_steps": "Steps",
    "fit echo depth": "Levels",
    "fit echo width": "nodes",
    "fit echo max_width": "nodes",
    "fit echo num_tokens": "nodes",
    "fit echo max_tokens": "nodes",
    "delta": "Area",
    "alpha": "levels",
    "gammas": "factor",
    "window": "tokens",
    "weights": "tokens",
    "min_samples": "tokens",
    "half_life": "tokens",
    "draft_cost": "forward",
    "num_seeds": "Answers",
    "temperature": "greedy",
    "seed": "Seed",
}


def options() -> Iterator[tuple[str, Any]]:
    """Every option of every verb."""
    root: Any = typer.main.get_command(load_all_verbs())
    for verb in VERBS:
        command = root
        for word in verb.split():
            command = command.commands[word]
        yield from ((verb, param) for param in command.params if param.name != "help")


@pytest.mark.parametrize(("verb", "param"), list(options()), ids=lambda v: getattr(v, "name", v))
def test_option_states_meaning_unit_and_default(verb: str, param: Any) -> None:
    assert param.help, f"{verb} {param.name} has no help"
    stated = param.required or param.default not in (None, "") or "default" in param.help.lower()
    assert stated, f"{verb} {param.name} states no default"
    unit = UNITS.get(f"{verb} {param.name}", UNITS.get(param.name, ""))
    assert unit.lower() in param.help.lower()


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_every_option_and_its_default(verb: str) -> None:
    shown = passes(*verb.split(), "--help").out
    flat = re.sub(r"[\s│]+", "", shown)
    for other, param in options():
        if other == verb and param.param_type_name == "option":
            assert param.opts[0] in shown
            if param.default != "" and type(param.default) in (int, float, str):
                assert f"[default:{param.default}]" in flat, param.name


def test_version_and_bare_call() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", passes("--version").out)
    bare = specctl()
    assert (bare.code, bare.err) == (2, "")
    assert "collect" in bare.out
