"""Writes an artifact of each kind to `tests/golden`, for tests of registries that load no torch:

python -m tests.artifacts.golden
"""

from __future__ import annotations

from pathlib import Path

from tests.artifacts.examples import POLICIES, write_artifact

GOLDEN = Path(__file__).parents[1] / "golden"


def main() -> None:
    for name in POLICIES:
        write_artifact(GOLDEN / "artifacts-v1" / name, name)


if __name__ == "__main__":
    main()
