"""`specctl export`: from a policy, an artifact or a tuning to what an engine takes, or to the
nearest policy that it does take, with the replayed figures of both."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from specctl.engines.engine import (
    Engine,
    EngineDrafter,
    EngineSettings,
    Export,
    MeanRound,
    Method,
    Serving,
)
from specctl.engines.sglang_flags import SGLANG
from specctl.engines.transformers_flags import TRANSFORMERS
from specctl.engines.vllm_flags import VLLM
from specctl.errors import EngineError, UsageError, check_choice
from specctl.policy import PerRequest, Policy, RootOnly, Strict, as_chain, parse_policy
from specctl.records import canonical_json
from specctl.replay.config import ReplayConfig, TuneConfig
from specctl.runtime.words import (
    NamedPolicy,
    names_artifact,
    pieces,
    resolve_policy,
    words_of,
)
from specctl.stores import is_store_url

if TYPE_CHECKING:
    from specctl.logs.trace_set import TraceSet
    from specctl.replay.results import Result

ENGINES = {engine.name: engine for engine in (VLLM, SGLANG, TRANSFORMERS)}


def engine_named(name: str, option: str) -> Engine:
    """An engine by its name on the command line.

    Raises:
        UsageError: another name.
    """
    check_choice(option, name, ENGINES)
    return ENGINES[name]


def check_load(engine: Engine, option: str, batch_size: int | None) -> None:
    """Refuses a load that an engine cannot serve with drafts.

    Raises:
        UsageError: more requests together.
    """
    most = engine.max_batch_size
    if most is not None and batch_size is not None and batch_size > most:
        raise UsageError(
            f"{option}: expected at most {most}: {engine.title} drafts for no more requests "
            f"together, found {batch_size}",
            hint="lower it, or choose another engine",
        )


# --------------------------------------------------------------------------- sources

NOTHING_FASTER = "Drafting does not pay here: `specctl tune` found nothing beyond chance."
"""The reason that an artifact's own figures give; `tune.json` says more."""


@dataclass(frozen=True)
class Source:
    """A policy to export.

    Attributes:
        reference: what the plugin of an engine loads it by: words, the absolute place of an
            artifact, or a registry's name; None where nothing but the record is there.
        mean: its mean round on the held-out prompts of its tuning; None where it was not tuned.
        reason: the tuning's sentence on plain decoding, where that is what it chose.
    """

    named: NamedPolicy
    reference: str | None
    mean: MeanRound | None = None
    reason: str | None = None

    @property
    def policy(self) -> Policy:
        return self.named.policy

    def reference_of(self, policy: Policy) -> str:
        """The name by which the plugin loads a policy, which is this one or made from it.

        Raises:
            EngineError: no words say it, and no artifact holds it.
        """
        as_given = as_chain(policy) == as_chain(self.policy)  # as the plugin runs either
        found = self.reference if as_given else words_of(policy)
        if found is None:
            raise EngineError(
                f"policy {self.named.label}: expected a policy in words, or an artifact that "
                "holds just this one, found neither",
                hint=(
                    "export the artifact of its shape alone; of a tuning keep tune.json beside "
                    "its policy/"
                ),
            )
        return found


def engine_options(settings: TuneConfig) -> dict[str, Any]:
    """What `tuning.prepare` takes of the engine of `--for`; nothing without one."""
    if settings.for_engine is None:
        return {}
    engine = engine_named(settings.for_engine, "--for")
    check_load(engine, "--batch-size", settings.batch_size)
    return {"runs": engine.runs, "batching": engine.batching}


def read_source(text: str) -> Source:
    """The policy that a user names: words, an artifact, or a `tune.json`, of which the chosen one.

    A lossy one is read too, as the nearest to it may be wanted.

    Raises:
        InputError: a file that is no tuning; see also `words.resolve_policy`.
    """
    if not (text.endswith(".json") and os.path.isfile(text)):
        named = resolve_policy(text, allow_lossy=True)
        return Source(named, "+".join(map(_absolute, pieces(text))), *_tuned(named))
    from specctl.replay.facts import read_result
    from specctl.replay.tune.publish import POLICY_FOLDER
    from specctl.replay.tune.verdict import TuneResult

    result = read_result(Path(text), TuneResult, "specctl tune")
    standing = result.standing(result.chosen)
    figures, policy = standing.held_out, parse_policy(canonical_json(standing.record))
    mean = MeanRound(figures.levels_per_call.value, figures.verified_per_call.value)
    reason = result.beside_plain() if isinstance(policy.shape, RootOnly) else None
    folder = Path(text).absolute().parent / POLICY_FOLDER
    if folder.is_dir():
        named = resolve_policy(str(folder), allow_lossy=True)
        if named.policy == policy:
            return Source(replace(named, label=standing.policy), str(folder), mean, reason)
    named = NamedPolicy(standing.policy, policy, spec=text)
    return Source(named, words_of(policy), mean, reason)


