"""The wheel carries the embedded pair: without it no verb works after an install."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from specctl.embedded import EMBEDDED, PROMPTS, RECORD

REPOSITORY = Path(__file__).parent.parent


def test_wheel_contains_the_pair(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = [path for folder in EMBEDDED.values() for path in folder.iterdir()]
    wanted = {str(p.relative_to(REPOSITORY)) for p in (*shipped, PROMPTS, RECORD)}
    assert wanted <= names
    assert sum("model.safetensors" in name for name in wanted) == 3
    assert not any(name.startswith(("tests/", "scripts/")) for name in names)
