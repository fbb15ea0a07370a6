"""Triton's interpreter, made quicker and nearer to a GPU.

`quick` saves half of these tests' time. The interpreter patches `triton.language` when a kernel is
launched and, once more, whenever one function calls another, hundreds of times a launch; it makes a
table of all dtypes to look one up; and it reduces by functions of our own element after element.
Nothing here touches what an operation computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

LANGUAGES = {tl.__name__, tl.core.__name__}


@contextmanager
def quick() -> Iterator[None]:
    if not triton.__version__.startswith("3.7."):  # private names, as they are there
        yield
        return
    replaced = {
        "_patch_lang": once_a_launch(interpreter._patch_lang),
        "_get_np_dtype": by_element(interpreter._get_np_dtype),
    }
    with (
        patch.multiple(interpreter, **replaced),
        patch.object(ReduceOps, "generic_reduce", reduced_by_pairs),
    ):
        yield


def once_a_launch(patch_lang: Callable[..., Any]) -> Callable[..., Any]:
    """Patches for a function only what nothing has patched since the launch began.

    A launch patches first and restores last. In between nothing is restored, so patching the same
    modules again would put equal functions in place of those that are there.
    """
    patched: set[str] = set()

    @cache
    def languages_of(function: Callable[..., Any]) -> set[str]:
        modules = {m.__name__ for m in function.__globals__.values() if inspect.ismodule(m)}
        return modules & LANGUAGES

    def patch_new(function: Callable[..., Any]) -> Any:
        modules = languages_of(function)
        if modules and modules <= patched:
            return None  # a call within the launch, which asks for no scope
        is_launch, scope = not patched, patch_lang(function)
        patched.update(modules)
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    return patch_new


def reduced_by_pairs(self: ReduceOps, given: tuple[Any, ...]) -> list[Any]:
    """All neighbours at once, then what came of them, as a GPU does; the order is kept."""
    tensors, axis = self.unravel(given, self.axis)
    parts = [tensor.handle.data for tensor in tensors]
    while (size := parts[0].shape[axis]) > 1:
        halves = [
            self.to_tensor(part.take(range(start, size, 2), axis), tensor.dtype)
            for start in (0, 1)
            for part, tensor in zip(parts, tensors, strict=True)
        ]
        found = self.combine_fn.fn(*halves)
        parts = [one.handle.data for one in (found if isinstance(found, tuple) else (found,))]
    if not self.keep_dims:
        parts = [part.item() if self.axis is None else part.squeeze(axis) for part in parts]
    return [self.to_tensor(part, one.dtype) for part, one in zip(parts, tensors, strict=True)]


def by_element(np_dtype: Callable[..., Any]) -> Callable[..., Any]:
    """A block's dtype in NumPy is its elements'; pointers cannot be hashed, and need no table."""
    cached = cache(np_dtype)

    def element(dtype: Any) -> Any:
        scalar = dtype.scalar
        return (np_dtype if isinstance(scalar, tl.pointer_type) else cached)(scalar)

    return element


@contextmanager
def products_of_bfloat16() -> Iterator[None]:
    """The interpreter (3.6, 3.7) multiplies their bit patterns; make it multiply numbers."""
    dot = InterpreterBuilder.create_dot

    def widened(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    with patch.object(InterpreterBuilder, "create_dot", create_dot):
        yield


@contextmanager
def maxima_without_nan() -> Iterator[None]:
    """`tl.maximum` drops NaN, as on a GPU; the interpreter's own keeps it."""
    with patch.object(np, "maximum", np.fmax):
        yield
