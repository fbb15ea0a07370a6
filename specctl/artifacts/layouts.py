"""What each fitted tensor may be, known before any of it becomes a number of Python.

A tensor of a million elements takes megabytes; as Python's numbers, JSON and records it takes
hundreds. So what no lawful record could hold is refused by its header alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specctl.artifacts.limits import MAX_FEATURES
from specctl.errors import ArtifactError
from specctl.policy.base import MAX_DEPTH
from specctl.policy.scorers import MAX_HIDDEN, MAX_TREE_NODES
from specctl.policy.shapes import MAX_EDGES


class Layout(NamedTuple):
    """The form of one fitted field.

    Attributes:
        most: elements at most.
    """

    dtype: type[np.generic]
    ndim: int
    most: int


def _floats(most: int) -> Layout:
    return Layout(np.float32, 1, most)


_NODES = Layout(np.int64, 1, MAX_TREE_NODES)
LAYOUTS = {
    "shape.edges": _floats(MAX_EDGES),
    "shape.thresholds": _floats(MAX_DEPTH),
    "shape.scorer.mean": _floats(MAX_FEATURES),
    "shape.scorer.scale": _floats(MAX_FEATURES),
    "shape.scorer.w1": Layout(np.float32, 2, MAX_HIDDEN * MAX_FEATURES),
    "shape.scorer.b1": _floats(MAX_HIDDEN),
    "shape.scorer.w2": _floats(MAX_HIDDEN),
    "shape.scorer.b2": _floats(1),
    "shape.scorer.roots": _NODES,
    "shape.scorer.feature": _NODES,
    "shape.scorer.threshold": _floats(MAX_TREE_NODES),
    "shape.scorer.left": _NODES,
    "shape.scorer.right": _NODES,
    "shape.scorer.value": _floats(MAX_TREE_NODES),
    "budget.calibration.slopes": _floats(MAX_DEPTH),
    "budget.calibration.intercepts": _floats(MAX_DEPTH),
}
"""By the path of the field in the policy record; the bounds are those of the records."""


def check_layouts(tensors: Mapping[str, NDArray[Any]]) -> None:
    """Refuses tensors that are no fitted field, or none of a lawful record.

    Raises:
        ArtifactError: E_WEIGHTS for another name, dtype or number of axes, E_COST for too many
            elements.
    """
    for path, tensor in tensors.items():
        layout = LAYOUTS.get(path)
        if layout is None:
            raise _refused("E_WEIGHTS", "tensors", f"among {sorted(LAYOUTS)}", path)
        if (tensor.dtype, tensor.ndim) != (np.dtype(layout.dtype), layout.ndim):
            expected = f"{layout.dtype.__name__} of {layout.ndim} axes"
            raise _refused("E_WEIGHTS", path, expected, f"{tensor.dtype} of {tensor.ndim}")
        if tensor.size > layout.most:
            raise _refused("E_COST", path, f"at most {layout.most} elements", f"{tensor.size}")


def _refused(code: str, field: str, expected: str, found: str) -> ArtifactError:
    return ArtifactError(code, field, expected=expected, found=found)
