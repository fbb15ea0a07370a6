"""No two modules of specctl import each other, be it by way of others or inside functions.

import-linter holds the rooms apart; this holds the modules within them. An import inside a function
hides a cycle from Python, not from a reader. What is imported for annotations alone is none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "specctl"
Graph = dict[str, set[str]]


def modules_of(package: Path) -> dict[str, Path]:
    """Files by the names that they are imported by."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def graph_of(modules: dict[str, Path]) -> Graph:
    return {
        name: targets(ast.parse(path.read_text("utf-8")), set(modules)) - {name}
        for name, path in modules.items()
    }


def targets(tree: ast.Module, known: set[str]) -> set[str]:
    """Modules that are imported when a module is, or when something in it is called."""
    found: set[str] = set()
    for node in imports([tree]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.module is not None, "no import here is relative"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & known or {node.module}
    return found & known


def imports(nodes: Iterable[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from imports(node.orelse)
        else:
            yield from imports(ast.iter_child_nodes(node))


def cycles(graph: Graph) -> set[frozenset[str]]:
    """Sets of modules each of which reaches all others of its set."""
    reached = {name: reach(graph, name) for name in graph}
    return {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in graph
        if name in reached[name]
    }


def reach(graph: Graph, start: str) -> set[str]:
    """Modules at the end of one arrow or more."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        fresh = graph[waiting.pop()] - found
        found |= fresh
        waiting += fresh
    return found


def test_no_modules_import_each_other() -> None:
    found = cycles(graph_of(modules_of(ROOT / PACKAGE)))
    assert not found, "move what both need to a third module"


def test_no_test_module_is_a_library() -> None:
    arrows = graph_of(modules_of(ROOT / "tests"))
    imported = {name.rpartition(".")[2] for targets in arrows.values() for name in targets}
    found = {name for name in imported if name.startswith("test_")}
    assert not found, "move what several tests need to a module that holds no test"


@pytest.mark.parametrize(
    ("b", "is_cycle"),
    [
        ("from p.a import x", True),
        ("import p.a", True),
        ("from p import a", True),
        ("def f():\n    from p.a import x", True),
        ("if True:\n    import p.a", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import x", False),
        ("if TYPE_CHECKING:\n    import p.d\nelse:\n    import p.a", True),
        ("if not TYPE_CHECKING:\n    import p.a", True),
        ("import p.c", True),
        ("import json", False),
    ],
)
def test_cycles_of_every_kind_are_seen(b: str, is_cycle: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """a imports b; c imports a; d imports nothing."""
    package = tmp_path / "p"
    package.mkdir()
    texts = {"__init__": "", "a": "from p.b import y", "b": b, "c": "import p.a", "d": ""}
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    found = cycles(graph_of(modules_of(package)))
    assert any({"p.a", "p.b"} <= cycle for cycle in found) == is_cycle
