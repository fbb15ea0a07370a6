"""`cost_model.json` on disk, and its fit to this machine, this pair and today."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import add
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from specctl.artifacts.manifest import PairFingerprint
from specctl.artifacts.strict_json import parse_strict
from specctl.contents import utf8_of
from specctl.durable import write_whole
from specctl.errors import (
    ArtifactError,
    ClockError,
    InputError,
    UsageError,
    did_you_mean,
    reason_of,
)
from specctl.formatting import listed
from specctl.policy import Policy
from specctl.records import describe_violation
from specctl.replay.cost.model import (
    LARGEST_ERROR,
    CostModel,
    FailedCheck,
    OutOfRange,
    TableCost,
    decider_of,
    decider_text,
)
from specctl.replay.cost.rates import EngineCost, LinearCost
from specctl.replay.facts import policy_options

logger = logging.getLogger(__name__)
COST_MODEL = "cost model"
VALID_DAYS = 90
"""Drivers and libraries change; an older table draws a warning."""
RATES = tuple(
    name
    for name, field in LinearCost.model_fields.items()
    if name.endswith("_us") and field.is_required()
)
"""Names that `--linear` needs; docs/cost-model.md."""
_TIME = "%Y-%m-%dT%H:%M:%SZ"
CLOCKS = Path(__file__).parent / "clocks"
"""Cost models of the package by name, `NAME.json`; docs/cost-model.md has the source of each."""
OWN_CLOCKS = {
    "llamacpp": ("llama.cpp", "specctl profile --engine llamacpp"),
    "vllm": ("vllm", "specctl profile --from TRACES of its plugin, at several lengths"),
}
"""Engines whose steps can be timed: the name in their clock, and the command."""
_OTHER = "a cost model is written by specctl profile; a log is a source of specctl import"
AnyCost = TableCost | LinearCost | EngineCost
_MODEL: TypeAdapter[AnyCost] = TypeAdapter(Annotated[AnyCost, Field(discriminator="kind")])


def clock_names() -> list[str]:
    """Names that stand for a packaged cost model wherever a file does."""
    return sorted(path.stem for path in CLOCKS.glob("*.json"))


def load_cost_model(path: Path) -> AnyCost:
    """A cost model from a file, or a packaged one by its name; a file of that name goes first.

    Raises:
        InputError: the file cannot be read or breaks a rule of the format; the message names the
            first field at fault.
    """
    names = clock_names()
    try:
        if str(path) in names and not path.exists():
            path = CLOCKS / f"{path}.json"
        data = utf8_of(path, InputError, _OTHER)
        model = _MODEL.validate_json(data)  # names the field of a NaN, which strict JSON cannot
        parse_strict(data)  # knows a key that stands twice, which pydantic does not
        return model
    except OSError as error:
        advice = "check the path, or write one with specctl profile"
        problem = f"cost model {path} cannot be read: {reason_of(error)}"
        if not path.exists():
            problem = f"{path} is no file, and none of the named clocks ({', '.join(names)})"
        raise InputError(
            problem,
            hint=did_you_mean(str(path), names, advice),
        ) from error
    except ValidationError as error:
        problem = describe_violation(error)
    except ArtifactError as error:
        problem = error.problem
    hint = "correct that, or measure again with specctl profile"
    if not data.lstrip().startswith(b"{"):
        hint = _OTHER
    raise InputError(
        f"cost model {path} breaks the format of docs/cost-model.md: {problem}", hint=hint
    )


def save_cost_model(model: CostModel, path: Path) -> None:
    """Writes the canonical JSON, whole or not at all; an older file is replaced.

    Raises:
        OutputError: a place that cannot be written.
    """
    write_whole(path, model.to_bytes(), COST_MODEL)


def parse_linear(text: str) -> LinearCost:
    """`verify_fixed_us=5000,verify_token_us=20,...`: the linear form, every rate named."""
    try:
        rates = [_rate(word.strip()) for word in text.split(",")]
        values = dict(rates)
        if len(values) < len(rates):
            raise ValueError("a rate is repeated")
        return LinearCost.model_validate({"cost_model_version": 1, "source": "--linear", **values})
    except ValidationError as error:
        found = describe_violation(error)
    except ValueError as error:
        found = str(error)
    raise UsageError(
        f"--linear takes rates in us as name=value, comma-separated: {found}",
        hint=f"write {','.join(f'{name}=N' for name in RATES)}, with a number for each N",
    )


def _rate(word: str) -> tuple[str, float]:
    name, equals, value = word.partition("=")
    try:
        return name, float(value)
    except ValueError:
        problem = f"{name} is {value!r}, no number" if equals else f"{word!r} is no name=value"
        raise ValueError(problem) from None


def validity(now: datetime) -> tuple[str, str]:
    """The times of measurement and expiry of a model measured now; UTC."""
    return now.strftime(_TIME), (now + timedelta(days=VALID_DAYS)).strftime(_TIME)


def doubts(
    model: AnyCost,
    *,
    pair: PairFingerprint | None = None,
    device: str | None = None,
    engine: str = "specctl",
    now: datetime | None = None,
) -> list[str]:
    """One line for each reason why the times of a model may not hold.

    Times may have failed their own check or expired, or belong to another engine, another pair,
    another machine or the ordinary loop where rounds are captured. A linear form names no machine
    and no pair; `clock_of` states this beside every figure.

    Args:
        pair, device: at hand; None if unknown.
        engine: whose speed is predicted, as `tune --for` names it.
        now: in place of the present time, UTC.
    """
    if isinstance(model, LinearCost):
        return []
    lines: list[str] = []
    if (check := model.failed_check) is not None:
        lines.append(f"{_off_by(check)}; measure again on a quiet machine")
    clock = model.engine if isinstance(model, EngineCost) else "specctl's own loop"
    name, command = OWN_CLOCKS.get(engine, (engine, None))
    if engine != "specctl" and clock != name:
        how = f"; measure those with {command}" if command else ""
        lines.append(f"times of {clock}, not of {name}, where a gain may be a loss{how}")
    if pair is not None:
        lines += [
            f"measured for {role} {getattr(model.pair, role)!r}, "
            f"not for {getattr(pair, role)!r} of these weights"
            for role in ("target", "drafter")
            if getattr(model.pair, f"{role}_digest") != getattr(pair, f"{role}_digest")
        ]
    if (now or datetime.now(UTC)).strftime(_TIME) > model.expires:  # text order is time order
        lines.append(
            f"expired {model.expires} (measured {model.measured}); "
            "measure again with specctl profile"
        )
    if device not in (None, model.device):
        lines.append(f"device was {model.device!r}, here it is {device!r}")
    if isinstance(model, EngineCost):
        lines.append(f"fitted to steps of {model.engine} with {model.support}; beyond, times go on")
    elif model.rounds == "ordinary" and model.machine.cuda is not None:
        lines.append(
            "times of the ordinary loop on CUDA, where rounds are captured by default; "
            "measure those with specctl profile --rounds graphs"
        )
    return [f"cost model: {line}" for line in lines]


def check_clock(model: CostModel, *, force: bool) -> None:
    """Refuses a model that failed its own check, because its verdicts may be wrong.

    Args:
        force: accept it; `clock_of` then adds the error to every verdict.

    Raises:
        ClockError: with the error of its speed.
    """
    check = model.failed_check
    if check is not None and not force:
        raise ClockError(
            f"the cost model is {_off_by(check)}; verdicts need speeds within "
            f"{LARGEST_ERROR:.0%} of the measured ones",
            hint="measure again on a quiet machine with specctl profile, or go on with --force",
        )


def _off_by(check: FailedCheck) -> str:
    return f"off by {check.error:+.0%} in its own check ({check.of})"


def warn_outside(label: str, parts: Iterable[Sequence[OutOfRange]]) -> tuple[str, ...]:
    """Warns of a policy's rounds outside the model's range, over all parts of a log.

    Returns:
        Words of the dimensions with most rounds outside.
    """
    mostly = []
    for dimension in zip(*parts, strict=True):
        found = reduce(add, dimension)
        if found.num_outside:
            logger.warning("cost model, %s: %s", label, found)
        if 2 * found.num_outside > found.num:
            mostly.append(found.words)
    return tuple(mostly)


def warn_of_lost_times(path: Path, policies: Iterable[Policy], pair: PairFingerprint) -> None:
    """Warns of decisions that an older cost model of the pair has times of and a new one will not
    have."""
    if not path.exists():
        return
    with suppress(InputError):
        older = load_cost_model(path)
        held = older.deciders if isinstance(older, TableCost) and older.pair == pair else {}
        if lost := sorted({*held} - {decider_of(policy) for policy in policies}):
            logger.warning(
                "%s has times of the decisions of %s, which this run leaves out; add %s to keep "
                "them",
                path,
                listed(map(decider_text, lost)),
                policy_options(held[name].policy for name in lost),
            )


def unfailed_place(model: CostModel, path: Path) -> Path:
    """The place of a new cost model: beside an older one that passed its check, if this failed."""
    if model.failed_check is None or not path.exists():
        return path
    with suppress(InputError):
        if load_cost_model(path).failed_check is None:
            return path.with_suffix(".failed.json")
    return path


def decision_facts(
    model: CostModel | None, policies: Mapping[str, tuple[Policy, str]]
) -> dict[str, Any]:
    """The fields of `TraceFacts` on policies' own decisions.

    Args:
        policies: by label, with their words as `profile --policy` takes them.
    """
    own = {label: words for label, (policy, words) in policies.items() if decider_of(policy)}
    is_timed = {label: model is None or model.times(policies[label][0]) for label in own}
    lacking = {label: words for label, words in own.items() if not is_timed[label]}
    timed = [one.policy for one in model.deciders.values()] if isinstance(model, TableCost) else []
    return {
        "without_decision_cost": lacking or None,
        "with_decision_cost": tuple(timed) or None if lacking else None,
        "free_decisions": tuple(own) or None if isinstance(model, LinearCost) else None,
    }


def clock_of(model: CostModel | None, pair: PairFingerprint | None) -> str | None:
    """The source of the times, with error and reservations in brackets, for every line that states
    a gain.

    Args:
        pair: the pair at hand; None if unknown.
    """
    if model is None:
        return None
    if isinstance(model, LinearCost):
        return f"the clock of {model.source} (stated, not of this pair, decisions free)"
    assert isinstance(model, TableCost | EngineCost)
    of = model.device
    if isinstance(model, EngineCost):
        of = f"{model.engine} {model.engine_version} on {of}"
    error, check = model.time_error, model.failed_check
    remarks = ["error not known" if error is None else f"error of a time {error:.1%}"]
    if check is not None:
        remarks.append(_off_by(check))
    elif isinstance(model, TableCost) and (busy := model.disturbed_check) is not None:
        remarks.append(f"its check was disturbed, {busy.waited:.0%} of its time waiting")
    names = f"of {model.pair.target} + {model.pair.drafter}"
    ours = model.pair.target_digest, model.pair.drafter_digest
    if pair is None:
        remarks.append(f"{names}; the log names no pair")
    elif (pair.target_digest, pair.drafter_digest) != ours:
        remarks.append(f"{names}, not of this pair")
    return f"the clock of {of} ({'; '.join(remarks)})"
