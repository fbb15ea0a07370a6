"""From traces to another user's decode loop: is the policy that arrives the one that was sent?

.venv/bin/python scripts/round_trip.py -o /tmp/round-trip --limit 48

Alice collects, profiles, runs `fit auto`, and pushes the winner and every fit of it, signed. Bob
has another home and trusts her key. He searches for his pair, pulls what is named, and decodes
prompts that were in no fit. Both must have the same texts, accepted drafts in every round, calls
and verified tokens. Exits with 1 where they have not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.embedded import PROMPTS, embedded_path

NAME = "embedded+eagle3@cpu"
KEY = "laptop"
COUNTS = ("calls", "verified_tokens", "mean_acceptance_length")


@dataclass(frozen=True)
class User:
    """Somebody with a home, a cache and settings of their own, in a folder that both can read."""

    name: str
    place: Path

    def specctl(self, *arguments: object) -> str:
        """Runs a verb; ends the script where it fails."""
        command = [sys.executable, "-m", "specctl", *map(str, arguments)]
        print(f"{self.name}: specctl {' '.join(map(str, arguments))}", flush=True)
        ran = subprocess.run(
            command,
            cwd=self.place,
            env=self._environment(),
            text=True,
            stdout=subprocess.PIPE,
            check=False,
        )
        if ran.returncode:
            raise SystemExit(f"{self.name}: exit code {ran.returncode}")
        return ran.stdout

    def json(self, *arguments: object) -> Any:
        return json.loads(self.specctl(*arguments, "--json"))

    def _environment(self) -> dict[str, str]:
        home = self.place / self.name
        folders = {f"XDG_{kind}_HOME": str(home / kind) for kind in ("CONFIG", "CACHE", "STATE")}
        return {**os.environ, "HOME": str(home), **folders}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, required=True, help="new folder for everything")
    parser.add_argument("--limit", type=int, default=48, help="prompts to fit on")
    parser.add_argument("--held-out", type=int, default=12, help="other prompts to decode")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to emit per prompt")
    parser.add_argument("--skip", action="append", default=[], help="fit to leave out")
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True)
    write_prompts(asked.out, asked.limit, asked.held_out)
    alice, bob = (User(name, asked.out.absolute()) for name in ("alice", "bob"))
    sent = publish(alice, fit(alice, asked.tokens, asked.skip))
    trust_key(bob)
    differ = [kind for kind in sent if not arrives(alice, bob, kind, asked.tokens)]
    print(json.dumps({"policies": list(sent), "differ": differ}))
    return 1 if differ else 0


def write_prompts(place: Path, num_fit: int, num_held_out: int) -> None:
    """Every n-th prompt, as the set is sorted by category; none is in both files."""
    lines = PROMPTS.read_text("utf-8").splitlines(keepends=True)
    step = len(lines) / (num_fit + num_held_out)
    taken = [lines[int(step * index)] for index in range(num_fit + num_held_out)]
    every = (num_fit + num_held_out) // num_held_out
    held_out = taken[::every][:num_held_out]
    (place / "held-out.jsonl").write_text("".join(held_out), "utf-8")
    fitted = (line for line in taken if line not in held_out)
    (place / "fit.jsonl").write_text("".join(fitted), "utf-8")


def fit(alice: User, num_tokens: int, skip: Sequence[str]) -> dict[str, Path]:
    """The winner of `fit auto`, and the fits that raced."""
    alice.specctl("collect", "fit.jsonl", "-o", "traces", "--dense", "--max-new-tokens", num_tokens)
    alice.specctl("profile", "-o", "cost.json", "--threads", 1)
    left_out = [word for name in skip for word in ("--skip", name)]
    alice.specctl("fit", "auto", "traces", "-o", "auto", "--cost-model", "cost.json", *left_out)
    fits = sorted((alice.place / "auto" / "fits").iterdir())
    raced = {folder.name: folder for folder in fits if (folder / "config.json").is_file()}
    return {"auto": alice.place / "auto" / "policy", **raced}


def publish(alice: User, policies: dict[str, Path]) -> dict[str, Path]:
    """A registry with all of them, signed; Alice's own trust file requires that."""
    alice.specctl("registry", "keygen", KEY)
    trust_key(alice)
    team = ("--registry", "team")
    alice.specctl("registry", "init", *team)
    for kind, folder in policies.items():
        name = f"{NAME}:{kind}"
        alice.specctl("registry", "push", folder, name, *team, "--key", KEY)
        alice.specctl("registry", "promote", name, "prod", folder, *team, "--key", KEY)
    return policies


def trust_key(user: User) -> None:
    """Into a user's own trust file: nothing in the registry decides whom to trust."""
    user.specctl("registry", "trust", "add", f"{KEY}.pub", "--name", "embedded*")


def arrives(alice: User, bob: User, kind: str, num_tokens: int) -> bool:
    """Whether what Bob finds by his pair and pulls decides as what Alice has."""
    reference = f"{NAME}:{kind}@prod"
    pair = (str(embedded_path("target")), str(embedded_path("eagle3")))
    found = bob.json("registry", "list", *pair, "--registry", "team")
    if not any(row["reference"] == reference and row["refusal"] is None for row in found):
        raise SystemExit(f"bob: {reference} is not found by the pair: {found}")
    folder = "auto/policy" if kind == "auto" else f"auto/fits/{kind}"
    hers = decode(alice, folder, kind, num_tokens)
    bob.specctl("registry", "pull", reference, "--registry", "team", "-o", f"bob-{kind}")
    return hers == decode(bob, f"team/{reference}", kind, num_tokens)


def decode(user: User, policy: str, kind: str, num_tokens: int) -> tuple[list[Any], str]:
    """Figures, and texts with the accepted drafts of every round."""
    out = user.place / user.name / f"ran-{kind}"
    ran = user.json(
        "run",
        "held-out.jsonl",
        "--policy",
        policy,
        "-o",
        out,
        "--threads",
        1,
        "--max-new-tokens",
        num_tokens,
    )
    [texts] = out.glob("*.jsonl")
    return [ran[0][name] for name in COUNTS], texts.read_text("utf-8")


if __name__ == "__main__":
    sys.exit(main())
