"""`specctl export`: a policy as settings of an engine, or the nearest policy that the engine runs,
with replayed figures of both."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from specctl.contents import utf8_of
from specctl.engines.engine import (
    Engine,
    EngineDrafter,
    EngineSettings,
    Export,
    MeanRound,
    Serving,
)
from specctl.engines.llamacpp_flags import LLAMACPP
from specctl.engines.sglang_flags import SGLANG
from specctl.engines.transformers_flags import TRANSFORMERS
from specctl.engines.vllm_flags import VLLM
from specctl.errors import EngineError, ModelError, UsageError, check_choice, reason_of
from specctl.formatting import count, listed
from specctl.policy import (
    PerRequest,
    Policy,
    RootOnly,
    Strict,
    as_chain,
    build_shape,
    parse_policy,
)
from specctl.records import canonical_json
from specctl.replay.config import ReplayConfig, TuneConfig
from specctl.runtime.checkpoints import WORDS, Served, architecture, block_size, methods_of
from specctl.runtime.identity import (
    config_from_hub,
    local_folder,
    model_folder,
    weight_files,
    weights_digest,
)
from specctl.runtime.words import (
    NamedPolicy,
    names_artifact,
    pieces,
    resolve_policy,
    words_of,
)
from specctl.stores import is_store_url

if TYPE_CHECKING:
    from specctl.artifacts.manifest import PairFingerprint
    from specctl.logs.trace_set import TraceSet
    from specctl.replay.facts import PairFacts
    from specctl.replay.results import Result

ENGINES = {engine.name: engine for engine in (VLLM, SGLANG, TRANSFORMERS, LLAMACPP)}


def engine_named(name: str, option: str) -> Engine:
    """An engine by its name; `UsageError` for another name."""
    check_choice(option, name, ENGINES)
    return ENGINES[name]


def check_load(engine: Engine, option: str, batch_size: int | None) -> None:
    """Raises `UsageError` for a batch size at which an engine does not draft."""
    most = engine.max_batch_size
    if most is not None and batch_size is not None and batch_size > most:
        raise UsageError(
            f"{option} {batch_size}: {engine.title} drafts for at most {count(most, 'request')} "
            "together",
            hint="lower it, or choose another engine",
        )


# --------------------------------------------------------------------------- sources


@dataclass(frozen=True)
class Source:
    """A policy to export."""

    named: NamedPolicy
    reference: str | None
    """The name by which the plugin loads it: words, the absolute place of an artifact, or a
    registry's name; None if it is only a record."""
    pair: PairFingerprint | PairFacts | None = None  # that it was made on
    mean: MeanRound | None = None  # on the held-out prompts of its tuning
    reason: str | None = None  # of a tuning that chose plain decoding

    @property
    def policy(self) -> Policy:
        return self.named.policy

    def names(self, target: str | None, drafter: str | None) -> tuple[str, str | None]:
        """Target and drafter: the given ones, else those of its pair. With neither a name nor a
        pair they are the embedded ones, as in the verbs that decode."""
        own = ("embedded", "embedded") if target is drafter is None else ("TARGET", None)
        if self.pair is not None:
            own = self.pair.target, self.pair.drafter
        return target or own[0], drafter or own[1]

    def other_pair(self, target: str | None, drafter: str | None) -> str | None:
        """A sentence on given models that are not those of its pair; None without such.

        Folders are compared by their weights, other names as they are. GGUF files are not compared:
        they are conversions.
        """
        if self.pair is None:
            return None
        own = {"target": self.pair.target_digest, "eagle3": self.pair.drafter_digest}
        names = {"target": self.pair.target, "eagle3": self.pair.drafter}
        for part, name in (("target", target), ("eagle3", drafter)):
            if name is None or name in (names[part], "TARGET") or name.endswith(".gguf"):
                continue
            folder = local_folder(name, embedded_default=part)
            if folder is None or not weight_files(folder) or weights_digest(folder) != own[part]:
                made = f"{self.pair.target} with {self.pair.drafter}"
                return f"{self.named.label} was made on {made}, not on {name}: its speed is unknown"
        return None

    def reference_of(self, policy: Policy) -> str:
        """The name by which the plugin loads this policy, or one made from it.

        Raises:
            EngineError: a policy without words and without an artifact of its own.
        """
        as_given = as_chain(policy) == as_chain(self.policy)  # as the plugin runs either
        found = self.reference if as_given else words_of(policy)
        if found is None:
            raise EngineError(
                f"policy {self.named.label} has no words and no artifact of its own, by which the "
                "plugin could load it",
                hint="export the artifact of its shape alone; keep a tuning's tune.json beside its "
                "policy/",
            )
        return found


