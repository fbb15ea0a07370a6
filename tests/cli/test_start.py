"""Verbs that decide nothing start without what takes longer to import than they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cli.command import write_artifact

HEAVY = ("torch", "transformers")
NUMERIC = (*HEAVY, "numpy", "polars")
CODE = """
import contextlib, io, json, sys
from specctl.cli import main
loaded = {}
heavy = json.loads(sys.argv[2])
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
    loaded[" ".join(words)] = [name for name in heavy if name in sys.modules]
print(json.dumps(loaded))
"""
NAME = "embedded+embedded@cpu:start"
VERBS = [
    "registry list",
    "registry list --for org/model --draft eagle3 --gpu h100",
    "registry verify",
    "registry copy backup",
    f"registry verify {NAME}@prod",
    f"registry log {NAME}",
    f"registry promote {NAME} canary prod",
    f"registry rollback {NAME} canary --reason test --to prod",
    "registry trust list",
    "registry keygen key",
]
TRACES = [
    "traces verify set",
    "traces snapshot set",
    "traces snapshot set --list",
    "traces resegment set -o large",
    "traces merge set -o joined",
    "traces export set -o plain",
]


def test_verbs_of_the_registry_start_without_torch(tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path / "chain", "chain")
    words = [["registry", "init"], ["registry", "push", str(artifact), NAME, "--alias", "prod"]]
    environment = {**os.environ, "HOME": str(tmp_path), "SPECCTL_REGISTRY": str(tmp_path / "team")}
    answer(words, tmp_path, environment)
    loaded = answer([verb.split() for verb in VERBS], tmp_path, environment)
    assert loaded == {verb: [] for verb in VERBS}
    assert (tmp_path / "key.pub").exists(), "the verbs did not do their work"


def test_lists_and_help_start_without_numbers(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "SPECCTL_REGISTRY": str(tmp_path / "team")}
    words = ["registry init", "registry list", "--help", "registry --help", "collect --help"]
    loaded = answer([verb.split() for verb in words], tmp_path, environment, NUMERIC)
    assert loaded == {verb: [] for verb in words}


def test_verbs_of_traces_start_without_torch(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path)}
    collect = "collect embedded -o set --limit 1 --max-new-tokens 4 --policy chain --device cpu"
    answer([collect.split()], tmp_path, environment)
    assert answer([verb.split() for verb in TRACES], tmp_path, environment) == {
        verb: [] for verb in TRACES
    }
    assert (tmp_path / "plain" / "rounds.parquet").exists(), "the verbs did not do their work"


def answer(
    words: list[list[str]], folder: Path, environment: dict[str, str], heavy: Sequence[str] = HEAVY
) -> dict[str, list[str]]:
    """What each of some verbs, run in turn by one process, left loaded."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(words), json.dumps(heavy)],
        cwd=folder,
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "error" not in done.stderr, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found
