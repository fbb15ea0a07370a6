"""Triton's interpreter without work that it repeats: half of these tests' time.

It patches `triton.language` when a kernel is launched and, once more, whenever one function calls
another, hundreds of times a launch; and it makes a table of all dtypes to look one up. Nothing
here touches what an operation computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import triton
import triton.language as tl
from triton.runtime import interpreter

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
    with patch.multiple(interpreter, **replaced):
        yield


def once_a_launch(patch_lang: Callable[..., Any]) -> Callable[..., Any]:
    """Patches for a function only what nothing has patched since the launch began.

    A launch patches first and restores last. In between nothing is restored, so patching the same
    modules again would put equal functions in place of those that are there.
    """
    patched: set[str] = set()

    def patch_new(function: Callable[..., Any]) -> Any:
        modules = {m.__name__ for m in function.__globals__.values() if inspect.ismodule(m)}
        modules &= LANGUAGES
        if modules and modules <= patched:
            return None  # a call within the launch, which asks for no scope
        is_launch, scope = not patched, patch_lang(function)
        patched.update(modules)
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    return patch_new


def by_element(np_dtype: Callable[..., Any]) -> Callable[..., Any]:
    """A block's dtype in NumPy is its elements'; pointers cannot be hashed, and need no table."""
    cached = cache(np_dtype)

    def element(dtype: Any) -> Any:
        scalar = dtype.scalar
        return (np_dtype if isinstance(scalar, tl.pointer_type) else cached)(scalar)

    return element