def engine_options(settings: TuneConfig) -> dict[str, Any]:
    """The arguments of `tuning.prepare` for the engine of `--for`; none without one."""
    if settings.for_engine is None:
        return {}
    engine = engine_named(settings.for_engine, "--for")
    check_load(engine, "--batch-size", settings.batch_size)
    decides = not engine.has_plugin
    return {"runs": engine.runs, "batching": engine.batching, "decides": decides}


def read_source(text: str) -> Source:
    """The policy that a user names: words, an artifact, or a `tune.json` for its chosen policy.

    A lossy policy is accepted: the nearest lossless one may be wanted.

    Raises:
        InputError: a file that is no tuning; see also `words.resolve_policy`.
    """
    if not (text.endswith(".json") and os.path.isfile(text)):
        named = resolve_policy(text, allow_lossy=True)
        pair = next((one.manifest.pair for _, one in named.parts), None)
        return Source(named, "+".join(map(_absolute, pieces(text))), pair, *_tuned(named))
    from specctl.replay.facts import read_result
    from specctl.replay.tune.verdict import POLICY_FOLDER, TuneResult

    result = read_result(Path(text), TuneResult, "specctl tune")
    standing = result.standing(result.chosen)
    figures, policy = standing.held_out, parse_policy(canonical_json(standing.record))
    mean = MeanRound(figures.levels_per_call.value, figures.verified_per_call.value)
    reason = result.why_plain() if isinstance(policy.shape, RootOnly) else None
    folder = Path(text).absolute().parent / POLICY_FOLDER
    if folder.is_dir():
        named = resolve_policy(str(folder), allow_lossy=True)
        if named.policy == policy:
            named = replace(named, label=standing.policy)
            return Source(named, str(folder), result, mean, reason)
    named = NamedPolicy(standing.policy, policy, spec=text)
    return Source(named, words_of(policy), result, mean, reason)


def _tuned(named: NamedPolicy) -> tuple[MeanRound | None, str | None]:
    """The mean round of an artifact of `tune`, and the reason if it chose plain decoding."""
    for _, artifact in named.parts:
        fit, evidence = artifact.manifest.fit or {}, artifact.manifest.evidence
        if fit.get("kind") == "tune" and evidence is not None and artifact.policy == named.policy:
            levels = evidence.metrics["held_out_levels_per_call"].value
            tokens = evidence.metrics["held_out_verified_per_call"].value
            mean = None if levels is None or tokens is None else MeanRound(levels, tokens)
            reason = "`specctl tune` chose plain decoding; the reason stands in the README.md."
            return mean, reason if isinstance(named.policy.shape, RootOnly) else None
    return None, None


def _absolute(piece: str) -> str:
    """A piece of a policy's name, with an absolute path."""
    if not names_artifact(piece) or is_store_url(piece):
        return piece
    if os.path.isdir(piece):
        return os.path.abspath(piece)
    place, slash, name = piece.rpartition("/")
    return f"{os.path.abspath(place)}/{name}" if slash else name


def drafter_of(
    named: NamedPolicy, model: str | None, method: Served | None, target: str | None = None
) -> EngineDrafter | None:
    """The drafter for an engine, by its name.

    Args:
        method: its kind; None reads the folder, or config.json of a hub id, which is fetched.
        target: the served model, which may be its own drafter.

    Returns:
        None if no drafter is named, and for plain decoding.

    Raises:
        UsageError: a drafter whose kind is not known, or is another one than `method`.
        ModelError: a folder that cannot be read.
    """
    if isinstance(named.policy.shape, RootOnly):
        return None
    if (name := model) is None:
        return None
    folder = local_folder(name, embedded_default="eagle3")
    if folder is None and method is not None:
        return EngineDrafter(model=name, method=method)
    try:
        folder = folder or config_from_hub(name)
    except ModelError as error:
        raise UsageError(
            f"drafter {name} is of unknown kind: {error.message}",
            hint=f"give --method {' or '.join(get_args(Served))}, or --drafter FOLDER",
        ) from error
    is_here = os.path.exists(name) or name.partition(":")[0] == "embedded"
    shown, kinds = str(folder.absolute()) if is_here else name, methods_of(folder)
    if method is not None and method not in kinds:
        raise UsageError(
            f"--method {method} contradicts {name}, which is {WORDS[kinds[0]]} by its files",
            hint=f"leave --method out, which writes {kinds[0]}, or name another --drafter",
        )
    if method is None and len(kinds) > 1 and name != target:
        raise UsageError(
            f"drafter {name} can draft as {' or as '.join(WORDS[one] for one in kinds)}, by its "
            "files",
            hint=f"give --method {' or '.join(kinds)}",
        )
    kind = method or kinds[-1]
    size, stated = block_size(folder, kind), architecture(folder)
    return EngineDrafter(model=shown, method=kind, block_size=size, architecture=stated)


