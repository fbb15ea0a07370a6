"""Fits on the training half, through the command line that users have."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specctl.artifacts import load_artifact
from specctl.policy import Policy
from systems.bench import SEED, SHARE


@dataclass(frozen=True)
class Fit:
    """One `specctl fit` of the table.

    Attributes:
        name: of its folder. verb: and options, as typed.
    """

    name: str
    verb: tuple[str, ...]


TEXT = "draft_logp,parent_entropy,depth,suffix_length,suffix_offered,suffix_support,suffix_count"
"""The drafter's word and what the text repeats (docs/features.md)."""
HETERO = Fit("hetero", ("cart", "--base", "eagle2:depth=6:top_k=10:num_tokens=60"))
C2T = Fit("c2t", ("c2t", "--predicts", "joint"))
C2T_PATH = Fit("c2t-path", ("c2t", "--predicts", "conditional"))
C2T_TEXT = Fit("c2t-text", ("c2t", "--features", TEXT))
GBDT = Fit("gbdt", ("gbdt",))
ECHO = Fit("echo", ("echo",))


def fitted(fit: Fit, traces: Sequence[Path], work: Path, *, may_fit: bool = True) -> Policy | str:
    """The policy that a verb fits, found again in `work` where it was fitted before.

    Returns:
        What the verb said, in one line, where it fitted nothing.
    """
    folder = work / fit.name
    is_there = (folder / "config.json").exists()
    if not is_there and not may_fit:
        return f"not fitted yet: specctl fit {' '.join(fit.verb)}"
    if not is_there:
        split = ("--held-out", str(SHARE), "--seed", str(SEED))
        verb, *options = fit.verb
        command = ["fit", verb, *map(str, traces), "-o", str(folder), *options, *split]
        specctl = Path(sys.executable).with_name("specctl")
        done = subprocess.run([specctl, *command], capture_output=True, text=True)
        if done.returncode:
            return " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    return load_artifact(folder).policy
