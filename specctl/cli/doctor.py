"""`specctl doctor`: checks of this machine, each line ok or with the step to take."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import Annotated, Literal

import typer

from specctl.cli.app import app
from specctl.cli.verbs import Given, verb
from specctl.console import Answer
from specctl.errors import SetupError, SpecctlError, UsageError, one_line
from specctl.formatting import Table, count, listed
from specctl.progress import advance, progress
from specctl.runtime.config import ModelsConfig
from specctl.version import __version__


@dataclass(frozen=True)
class Finding:
    """One line of the answer."""

    what: str
    state: Literal["ok", "-", "wrong"]  # `-`: not in use here
    found: str
    fix: str = ""


@verb(
    app,
    models=ModelsConfig,
    examples="""specctl doctor
specctl doctor TARGET DRAFTER""",
)
def doctor(
    pair: Annotated[
        list[str] | None,
        typer.Argument(help="TARGET and DRAFTER, by default those of --target and --drafter."),
    ] = None,
    *,
    models: Given,
) -> Answer:
    """Check what specctl needs: each line is ok or says what to do.

    Device, models (loaded, what was read of the drafter and what was assumed, and a text decoded),
    registry, vLLM's plugin, and of each engine the versions that are here and that are known to
    work. Exit code 12 where anything is wrong.
    """
    given = dict(zip(("target", "drafter"), pair or (), strict=False))
    twice = [name for name in given if f"--{name}" in models.changed]
    if twice or len(pair or ()) > 2:
        problem = f"--{twice[0]} is given twice" if twice else f"{len(pair or ())} models"
        raise UsageError(f"{problem}: doctor takes one target and one drafter")
    config: ModelsConfig = models.build().model_copy(update=given)
    notes: list[str] = []
    checks: dict[str, Callable[[], Finding]] = {
        "device": check_device,
        "models": lambda: check_models(config, notes),
        "drafter": lambda: check_drafter(config, notes),
        "registry": check_registry,
        "vLLM": check_vllm,
        "SGLang": lambda: check_engine("sglang", "sglang"),
        "transformers": lambda: check_engine("transformers", "transformers"),
        "llama.cpp": lambda: check_engine("llamacpp", "xllamacpp", "gguf"),
    }
    findings = []
    with progress("checks", len(checks)):
        for what, check in checks.items():
            try:
                findings.append(check())
            except SpecctlError as error:
                findings.append(Finding(what, "wrong", error.message, error.hint))
            advance("checks")
    rows = [
        (one.what, one.state, f"{one.found}; {one.fix}" if one.fix else one.found)
        for one in findings
    ]
    wrong = [one.what for one in findings if one.state == "wrong"]

    def end() -> None:
        if wrong:
            raise SetupError(f"doctor found {listed(wrong)} wrong", hint="do what their lines say")

    verdict = f"Wrong: {listed(wrong)}." if wrong else "Nothing is wrong here."
    table = Table("", ("", "", ""), rows, left=3)
    return Answer([asdict(one) for one in findings], [verdict, table], end)


def check_device() -> Finding:
    """The accelerator, and the versions that decide what runs on it."""
    import torch
    import transformers

    device = "no GPU: models run on the CPU"
    if torch.cuda.is_available():
        device = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, "
    versions += f"transformers {transformers.__version__}"
    return Finding("device", "ok", f"{device}; specctl {__version__}, {versions}")


def check_models(config: ModelsConfig, notes: list[str]) -> Finding:
    """The pair: loaded, and a few tokens decoded with drafts; `notes` gets what was read of the
    drafter."""
    from specctl.runtime.api import Decoder
    from specctl.runtime.words import resolve_policy

    config.check()
    pair = config.load_pair()
    notes += pair.notes
    policy = "ar" if pair.drafter is None else "chain"
    decoder = Decoder(pair, policy=resolve_policy(policy).policy)
    [answer] = decoder.generate("def add(a, b):", max_new_tokens=8)
    tokens = count(len(answer.token_ids), "token")
    return Finding("models", "ok", f"{pair.target.name} + {pair.drafter_name}: {tokens} decoded")


def check_drafter(config: ModelsConfig, notes: list[str]) -> Finding:
    """Facts of the drafter, as `check_models` read them."""
    unread = "none" if config.drafter == "none" else "not read, as the models do not load"
    return Finding("drafter", "ok" if notes else "-", "; ".join(notes) or unread)


def check_registry() -> Finding:
    """The team's registry: opened and listed."""
    place = os.environ.get("SPECCTL_REGISTRY")
    if not place:
        return Finding("registry", "-", "none set; SPECCTL_REGISTRY names one")
    from specctl.registry.opening import open_registry

    names = open_registry(place).names()
    return Finding("registry", "ok", f"{place}: {count(len(names), 'name')}")


def check_engine(name: str, *packages: str) -> Finding:
    """The versions of an engine's packages, and the one that is known to work."""
    from specctl.engines.export import ENGINES

    engine, here = ENGINES[name], dict.fromkeys(packages, "not installed here")
    for package in packages:
        with suppress(PackageNotFoundError):
            here[package] = version(package)
    found = ", ".join(f"{package} {state}" for package, state in here.items())
    known = f"{found}; known to work: {engine.checked.partition(':')[0]}"
    return Finding(engine.title, "-" if "not installed here" in found else "ok", known)


def check_vllm() -> Finding:
    """vLLM's version, the methods that the plugin replaces, its entry point and its settings."""
    if find_spec("vllm") is None:
        return check_engine("vllm", "vllm")
    from specctl.engines.settings import VARIABLE, read_settings
    from specctl.engines.vllm_plugin import (
        CHECKED_VERSIONS,
        check_packages,
        replaced_methods,
        vllm_version,
    )

    text = os.environ.get(VARIABLE)
    settings = read_settings(text) if text else None
    if not entry_points(group="vllm.general_plugins", name="specctl"):
        fix = "install specctl again where vLLM is: in its checkout, pip install --no-deps ."
        return Finding("vLLM", "wrong", "the plugin has no entry point", fix)
    try:
        replaced_methods()
        found = vllm_version()
    except ImportError as error:
        fix = "mend its installation"
        return Finding("vLLM", "wrong", f"it does not import: {one_line(str(error))}", fix)
    allowed = settings is not None and settings.allow_version
    if found not in CHECKED_VERSIONS and not allowed:
        fix = f"install {' or '.join(CHECKED_VERSIONS)}, which the plugin was tested in"
        return Finding("vLLM", "wrong", f"{found}, in which no test has run", fix)
    if settings is not None:
        check_packages(settings)
    work = f"{VARIABLE} is set" if settings else f"off, as {VARIABLE} is not set"
    return Finding("vLLM", "ok", f"{found}, all hooks of the plugin present; {work}")
