"""Every verb of the command line, and the examples below its help."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import typer

from specctl.cli import load_all_verbs
from tests.cli.command import passes


def verbs(group: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every verb with its command, those of groups too."""
    root: Any = group or typer.main.get_command(load_all_verbs())
    for name, command in root.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, (*words, name))
        else:
            yield " ".join((*words, name)), command


VERBS = dict(verbs())


@cache
def examples_of(verb: str) -> tuple[str, ...]:
    """The commands that stand below the help of a verb, without `specctl`."""
    text = passes(*verb.split(), "--help").out.partition("Examples:\n")[2]
    lines = text.replace("\\\n", " ").splitlines()
    return tuple(" ".join(line.split()[1:]) for line in lines if line.strip())