# --------------------------------------------------------------------------- the verdict


@dataclass(frozen=True)
class Judged:
    """Whether an engine runs a policy, and the nearest policy that it runs."""

    engine: Engine
    source: Source
    losses: tuple[str, ...]  # parts of the policy that the engine lacks, as clauses
    chosen: Policy | None  # the policy, or the nearest one; None if the size of that is not known
    label: str  # of `chosen`
    figures: Result | None  # of both on a log, if it was given and has them

    def shown(self) -> list[Any]:
        """The verdict in words."""
        engine, parts = self.engine, list[Any]()
        if not self.losses:
            parts.append(f"{engine.title} runs {self.label}:")
        if self.source.reason is not None:
            parts.append(self.source.reason)
        if self.losses:
            lines = [f"{engine.title} does not run {lost}." for lost in self.losses]
            known = f"The nearest policy that it runs: {self.label}."
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
        """The verdict as JSON."""
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
        """Raises `EngineError`; `shown` has the parts that the engine lacks."""
        fix = "write the nearest policy with --nearest, or serve another engine"
        if self.chosen is None:
            fix = f"search what it runs with `specctl tune --for {self.engine.name}`, or give "
            fix += "--log TRACES, which have the size of the nearest policy"
        label = self.source.named.label
        raise EngineError(f"{self.engine.title} lacks a part of {label}: no export", hint=fix)


def judge(
    source: Source,
    engine: Engine,
    traces: TraceSet | None,
    *,
    cost_model: Path | None = None,
    batch_size: int | None = None,
) -> Judged:
    """Whether an engine runs a policy, and the nearest policy that it runs.

    Args:
        traces: dense traces to replay both on; they also replace the mean round of the tuning.
        batch_size: simulate batches, if it is above 1 and there is a cost model.

    Raises:
        UsageError: a budget shared by a batch, without a batch to simulate.
    """
    losses, mean = engine.losses(source.policy), source.mean
    if traces is not None and losses:
        from specctl.logs.tree_log import DenseLog
        from specctl.replay.rounds import replay

        shape = Policy(shape=source.policy.shape)
        [run] = replay(DenseLog.open(traces), [shape], with_bounds=False)
        mean = MeanRound(float(run.outcomes.levels.mean()), float(run.outcomes.verified.mean()))
    chosen = engine.nearest_to(source.policy, mean) if losses else source.policy
    if chosen is None:
        return Judged(engine, source, losses, None, "", None)
    label = words_of(chosen) or f"{source.named.label} on a chain"
    named = [source.named, *([NamedPolicy(label, chosen)] if losses else [])]
    # Lossy policies change the text, which the log does not have.
    strict = [one for one in named if isinstance(one.policy.acceptance, Strict)]
    figures = None
    if traces is not None and strict:
        from specctl.replay.run import replay_traces

        config = ReplayConfig(policies=tuple(one.label for one in strict), cost_model=cost_model)
        is_load = batch_size is not None and batch_size > 1 and cost_model is not None
        if not is_load and any(not isinstance(one.policy.budget, PerRequest) for one in strict):
            raise UsageError(
                "--log with a shared budget needs --max-batch-size above 1 and --cost-model, to "
                "simulate the batch",
                hint="give both, or leave --log out",
            )
        # Our batching for policies that the engine lacks; llama.cpp has rules at the end of a text.
        if not losses and (is_load or engine.batching == "llamacpp"):
            config = config.model_copy(update={"engine": engine.batching})
        if is_load:
            config = config.model_copy(update={"batch_size": batch_size})
        figures = replay_traces(traces, config, named=strict)
    return Judged(engine, source, losses, chosen, label, figures)


def synthetic_rates(traces: TraceSet, policy: Policy, engine: Engine) -> tuple[float, ...]:
    """Accepted rates by position that make an engine accept as a policy does, for `--synthetic`.

    The i-th is the product of the first i shares of accepted tokens among those that were drafted
    behind accepted ones: for a chain, the share of rounds that accept i tokens. Engines draw every
    position on its own, so that a stop drafts as long as its own drafter lets it.

    Raises:
        UsageError: an engine without synthetic acceptance, or a policy that drafts nothing.
    """
    import numpy as np

    from specctl.logs.tree_log import DenseLog
    from specctl.replay.llamacpp import log_of_engine
    from specctl.replay.rounds import replay

    if not engine.has_synthetic or isinstance(policy.shape, RootOnly):
        what = "ar, which drafts nothing" if engine.has_synthetic else engine.title
        able = [one.title for one in ENGINES.values() if one.has_synthetic]
        raise UsageError(
            f"--synthetic does not go with {what}: it is for drafts in {' and '.join(able)}"
        )
    log = log_of_engine(DenseLog.open(traces), traces, engine.batching)
    [run] = replay(log, [policy], with_bounds=False)
    drafted, accepted = run.outcomes.verified - 1, run.outcomes.accepted
    places = np.arange(build_shape(policy.shape).max_depth)[:, None]
    reached = ((drafted > places) & (accepted >= places)).sum(1)
    passed = (accepted > places).sum(1)
    return tuple(np.cumprod(passed / np.maximum(reached, 1)).round(6).tolist())


