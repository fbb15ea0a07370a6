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


ALL_NAMES = ("--name", "*")


def new_key(folder: Path, name: str) -> Path:
    passes("registry", "keygen", folder / name)
    return folder / name


def trust_root(key: Path) -> None:
    passes("registry", "trust", "add", f"{key}.pub", *ALL_NAMES, "--role", "root")
