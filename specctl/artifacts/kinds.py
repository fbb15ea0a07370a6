"""What a folder or a prefix of a bucket is, told by one file in it: for refusals."""

from __future__ import annotations

from collections.abc import Iterable

_KINDS = {
    "registry.json": "a registry",
    "trace.json": "a trace set",
    "import.json": "an import of another tool's log",
    "config.json": "an artifact or a model",
}


def kind_of(names: Iterable[str]) -> str:
    """What holds files and folders of these names, e.g. `a trace set (trace.json)`."""
    found = sorted(names)
    for name, kind in _KINDS.items():
        if name in found:
            return f"{kind} ({name})"
    if not found:
        return "an empty folder"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"a folder with {ascii(found[0])[:80]}{more}"
