"""`cost_model.json` on disk: read strictly, written whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from specctl.artifacts.strict_json import parse_strict, shown
from specctl.errors import ArtifactError, InputError, OutputError
from specctl.policy.parse import describe_violation
from specctl.replay.cost.model import CostModel
from specctl.replay.cost.records import CostRecord, LinearCost, TableCost

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
        raise _unusable(path, shown(describe_violation(error))) from None
    except ArtifactError as error:
        raise _unusable(path, error.found) from None
    return CostModel(record)


def save_cost_model(model: CostModel, path: Path) -> None:
    """Writes the canonical JSON, whole or not at all; an older file is replaced.

    Raises:
        OutputError: a place that cannot be written.
    """
    staged = _beside(path)
    try:
        with staged.open("xb") as file:
            file.write(model.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        staged.unlink(missing_ok=True)


def check_place(path: Path) -> None:
    """Refuses a file that cannot be written, before minutes are spent on its content.

    Raises:
        OutputError: no such folder, no permission, or a folder in the file's place.
    """
    probe = _beside(path)
    try:
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def _beside(path: Path) -> Path:
    return path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"


def _unusable(path: Path, found: str) -> InputError:
    return InputError(
        f"cost model {path}",
        expected="the fields of docs/cost-model.md",
        found=found,
        fix="correct that, or measure again with specctl profile",
    )


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(
        f"cost model {path}",
        expected="a file that can be written",
        found=error.strerror or type(error).__name__,
        fix="choose another --out",
    )
