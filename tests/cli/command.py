"""`specctl` called in this process: the entry point, with its two streams and its exit code."""

from __future__ import annotations

import io
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from specctl.artifacts import Origin, save_artifact
from specctl.cli import main
from specctl.embedded import embedded_path
from specctl.runtime.load import load_pair, pair_domain
from tests.artifacts.examples import EVIDENCE, POLICIES


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
    with patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
            code: Any = 0
        except SystemExit as ended:
            code = ended.code or 0
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
    assert (outcome.code, outcome.out) == (code, ""), outcome
    return outcome.err


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def copy_model(name: str, folder: Path) -> Path:
    """A copy of an embedded model to break."""
    return Path(shutil.copytree(embedded_path(name), folder))


def write_artifact(folder: Path, kind: str, **changes: str) -> Path:
    """An artifact of the embedded pair, as if fitted here; `changes` replace fields of the pair."""
    loaded = load_pair("embedded", "embedded", device="cpu")
    pair = loaded.fingerprint.model_copy(update=changes)
    origin = Origin(pair=pair, evidence=EVIDENCE, domain=pair_domain(loaded))
    save_artifact(folder, POLICIES[kind], origin, card=f"# {kind}\n")
    return folder
