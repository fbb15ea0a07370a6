"""No two modules of specctl import each other, be it by way of others or inside functions.

import-linter holds the rooms apart; this holds the modules within them. An import inside a function
or for annotations alone hides a cycle from Python, not from a reader.
"""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp

Graph = dict[str, set[str]]


def graph_of(package: str) -> Graph:
    """The modules that each module of a package imports."""
    found = grimp.build_graph(package, exclude_type_checking_imports=False, cache_dir=None)
    return {name: found.find_modules_directly_imported_by(name) for name in found.modules}


def test_no_modules_import_each_other() -> None:
    TopologicalSorter(graph_of("specctl")).prepare()  # raises where there is a cycle, naming it


def test_no_test_module_is_a_library() -> None:
    imported = {name.rpartition(".")[2] for found in graph_of("tests").values() for name in found}
    found = {name for name in imported if name.startswith("test_")}
    assert not found, "move what several tests need to a module that holds no test"
