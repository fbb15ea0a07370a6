"""Registries that the command line writes and reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cli.command import passes

NAME = "embedded+eagle3@cpu:test"
SMALL = ("--limit", 1, "--max-new-tokens", 4, "--device", "cpu", "--json")


def said(*arguments: object) -> Any:
    return json.loads(passes("registry", *arguments, "--json").out)


def publish(artifacts: dict[str, Path], kind: str, *options: object) -> str:
    """Pushes one and points `prod` to it; its digest."""
    digest: str = said("push", artifacts[kind], NAME, "--alias", "prod", *options)["digest"]
    return digest


def new_key(folder: Path, name: str) -> Path:
    passes("registry", "keygen", folder / name)
    return folder / name


def trust(key: Path, *roles: str, name: str = "*", file: Path | None = None) -> str:
    """Trusts a key; returns its id."""
    words = [word for role in roles or ("publisher", "promoter") for word in ("--role", role)]
    where = () if file is None else ("--trust", file)
    key_id: str = said("trust", "add", f"{key}.pub", "--name", name, *words, *where)["key_id"]
    return key_id
