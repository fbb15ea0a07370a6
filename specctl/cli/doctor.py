"""`specctl doctor`: what works here, each line ok or with what to do."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from specctl import __version__, console
from specctl.cli.app import SETTINGS, app, read_settings
from specctl.cli.quickstart import device_found, installed_engines
from specctl.cli.verbs import Given, verb
from specctl.console import Answer
from specctl.errors import SpecctlError, one_line
from specctl.formatting import Table, count, listed
from specctl.registry.userdirs import config_home
from specctl.runtime.config import ModelsConfig

GIB = 1 << 30
LEAST_FREE = 2 * GIB
"""Bytes below which a dense log of a few hundred prompts may not fit."""


@dataclass(frozen=True)
class Finding:
    """One line. `state`: `-` where there is nothing that could be wrong."""

    what: str
    state: Literal["ok", "-", "wrong"]
    found: str
    fix: str = ""


@verb(
    app,
    models=ModelsConfig,
    examples="""specctl doctor
specctl doctor --target TARGET --drafter DRAFTER""",
)
def doctor(*, models: Given) -> Answer:
    """Check what specctl needs: each line is ok or says what to do.

    Versions, device, models (loaded, and a text decoded), disk, registry, serving engines. Exit
    code 1 where anything is wrong.
    """
    config: ModelsConfig = models.build()
    checks: dict[str, Callable[[], Finding]] = {
        "versions": check_versions,
        "device": lambda: Finding("device", "ok", device_found()),
        "models": lambda: check_models(config),
        "disk": check_disk,
        "settings": check_settings,
        "registry": check_registry,
        "vLLM": check_vllm,
        "SGLang": check_sglang,
    }
    findings = []
    with console.progress("checks", len(checks)) as tick:
        for what, check in checks.items():
            try:
                findings.append(check())
            except SpecctlError as error:
                found = f"expected {error.expected}, found {error.found}"
                findings.append(Finding(what, "wrong", f"{error.what}: {found}", error.fix))
            tick()
    rows = [
        (one.what, one.state, f"{one.found}; {one.fix}" if one.fix else one.found)
        for one in findings
    ]
    wrong = [one.what for one in findings if one.state == "wrong"]

    def end() -> None:
        if wrong:
            raise SpecctlError(
                "doctor",
                expected="every check to pass",
                found=f"{listed(wrong)} wrong",
                fix="do what their lines say",
            )

    return Answer([asdict(one) for one in findings], [Table("", ("", "", ""), rows, left=3)], end)


def check_versions() -> Finding:
    """The libraries that specctl asks for, within the versions that it was tested with."""
    wrong, shown = [], [f"specctl {__version__}", f"Python {platform.python_version()}"]
    for line in requires("specctl") or ():
        needed = Requirement(line)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(needed.name)
        except PackageNotFoundError:
            found = "none"
        if found == "none" or not needed.specifier.contains(found, prereleases=True):
            wrong.append(f"{needed.name} {found}, not {needed.specifier}")
        elif needed.name in ("torch", "transformers", "triton"):
            shown.append(f"{needed.name} {found}")
    if wrong:
        fix = "install specctl again, in an environment of its own"
        return Finding("versions", "wrong", "; ".join(wrong), fix)
    return Finding("versions", "ok", ", ".join(shown))


def check_models(config: ModelsConfig) -> Finding:
    """The pair: loaded, and a few tokens decoded with drafts."""
    from specctl.runtime.api import Decoder
    from specctl.runtime.policy_spec import resolve_policy

    config.check()
    pair = config.load_pair()
    policy = "ar" if pair.drafter is None else "chain"
    decoder = Decoder(pair, policy=resolve_policy(policy).policy)
    [answer] = decoder.generate("def add(a, b):", max_new_tokens=8)
    tokens = count(len(answer.token_ids), "token")
    return Finding("models", "ok", f"{pair.target.name} + {pair.drafter_name}: {tokens} decoded")


def check_disk() -> Finding:
    """Room in the working folder, where traces and results are written by default."""
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{free / GIB:.1f} GiB free in {Path.cwd()}"
    if free < LEAST_FREE:
        fix = f"free {LEAST_FREE // GIB} GiB, or write elsewhere with -o; dense logs are large"
        return Finding("disk", "wrong", found, fix)
    return Finding("disk", "ok", found)


def check_settings() -> Finding:
    """The user's `config.toml`; `read_settings` has refused a bad one before any verb began."""
    path = config_home() / SETTINGS
    if not path.is_file():
        return Finding("settings", "-", f"no {path}")
    tables = sorted(read_settings()) or ["the registry"]
    return Finding("settings", "ok", f"{path} sets {listed(tables)}")


def check_registry() -> Finding:
    """The team's registry: opened and listed."""
    place = os.environ.get("SPECCTL_REGISTRY")
    if not place:
        return Finding("registry", "-", "none set; SPECCTL_REGISTRY or config.toml names one")
    from specctl.registry.opening import open_registry

    names = open_registry(place).names()
    return Finding("registry", "ok", f"{place}: {count(len(names), 'name')}")


def check_vllm() -> Finding:
    """vLLM's version, the methods that the plugin replaces, its entry point and its settings."""
    found = installed_engines().get("vllm")
    if found is None:
        return Finding("vLLM", "-", "not installed here")
    from specctl.engines.settings import VARIABLE
    from specctl.engines.settings import read_settings as read_plugin
    from specctl.engines.vllm_plugin import CHECKED_VERSIONS, replaced_methods, vllm_version

    text = os.environ.get(VARIABLE)
    settings = read_plugin(text) if text else None
    if not entry_points(group="vllm.general_plugins", name="specctl"):
        fix = "install specctl again where vLLM is: pip install 'specctl[vllm]'"
        return Finding("vLLM", "wrong", "the plugin has no entry point", fix)
    try:
        replaced_methods()
        found = vllm_version()
    except ImportError as error:
        fix = "mend its installation"
        return Finding("vLLM", "wrong", f"{found} does not import: {one_line(str(error))}", fix)
    allowed = settings is not None and settings.allow_version
    if found not in CHECKED_VERSIONS and not allowed:
        fix = f"install {' or '.join(CHECKED_VERSIONS)}, which the plugin was tested in"
        return Finding("vLLM", "wrong", f"{found}, in which no test has run", fix)
    work = f"{VARIABLE} is set" if settings else f"off, as {VARIABLE} is not set"
    return Finding("vLLM", "ok", f"{found}, all hooks of the plugin present; {work}")


def check_sglang() -> Finding:
    """SGLang's version; specctl writes flags and files for it, and has no hooks there."""
    from specctl.engines.sglang_flags import SGLANG

    found, checked = installed_engines().get("sglang"), SGLANG.checked.partition(":")[0]
    if found is None:
        return Finding("SGLang", "-", "not installed here")
    if found != checked:
        return Finding("SGLang", "ok", f"{found}; flags and files were checked with {checked}")
    return Finding("SGLang", "ok", found)
