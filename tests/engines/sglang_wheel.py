"""Modules of SGLang, from the wheel that SPECCTL_SGLANG_WHEEL names.

Its package does not import without CUDA; single modules do, with stubs for what they take from
others.
"""

from __future__ import annotations

import os
import sys
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

WHEEL = os.environ.get("SPECCTL_SGLANG_WHEEL", "")
needs_wheel = pytest.mark.skipif(not WHEEL, reason="SPECCTL_SGLANG_WHEEL names no wheel")
STUBS: dict[str, dict[str, Any]] = {
    "sglang.srt.arg_groups.overrides": {"resolved_view": None, "resolving_view": None},
    "sglang.srt.runtime_context": {"attn_dp_enabled_of": None},
    "sglang.srt.speculative.spec_info": {"SpeculativeAlgorithm": None},
    "sglang.srt.utils": {"log_info_on_rank0": lambda logger, message: None},
    "sglang.srt.utils.common": {"human_readable_int": int},
}
"""What its modules take from others, and these tests never call."""


@contextmanager
def from_wheel(*names: str) -> Iterator[list[Any]]:
    """SGLang's modules of these names, which may import those before them."""
    modules = {name: types.ModuleType(name) for name in STUBS}
    for name, members in STUBS.items():
        vars(modules[name]).update(members)
    with zipfile.ZipFile(WHEEL) as wheel, patch.dict(sys.modules, modules):
        for name in names:
            sys.modules[name] = module = types.ModuleType(name)
            for above in range(1, name.count(".") + 1):
                package = name.rsplit(".", above)[0]
                sys.modules.setdefault(package, types.ModuleType(package))
            path = name.replace(".", "/") + ".py"
            exec(compile(wheel.read(path), path, "exec"), vars(module))
        yield [sys.modules[name] for name in names]


@contextmanager
def adaptive_module() -> Iterator[Any]:
    with from_wheel("sglang.srt.speculative.adaptive_spec_params") as [module]:
        yield module
