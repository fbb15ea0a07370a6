"""Streams of noise: no two purposes share one, or a draw would say what another one is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import specctl

PACKAGE = Path(specctl.__file__).parent


def streams() -> dict[str, int]:
    """Every constant `*_STREAM` of the package, by module and name."""
    found: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for line in re.findall(r"^\w+_STREAM\b.*=.*$", path.read_text("utf-8"), re.M):
            names, values = re.findall(r"\w+_STREAM", line), line.partition("=")[2].split(",")
            for name, value in zip(names, values, strict=True):
                found[f"{path.relative_to(PACKAGE)}: {name}"] = int(value)
    return found


def test_all_streams_of_noise_differ() -> None:
    """With two equal ones, e.g. of a draft token and its coin, no text is lossless any more."""
    found = streams()
    assert {"noise.py: TOKEN_STREAM", "policy/ratio.py: COIN_STREAM"} <= found.keys()
    assert len(found) >= 4
    assert len(set(found.values())) == len(found), found


def test_noise_is_drawn_from_a_named_stream() -> None:
    """A number in the call would be a stream that the test above does not see."""
    calls = [
        node
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "noise_keys"
    ]
    given = [call.args[2] for call in calls if call.args[2:]]
    given += [one.value for call in calls for one in call.keywords if one.arg == "stream"]
    assert len(calls) >= 3
    for one in given:
        assert isinstance(one, ast.Name)
        assert one.id == "stream" or one.id.endswith("_STREAM"), one.id