def _tuned(named: NamedPolicy) -> tuple[MeanRound | None, str | None]:
    """The mean round of an artifact that `tune` wrote, and the reason if that is plain decoding."""
    for _, artifact in named.parts:
        fit, evidence = artifact.manifest.fit or {}, artifact.manifest.evidence
        if fit.get("kind") == "tune" and evidence is not None and artifact.policy == named.policy:
            levels = evidence.metrics["held_out_levels_per_call"].value
            tokens = evidence.metrics["held_out_verified_per_call"].value
            mean = None if levels is None or tokens is None else MeanRound(levels, tokens)
            is_plain = isinstance(named.policy.shape, RootOnly)
            return mean, NOTHING_FASTER if is_plain else None
    return None, None


def _absolute(piece: str) -> str:
    """A piece of a policy's name that means the same in another working folder."""
    if not names_artifact(piece) or is_store_url(piece):
        return piece
    if os.path.isdir(piece):
        return os.path.abspath(piece)
    place, slash, name = piece.rpartition("/")
    return f"{os.path.abspath(place)}/{name}" if slash else name


def drafter_of(
    named: NamedPolicy, model: str | None, method: Method | None
) -> EngineDrafter | None:
    """The drafter that an engine is to load: the given one, or the one of the artifact's pair.

    Args:
        method: its kind; None reads `config.json` of the folder, or of the hub's model in the
            local cache.

    Returns:
        None where neither names one, and for plain decoding.

    Raises:
        UsageError: a kind that is not known, or none for what is no folder.
    """
    if isinstance(named.policy.shape, RootOnly):
        return None
    name = model or next((one.manifest.pair.drafter for _, one in named.parts), None)
    if name is None:
        return None
    from specctl.runtime.load import is_eagle3, model_folder

    config: Any = None
    if os.path.isdir(name) or name == "embedded" or name.startswith("embedded:"):
        folder = model_folder(name, embedded_default="eagle3").absolute()
        name, config = str(folder), str(folder / "config.json")
    elif method is None:
        from huggingface_hub import try_to_load_from_cache

        with suppress(ValueError):  # no name of the hub
            config = try_to_load_from_cache(name, "config.json")
    if method is None and isinstance(config, str):
        method = "eagle3" if is_eagle3(Path(config).parent) else "draft_model"
    if method is None:
        raise UsageError(
            f"drafter {name}: expected a folder or a downloaded model, whose config.json says "
            "its kind, or --method, found neither",
            hint=f"give --method {' or '.join(get_args(Method))}, or --drafter FOLDER",
        )
    return EngineDrafter.model_validate({"model": name, "method": method})


# --------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class Judged:
    """A policy before an engine.

    Attributes:
        losses: what the engine would lose of it, as clauses; empty if it runs it.
        chosen: the policy itself, or else the nearest that the engine runs; None where the size of
            that is not known. label: of it.
        figures: of both on a log; None without one, or where it cannot tell them.
    """

    engine: Engine
    source: Source
    losses: tuple[str, ...]
    chosen: Policy | None
    label: str
    figures: Result | None

    def shown(self) -> list[Any]:
        """The verdict, for a person."""
        engine, parts = self.engine, list[Any]()
        parts.append(f"Written for {engine.title} {engine.checked}.")
        if self.source.reason is not None:
            parts.append(self.source.reason)
        if self.losses:
            lines = [f"{engine.title} does not run {lost}." for lost in self.losses]
            known = f"The nearest that it runs: {self.label}."
            parts.append([*lines, *([known] if self.chosen is not None else [])])
        if self.figures is not None:
            parts += self.figures.shown()
        elif self.losses:
            parts.append(
                "For figures of both give --log TRACES, with --cost-model for times. "
                f"`specctl tune --for {engine.name}` searches what it runs."
            )
        return parts

    def to_json(self) -> dict[str, Any]:
        """The verdict, for a script."""
        return {
            "engine": self.engine.name,
            "checked": self.engine.checked,
            "policy": self.source.policy.model_dump(mode="json"),
            "losses": self.losses,
            "exported": None if self.chosen is None else self.chosen.model_dump(mode="json"),
            "reason": self.source.reason,
            "replay": None if self.figures is None else self.figures.to_json(),
        }

    def refuse(self) -> None:
        """Raises `EngineError`, by what is lost."""
        search = f"search what it runs with `specctl tune --for {self.engine.name}`"
        raise EngineError(
            f"export of {self.source.named.label} to {self.engine.title}: expected a policy that "
            f"the engine runs, found {self.losses[0]}",
            hint="write the nearest with --nearest, or serve another engine"
            if self.chosen is not None
            else f"{search}; --log TRACES tells how large the nearest is",
        )


