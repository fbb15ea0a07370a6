"""The test files that have CUDA tests and whose imports are there, one a line.

On a machine with the runtime's dependencies alone some files cannot be imported; they are named on
stderr, with what they lack. Anything else that keeps a file from being imported is left to pytest.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPTIONAL = ("polars", "pyarrow", "sklearn", "scipy", "lightgbm", "typer", "rich", "matplotlib")
OPTIONAL += ("onnx", "onnxruntime", "jinja2", "cryptography", "hypothesis")


def lacks(path: Path) -> str | None:
    """The library that a file needs and that is not here; None if it has all."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        return missing if missing in OPTIONAL else None
    except Exception:  # pytest says it better
        return None
    return None


def main() -> None:
    sys.path.insert(0, str(ROOT))
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "mark.cuda" not in path.read_text("utf-8"):
            continue
        missing = lacks(path)
        if missing is None:
            print(path.relative_to(ROOT))
        else:
            print(f"left out, no {missing}: {path.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
