"""Writes the golden folders of this version; run it once, when a version is new:

    python -m tests.artifacts.golden

Folders of earlier versions stay as the code of their time wrote them.
"""

from __future__ import annotations

from pathlib import Path

from specctl.artifacts.manifest import ARTIFACT_VERSION
from tests.artifacts.examples import POLICIES, write_artifact

GOLDEN = Path(__file__).parents[1] / "golden"


def main() -> None:
    for name in POLICIES:
        write_artifact(GOLDEN / f"artifacts-v{ARTIFACT_VERSION}" / name, name)


if __name__ == "__main__":
    main()
