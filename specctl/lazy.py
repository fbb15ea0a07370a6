"""Modules imported on first use, so that reading a policy's record costs neither torch nor numpy.

    from specctl.lazy import Tensor, np, torch

`torch` and `np` are the modules themselves for type checkers, and load them at the first attribute
otherwise; `Tensor` is for annotations and aliases of types alone.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any


class LazyModule(ModuleType):
    """A module that is imported when an attribute is first read."""

    def __getattr__(self, name: str) -> Any:
        loaded = import_module(self.__name__)
        self.__dict__.update(vars(loaded))  # from now on attributes are found without this
        return getattr(loaded, name)


if TYPE_CHECKING:
    import numpy
    import torch as torch
    from torch import Tensor as Tensor

    np = numpy
else:
    np = LazyModule("numpy")
    torch = LazyModule("torch")
    Tensor = "Tensor"
