"""Streams of noise: no two purposes share one, or a draw would say what another one is."""

from __future__ import annotations

import ast
from pathlib import Path

import specctl

PACKAGE = Path(specctl.__file__).parent


def streams() -> dict[str, int]:
    """Every constant `*_STREAM` of the package, by module and name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            is_tuple = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs = (
                zip(target.elts, node.value.elts, strict=True)  # type: ignore[attr-defined]
                if is_tuple
                else [(target, node.value)]
            )
            for name, value in pairs:
                if isinstance(name, ast.Name) and name.id.endswith("_STREAM"):
                    found[f"{path.relative_to(PACKAGE)}: {name.id}"] = ast.literal_eval(value)
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