def judge(
    source: Source,
    engine: Engine,
    traces: TraceSet | None,
    *,
    cost_model: Path | None = None,
    batch_size: int | None = None,
) -> Judged:
    """Whether an engine runs a policy, and the nearest that it does.

    Args:
        traces: dense; the mean round is then of them, not of the tuning, and both are replayed.
        batch_size: above 1 and with a cost model the batch is simulated.

    Raises:
        UsageError: a budget that a batch shares, and no batch to simulate it with.
    """
    losses = engine.losses(source.policy)
    mean = mean_round(traces, source.policy) if traces is not None and losses else source.mean
    chosen = engine.nearest_to(source.policy, mean) if losses else source.policy
    if chosen is None:
        return Judged(engine, source, losses, None, "", None)
    label = words_of(chosen) or f"{source.named.label} on a chain"
    named = [source.named, *([NamedPolicy(label, chosen)] if losses else [])]
    # The others write a text of their own.
    strict = [one for one in named if isinstance(one.policy.acceptance, Strict)]
    figures = None
    if traces is not None and strict:
        from specctl.replay.run import replay_policies, serve_policies

        config = ReplayConfig(policies=tuple(one.label for one in strict), cost_model=cost_model)
        is_load = batch_size is not None and batch_size > 1 and cost_model is not None
        if not is_load and any(not isinstance(one.policy.budget, PerRequest) for one in strict):
            raise UsageError(
                "--log for a budget that a batch shares: expected --max-batch-size above 1 and "
                "--cost-model, to simulate the batch, found one request at a time",
                hint="give both, or leave --log out",
            )
        if is_load:  # what vLLM lacks would run there in another form
            batching = "specctl" if losses else engine.batching
            config = config.model_copy(update={"batch_size": batch_size, "engine": batching})
        score = serve_policies if is_load else replay_policies
        figures = score(traces, config, named=strict)
    return Judged(engine, source, losses, chosen, label, figures)


def mean_round(traces: TraceSet, policy: Policy) -> MeanRound:
    """The mean round of a policy's shape on dense traces, one request at a time."""
    from specctl.logs.tree_log import DenseLog
    from specctl.replay.rounds import replay

    [run] = replay(DenseLog.open(traces), [Policy(shape=policy.shape)], with_bounds=False)
    outcomes = run.outcomes
    return MeanRound(float(outcomes.levels.mean()), float(outcomes.verified.mean()))


# --------------------------------------------------------------------------- words and files


def target_of(named: NamedPolicy, model: str | None) -> str:
    """The model that is served: the given one, that of the artifact's pair, or a word for it."""
    name = model or next((one.manifest.pair.target for _, one in named.parts), "TARGET")
    if name == "embedded" or name.startswith("embedded:"):
        from specctl.runtime.load import model_folder

        name = str(model_folder(name, embedded_default="target").absolute())
    return name


def command_lines(engine: Engine, export: Export, target: str) -> Iterator[str]:
    """The command as it is typed, a setting a line; or the lines of Python."""
    yield from export.code
    if not engine.command:
        return
    settings = [f"{name}={shlex.quote(value)}" for name, value in export.environment.items()]
    settings.append(engine.command.replace("TARGET", shlex.quote(target)))
    for word in export.flags:
        if word.startswith("--"):
            settings.append(f"  {word}")
        else:
            settings[-1] += f" {shlex.quote(word)}"
    yield from (f"{line} \\" for line in settings[:-1])
    yield settings[-1]


def settings_of(source: Source, engine: Engine, target: str, drafter: str) -> EngineSettings:
    """The settings of an engine for a policy, for a page; a sentence where it cannot be said.

    Args:
        target, drafter: names of the pair, as traces have them.
    """
    if losses := engine.losses(source.policy):
        found = engine.nearest_to(source.policy, source.mean)
        nearest = None if found is None else words_of(found)
        near = f" The nearest that it runs: {nearest}." if nearest else ""
        return EngineSettings(
            engine.title, notes=(f"{engine.title} does not run {losses[0]}.{near}",)
        )
    try:
        serving = Serving(drafter_of(source.named, drafter, None), reference=source.reference_of)
        written = engine.write(source.policy, serving)
        lines = [*command_lines(engine, written, target_of(source.named, target))]
    except (EngineError, UsageError) as error:
        return EngineSettings(
            engine.title, notes=(f"Nothing to set in {engine.title} yet: {error}.",)
        )
    for name, content in written.files.items():
        if any(name in line for line in lines):  # and the words alone do not say it
            lines += ["", f"# {name}:", *content.splitlines()]
    reason = () if source.reason is None else (source.reason,)
    return EngineSettings(engine.title, lines, (*reason, *written.notes))


def read_exported(path: Path) -> tuple[Engine, Policy] | None:
    """The engine that a file is for, by its name, and the policy of it and the files beside it;
    None for other names.

    Raises:
        EngineError: settings that the engine could not take, or that are no policy of specctl.
    """
    for engine in ENGINES.values():
        if path.name in engine.files:
            beside = [path.with_name(name) for name in engine.files]
            found = {one.name: one.read_text("utf-8") for one in beside if one.is_file()}
            return engine, engine.read((), found)
    return None
