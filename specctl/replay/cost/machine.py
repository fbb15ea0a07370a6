"""The machine at hand, and whether a cost model speaks of it and still holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specctl.artifacts.manifest import PairFingerprint
from specctl.replay.cost.model import CostModel
from specctl.replay.cost.records import LinearCost, Machine

if TYPE_CHECKING:  # brings transformers along, which reading a cost model does without
    from specctl.runtime.load import Pair

VALID_DAYS = 90
"""Drivers and libraries move; an older table is warned about, not refused."""
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_DRIVER = Path("/proc/driver/nvidia/version")


def this_machine(pair: Pair) -> Machine:
    """The machine at hand, as the pair is loaded on it."""
    from specctl.runtime.hardware import hardware_name

    device = pair.target.model.device
    on_gpu = device.type == "cuda"
    return Machine(
        device=hardware_name(device),
        num_cpus=os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        dtype=str(pair.target.model.dtype).removeprefix("torch."),
        torch=torch.__version__,
        transformers=version("transformers"),
        cuda=torch.version.cuda if on_gpu else None,
        driver=_driver() if on_gpu else None,
    )


def validity(now: datetime) -> tuple[str, str]:
    """When a model measured now was measured, and when it expires; UTC."""
    return now.strftime(_TIME), (now + timedelta(days=VALID_DAYS)).strftime(_TIME)


def check_machine(model: CostModel, here: Mapping[str, object]) -> list[str]:
    """What differs between where a model was measured and here, one line a field.

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
    """Which models of a pair are not those that were timed, one line each."""
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
        "cost model: times of the ordinary loop on CUDA, where rounds are captured unless told "
        "otherwise; measure those with specctl profile --rounds graphs"
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


def _driver() -> str | None:
    """The NVIDIA kernel module's line, where Linux tells it."""
    return _DRIVER.read_text().splitlines()[0].strip() if _DRIVER.exists() else None
