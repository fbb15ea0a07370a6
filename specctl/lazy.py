"""Modules imported on first use, so that reading a policy's record needs neither torch nor numpy.

    from specctl.lazy import Tensor, inference, np, torch

`torch` and `np` are the modules themselves for type checkers, and load them at the first attribute
otherwise; `Tensor` is for annotations and aliases of types alone; `inference` decorates as
`torch.inference_mode()` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Found = TypeVar("Found")


class LazyModule(ModuleType):
    """A module that is imported when an attribute is first read."""

    def __getattr__(self, name: str) -> Any:
        loaded = import_module(self.__name__)
        self.__dict__.update(vars(loaded))  # later look-ups skip this method
        return getattr(loaded, name)

    def __reduce__(self) -> Any:
        """Pickles by name: a function sent to another process takes its globals along."""
        return type(self), (self.__name__,)


if TYPE_CHECKING:
    import numpy
    import torch as torch
    from torch import Tensor as Tensor

    np = numpy
    Device = torch.device | str
else:
    np = LazyModule("numpy")
    torch = LazyModule("torch")
    Tensor, Device = "Tensor", "torch.device | str"


def inference(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """The function, run without a record for gradients."""

    @wraps(function)
    def called(*given: Given.args, **named: Given.kwargs) -> Found:
        with torch.inference_mode():
            return function(*given, **named)

    return called