# --------------------------------------------------------------------------- words and files


def target_of(name: str) -> str:
    """The served model by its name, which may be the word TARGET."""
    if name.partition(":")[0] == "embedded":
        name = str(model_folder(name, embedded_default="target").absolute())
    return name


def command_lines(engine: Engine, export: Export, target: str) -> Iterator[str]:
    """The command, one setting a line; or the lines of Python."""
    yield from export.code
    if not engine.command:
        return
    settings = [f"{name}={shlex.quote(value)}" for name, value in export.environment.items()]
    served = export.target or target
    settings.append(engine.command.replace("TARGET", shlex.quote(served)))
    for word in export.flags:
        if word.startswith("--"):
            settings.append(f"  {word}")
        else:
            settings[-1] += f" {shlex.quote(word)}"
    yield from (f"{line} \\" for line in settings[:-1])
    yield settings[-1]


def settings_of(source: Source, engine: Engine, target: str, drafter: str) -> EngineSettings:
    """The settings of an engine for a policy, or a sentence on why there are none.

    They are for a page that travels: TARGET, DRAFTER and the artifact's name stand for what lies on
    this machine.

    Args:
        target, drafter: names of the pair, as in traces.
    """
    if losses := engine.losses(source.policy):
        found = engine.nearest_to(source.policy, source.mean)
        nearest = None if found is None else words_of(found)
        near = f" The nearest policy that it runs: {nearest}." if nearest else ""
        return EngineSettings(
            engine.title, notes=(f"{engine.title} does not run {losses[0]}.{near}",)
        )
    try:
        served = target_of(target)
        of = drafter_of(source.named, drafter, None, served)
        serving = Serving(of, reference=source.reference_of, target=served)
        written = engine.write(source.policy, serving)
    except (EngineError, ModelError, UsageError) as error:
        return EngineSettings(
            engine.title, notes=(f"Nothing to set in {engine.title} yet: {error.line}.",)
        )
    places = {served: "TARGET"} | ({} if of is None else {of.model: "DRAFTER"})
    if source.reference is not None:
        of_tune = os.path.basename(source.reference) == "policy"
        places[source.reference] = Path(source.reference).parts[-2 if of_tune else -1]
    here = {place: name for place, name in places.items() if os.path.exists(place)}

    def elsewhere(text: str) -> str:
        """A text without the places of this machine, also as JSON has them."""
        for place, name in here.items():
            text = text.replace(json.dumps(place)[1:-1], name).replace(place, name)
        return text

    written = replace(
        written,
        flags=tuple(map(elsewhere, written.flags)),
        environment={name: elsewhere(value) for name, value in written.environment.items()},
        files={name: elsewhere(content) for name, content in written.files.items()},
        target=written.target and elsewhere(written.target),
    )
    lines = [*command_lines(engine, written, elsewhere(served))]
    for name, content in written.files.items():
        if any(name in line for line in lines):  # a file that the command names
            lines += ["", f"# {name}:", *content.splitlines()]
    reason = () if source.reason is None else (source.reason,)
    used = [name for name in here.values() if name in " ".join(lines)]
    yours = (f"For {listed(used)} write your own places.",) if used else ()
    return EngineSettings(engine.title, lines, (*reason, *written.notes, *yours))


def read_exported(path: Path) -> list[tuple[Engine, Policy]]:
    """The engine of an exported file, by its name, and the policy in it and the files beside it; or
    the engines of a folder's files. Other names have none.

    Raises:
        EngineError: settings that the engine would reject, or that are no policy of specctl.
    """
    is_folder = path.is_dir()
    folder, policies = path if is_folder else path.parent, []
    for engine in ENGINES.values():
        names = [name for name in engine.files if is_folder or path.name in engine.files]
        beside = [folder / name for name in names if (folder / name).is_file()]
        try:
            hint = "export the policy again"
            found = {one.name: utf8_of(one, EngineError, hint).decode() for one in beside}
        except (OSError, ValueError) as error:
            raise EngineError(f"a file in {folder} cannot be read: {reason_of(error)}") from error
        if found:
            policies.append((engine, engine.read(found)))
    return policies
