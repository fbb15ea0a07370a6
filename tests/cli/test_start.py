"""Verbs that decide nothing start without what takes longer to import than they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import passes, write_artifact, write_lines
from tests.logs.import_cases import vllm_log

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
REGISTRY = [
    "registry list",
    "registry list qwen3-8b eagle3 h100",
    "registry verify",
    f"registry verify {NAME}@prod",
    f"registry log {NAME}",
    f"registry promote {NAME} canary prod",
    f"registry rollback {NAME} canary prod --reason test",
    "registry trust list",
    "registry keygen key",
]
TRACES = ["traces verify set", "traces snapshot set", "traces snapshot set --list"]
BEGUN = ["registry init", f"registry push chain {NAME} --alias prod"]
COLLECTED = ["collect embedded -o set --limit 1 --max-new-tokens 4 --policy chain --device cpu"]
DENSE = ["collect embedded -o set --dense --limit 1 --depth 2 --children 2 --max-new-tokens 4"]
REPLAY = ["replay set -p eagle2:2x2/4 --json"]
PLAIN = [
    "show chain",
    "show h100-llama-3.1-8b-eagle",
    "import vllm.log",
    "import vllm.log --cost-model h100-llama-3.1-8b-eagle",
    "export chain:3 --to vllm --drafter HEAD/head --method mtp -o serve",
    "export eagle2 --to sglang --drafter embedded",
    "export eagle2 --to vllm --nearest --drafter embedded",
    "export chain --to transformers",
    "export p_min --to llamacpp --target embedded --drafter embedded",
    "show serve",
]
HELP = ["registry init", "registry list", "--help", "registry --help", "collect --help"]


@pytest.mark.parametrize(
    ("before", "verbs", "heavy", "made"),
    [
        ([*BEGUN, *COLLECTED], [*REGISTRY, *TRACES], HEAVY, "set/snapshots"),
        (DENSE, REPLAY, ("transformers",), "set/trace.json"),
        ([], PLAIN, (*HEAVY, "polars"), "serve/speculative-config.json"),
        ([], HELP, NUMERIC, "team/registry.json"),
    ],
    ids=["registry and traces", "replay", "plain policies and logs", "lists and help"],
)
def test_verbs_start_without_what_is_heavy(
    before: list[str],
    verbs: list[str],
    heavy: tuple[str, ...],
    made: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_artifact(tmp_path / "chain", "chain")
    write_lines(tmp_path / "vllm.log", *vllm_log())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECCTL_REGISTRY", "team")
    for verb in before:
        passes(*verb.split())
    assert left_loaded(verbs, tmp_path, heavy) == {verb: [] for verb in verbs}
    assert (tmp_path / made).exists(), "the verbs did not do their work"


def left_loaded(verbs: list[str], folder: Path, heavy: tuple[str, ...]) -> dict[str, list[str]]:
    """What each of some verbs, run in turn by one process, left loaded."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    own = {"HOME": str(folder), "SPECCTL_REGISTRY": str(folder / "team"), "PYTHONPATH": path}
    words = json.dumps([verb.split() for verb in verbs])
    done = subprocess.run(
        [sys.executable, "-c", CODE, words, json.dumps(heavy)],
        cwd=folder,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "error" not in done.stderr, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found
