"""`specctl` called in this process: the entry point, with its two streams and its exit code."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from specctl import console
from specctl.artifacts import Origin, save_artifact
from specctl.cli import main
from specctl.embedded import embedded_path
from specctl.runtime.load import load_pair, pair_domain
from tests.artifacts.examples import EVIDENCE, POLICIES

USAGE, ARTIFACT, INPUT, MODEL, OUTPUT, REGISTRY = 2, 3, 4, 5, 6, 7
"""What the command line ends with, by kind of error."""
NAME = "embedded+eagle3@cpu:test"
"""Of an artifact in a registry."""
COST = {
    "kind": "linear",
    "cost_model_version": 1,
    "source": "made up",
    "verify_fixed_us": 1000.0,
    "verify_token_us": 10.0,
    "verify_cached_token_us": 0.0,
    "draft_fixed_us": 100.0,
    "draft_token_us": 1.0,
    "step_us": 50.0,
}
"""A cost model as a file has it."""


@dataclass(frozen=True)
class Outcome:
    """What a call of `specctl` left behind."""

    code: int
    out: str
    err: str


def specctl(*arguments: object) -> Outcome:
    """Runs `specctl ARGUMENTS` through the real entry point, piped."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["specctl", *map(str, arguments)]
    quiet = patch.object(console, "LINE_S", 3600.0)  # however slow the machine
    with patch.object(sys, "argv", argv), quiet, redirect_stdout(out), redirect_stderr(err):
        try:
            main()
            code: Any = 0
        except SystemExit as ended:
            code = ended.code or 0
    if argv[1:2] == ["show"] and "--json" not in argv:
        unset = re.findall(r"\b(?:undefined|None|nan|null)\b.*", out.getvalue())
        assert not unset, (argv, unset)
    return Outcome(int(code), out.getvalue(), err.getvalue())


def passes(*arguments: object) -> Outcome:
    """Runs a command that must succeed, and be quiet on standard error."""
    outcome = specctl(*arguments)
    assert (outcome.code, outcome.err) == (0, ""), outcome
    return outcome


def refuses(code: int, *arguments: object) -> str:
    """Runs a command that must refuse in one line; returns that line."""
    outcome = specctl(*arguments)
    assert outcome.err.startswith("error: "), outcome
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.endswith("\n")
    assert outcome.code == code, outcome
    if "--json" not in arguments:
        assert outcome.out == "", outcome
    elif outcome.out.startswith('{"error"'):
        parts = json.loads(outcome.out)["error"]
        assert outcome.err == f"error: {parts['message']}; {parts['hint']}\n"
    return outcome.err


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def contents(folder: Path) -> dict[Path, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != "trace.json")
    return {path: path.read_bytes() for path in paths}


def copy_model(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(embedded_path(name), folder))


def write_artifact(folder: Path, kind: str, **changes: str) -> Path:
    """An artifact of the embedded pair, as if fitted here; `changes` replace fields of the pair."""
    loaded = load_pair("embedded", "embedded", device="cpu")
    pair = loaded.fingerprint.model_copy(update=changes)
    origin = Origin(pair=pair, evidence=EVIDENCE, domain=pair_domain(loaded))
    save_artifact(folder, POLICIES[kind], origin, card=f"# {kind}\n")
    return folder


def said(*arguments: object) -> Any:
    return json.loads(passes("registry", *arguments, "--json").out)


def publish(artifacts: dict[str, Path], kind: str, *options: object) -> str:
    """Pushes one and points `prod` to it; its digest."""
    digest: str = said("push", artifacts[kind], NAME, "--alias", "prod", *options)["digest"]
    return digest


def new_key(folder: Path, name: str) -> Path:
    passes("registry", "keygen", folder / name)
    return folder / name


def trust(key: Path, name: str = "*", file: Path | None = None) -> str:
    """Trusts a key; returns its id."""
    where = () if file is None else ("--trust", file)
    key_id: str = said("trust", "add", f"{key}.pub", "--name", name, *where)["key_id"]
    return key_id
