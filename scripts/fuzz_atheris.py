"""Coverage-guided fuzzing of one target, where atheris is installed (an optional job).

    pip install --no-deps --target /tmp/atheris atheris
    PYTHONPATH=/tmp/atheris python scripts/fuzz_atheris.py safetensors -atheris_runs=200000

Options behind the target are libFuzzer's. A finding ends the run with its stack and leaves the
input in `crash-*`; a summary of runs and coverage is libFuzzer's last line.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import atheris

with atheris.instrument_imports(include=["specctl.artifacts", "specctl.policy.families"]):
    from scripts.fuzz_targets import TARGETS, TYPED


def main() -> None:
    logging.disable()
    name, *rest = sys.argv[1:] or [""]
    if name not in TARGETS:
        sys.exit(f"expected a target among {', '.join(TARGETS)}, found {name!r}")
    target = TARGETS[name]

    def one(data: bytes) -> None:
        try:
            target.run(data)
        except TYPED:
            return

    with tempfile.TemporaryDirectory() as corpus:
        for number, sound in enumerate(target.corpus):
            (Path(corpus) / str(number)).write_bytes(sound)
        atheris.Setup([sys.argv[0], *rest, "-max_len=8192", corpus], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
