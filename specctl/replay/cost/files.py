"""`cost_model.json` on disk, and whether it speaks of this machine, this pair and today."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import TypeAdapter, ValidationError

from specctl.artifacts.manifest import PairFingerprint
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError, InputError, UsageError
from specctl.records import describe_violation
from specctl.replay.cost.model import CostModel
from specctl.replay.cost.records import (
    COST_MODEL_VERSION,
    CostRecord,
    LinearCost,
    Machine,
    TableCost,
)
from specctl.results import CostFacts
from specctl.runtime.output import write_whole

if TYPE_CHECKING:  # brings transformers along, which reading a cost model does without
    from specctl.runtime.load import Pair

COST_MODEL = "cost model"
VALID_DAYS = 90
"""Drivers and libraries move; an older table draws a warning, no refusal."""
RATES = tuple(name for name in LinearCost.model_fields if name.endswith("_us"))
"""Names that `--linear` takes; docs/cost-model.md."""
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_DRIVER = Path("/proc/driver/nvidia/version")
_RECORD: TypeAdapter[TableCost | LinearCost] = TypeAdapter(CostRecord)


def load_cost_model(path: Path) -> CostModel:
    """A cost model from a file, its white space and order of keys free.

    Raises:
        InputError: a file that cannot be read, or whose first violation is named by field and
            index: negative, NaN or falling timings, axes that do not increase, other fields.
    """
    try:
        data = path.read_bytes()
        record = _RECORD.validate_json(data)  # names the field of a NaN, which strict JSON cannot
        parse_strict(data)  # knows a key that stands twice, which pydantic does not
        return CostModel(record)
    except OSError as error:
        found = os.strerror(error.errno or 0)
    except ValidationError as error:
        found = describe_violation(error)
    except ArtifactError as error:
        found = error.found
    raise InputError(
        f"cost model {path}",
        expected="the fields of docs/cost-model.md",
        found=found,
        fix="correct that, or measure again with specctl profile",
    )


def save_cost_model(model: CostModel, path: Path) -> None:
    """Writes the canonical JSON, whole or not at all; an older file is replaced.

    Raises:
        OutputError: a place that cannot be written.
    """
    write_whole(path, model.to_bytes(), COST_MODEL)


def parse_linear(text: str) -> CostModel:
    """`verify_fixed_us=5000,verify_token_us=20,...`: the linear form, every rate named.

    Raises:
        UsageError: a rate that is unknown, repeated, missing or no number of us.
    """
    words = [word.strip().partition("=") for word in text.split(",")]
    try:
        if len({name for name, _, _ in words}) < len(words):
            raise ValueError("a rate is repeated")
        values = {name: float(value) for name, _, value in words}
        whole = {"cost_model_version": COST_MODEL_VERSION, "source": "--linear", **values}
        return CostModel(LinearCost.model_validate(whole))
    except ValidationError as error:
        found = describe_violation(error)
    except ValueError as error:
        found = str(error)
    raise UsageError(
        "--linear",
        expected=f"rates in us, name=value, comma-separated: {', '.join(RATES)}",
        found=found,
        fix="correct that rate",
    )


def this_machine(pair: Pair) -> Machine:
    """The machine at hand, as the pair is loaded on it."""
    from specctl.runtime.identity import hardware_name

    device = pair.target.model.device
    on_gpu = device.type == "cuda"
    driver = _DRIVER.read_text().splitlines()[0].strip() if _DRIVER.exists() else None
    return Machine(
        device=hardware_name(device),
        num_cpus=os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        dtype=str(pair.target.model.dtype).removeprefix("torch."),
        torch=torch.__version__,
        transformers=version("transformers"),
        cuda=torch.version.cuda if on_gpu else None,
        driver=driver if on_gpu else None,
    )


def validity(now: datetime) -> tuple[str, str]:
    """The times of measurement and expiry of a model measured now; UTC."""
    return now.strftime(_TIME), (now + timedelta(days=VALID_DAYS)).strftime(_TIME)


def check_machine(model: CostModel, here: Mapping[str, object]) -> list[str]:
    """One line for each field in which the measured machine differs from this one.

    A linear form names no machine, so that is the one line it gets.

    Args:
        here: fields of `Machine`, as many as are known.
    """
    if isinstance(model.record, LinearCost):
        return [f"cost model: linear form from {model.record.source!r}, not measured here"]
    theirs = model.record.machine.model_dump()
    return [
        f"cost model: {name} was {theirs[name]!r}, here it is {here[name]!r}"
        for name in here
        if theirs[name] != here[name]
    ]


def check_pair(model: CostModel, pair: PairFingerprint) -> list[str]:
    """One line for each model of the pair that was not the one timed."""
    if isinstance(model.record, LinearCost):
        return []
    theirs = model.record.pair
    return [
        f"cost model: measured for {role} {getattr(theirs, role)!r}, "
        f"not for {getattr(pair, role)!r} of these weights"
        for role in ("target", "drafter")
        if getattr(theirs, f"{role}_digest") != getattr(pair, f"{role}_digest")
    ]


def check_rounds(model: CostModel) -> list[str]:
    """A line if rounds of the ordinary loop were timed where this runtime decodes in graphs."""
    record = model.record
    if isinstance(record, LinearCost) or record.rounds == "graphs" or record.machine.cuda is None:
        return []
    return [
        "cost model: times of the ordinary loop on CUDA, where rounds are captured by default; "
        "measure those with specctl profile --rounds graphs"
    ]


def check_expiry(model: CostModel, now: datetime | None = None) -> list[str]:
    """A line if the model has expired; none for a linear form, which has no date."""
    if isinstance(model.record, LinearCost):
        return []
    moment = now or datetime.now(UTC)
    if moment.strftime(_TIME) <= model.record.expires:  # one format, so text order is time order
        return []
    return [
        f"cost model: expired {model.record.expires} (measured {model.record.measured}); "
        "measure again with specctl profile"
    ]


def cost_facts(model: CostModel) -> CostFacts:
    """The sentences that a report gives of a cost model."""
    record = model.record
    if isinstance(record, LinearCost):
        hardware = f"linear cost form by {record.source}"
        provenance = (
            f"Times come from a linear form by {record.source}, not from a measurement here."
        )
    else:
        machine = record.machine
        hardware = f"{machine.device}, {machine.dtype}, {machine.num_threads} threads"
        errors = ", ".join(f"{name} {part.mape:.1%}" for name, part in record.held_out.items())
        provenance = (
            f"Times come from a cost model measured on {machine.device} ({machine.dtype}), "
            f"{record.measured}, valid to {record.expires}; held-out error: {errors}."
        )
    return CostFacts(
        digest=model.digest,
        hardware=hardware,
        provenance=provenance,
        warnings=tuple(check_expiry(model)),
    )
