"""`cost_model.json` on disk: read strictly, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError, InputError
from specctl.policy.parse import describe_violation
from specctl.replay.cost.model import CostModel
from specctl.replay.cost.records import CostRecord, LinearCost, TableCost
from specctl.runtime.output import write_whole

WHAT = "cost model"
_RECORD: TypeAdapter[TableCost | LinearCost] = TypeAdapter(CostRecord)


def load_cost_model(path: Path) -> CostModel:
    """A cost model from a file, its white space and order of keys free.

    Raises:
        InputError: a file that cannot be read, or whose first violation is named by field and
            index: negative, NaN or falling timings, axes that do not increase, other fields.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unusable(path, os.strerror(error.errno or 0)) from None
    try:
        record = _RECORD.validate_json(data)  # names the field of a NaN, which strict JSON cannot
        parse_strict(data)  # knows a key that stands twice, which pydantic does not
    except ValidationError as error:
        raise _unusable(path, describe_violation(error)) from None
    except ArtifactError as error:
        raise _unusable(path, error.found) from None
    return CostModel(record)


def save_cost_model(model: CostModel, path: Path) -> None:
    """Writes the canonical JSON, whole or not at all; an older file is replaced.

    Raises:
        OutputError: a place that cannot be written.
    """
    write_whole(path, model.to_bytes(), WHAT)


def _unusable(path: Path, found: str) -> InputError:
    return InputError(
        f"cost model {path}",
        expected="the fields of docs/cost-model.md",
        found=found,
        fix="correct that, or measure again with specctl profile",
    )
