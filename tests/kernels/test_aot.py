"""Machine code of every launch, for chips that need not be there: no stack, no spills, wide loads.

A kernel that spills registers or loads element by element is correct and slow. An op's launcher is
run on the CPU with its launches recorded, and what it would have launched is compiled by Triton's
bundled assembler: exactly the configurations that are used.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton.backends.nvidia as nvidia
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from specctl.kernels.tree_attention import fused as attention
from tests.kernels.calls import calls

pytestmark = pytest.mark.nightly
ARCHS = (80, 90, 100)
"""A100, H100 and H200, B200."""
PRODUCTS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""Instructions of each chip's matrix units."""
TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.bool: "i1",
}  # fmt: skip
CALLS = calls()


class Launch(NamedTuple):
    """A kernel with its arguments by name, and options of the compiler."""

    kernel: Any
    given: dict[str, Any]
    options: dict[str, int]


def launches_of(run: Callable[[], object]) -> list[Launch]:
    found: list[Launch] = []

    def recorder(kernel: Any, _: object) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            options = {k: kwargs.pop(k) for k in ("num_warps", "num_stages") if k in kwargs}
            names = [param.name for param in kernel.params]
            found.append(Launch(kernel, dict(zip(names, args, strict=False)) | kwargs, options))

        return launch

    with patch.object(JITFunction, "__getitem__", recorder):
        run()
    return found


def compiled(launch: Launch, arch: int) -> Any:
    """As the launch would specialise it: None and 1 are constants, multiples of 16 are known."""
    signature, constants, attributes = {}, {}, {}
    for place, param in enumerate(launch.kernel.params):
        value = launch.given[param.name]
        is_special = not param.do_not_specialize
        is_constant = param.is_constexpr or value is None
        if is_constant or (isinstance(value, int) and value == 1 and is_special):
            signature[param.name], constants[(place,)] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[param.name] = "*" + TYPES[value.dtype]
            is_aligned = not param.do_not_specialize_on_alignment
        elif isinstance(value, float):
            signature[param.name], is_aligned = "fp32", False
        else:
            signature[param.name] = "i32" if abs(value) < 2**31 else "i64"
            is_aligned = is_special and value % 16 == 0
        if is_aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return compile_kernel(source, target=GPUTarget("cuda", arch, 32), options=launch.options)


def spilled_bytes(ptx: str, arch: int) -> int:
    """Bytes of stack, and those that the assembler stores and loads to spill registers."""
    tool = "ptxas-blackwell" if arch >= 100 else "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [
            Path(nvidia.__file__).parent / "bin" / tool,
            "-v",
            str(path),
            "-o",
            f"{folder}/o",
        ]
        command += [f"-arch=sm_{arch}{'a' if arch >= 90 else ''}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    text = done.stdout + done.stderr
    found = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", text)
    assert found, f"{tool} reports no spills: {text}"
    return sum(map(int, found))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CALLS)
def test_machine_code(name: str, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "chip_of", lambda _: attention.Chip(132, arch // 10))
    call = CALLS[name]
    launches = launches_of(lambda: call.fused()(*call.args, **call.options))
    assert launches
    wide = 0
    for launch in launches:
        ptx = compiled(launch, arch).asm["ptx"]
        assert spilled_bytes(ptx, arch) == 0, launch.kernel.__name__
        wide += len(re.findall(r"ld\.global[\w.:]*\.v4\.b32|ld\.global[\w.:]*\.v2\.b64", ptx))
        if launch.kernel is attention.attend_kernel:
            assert "cp.async.cg.shared.global" in ptx, "keys must arrive while others are used"
            if launch.given["query"].itemsize == 2 and launch.given["QUERIES"] >= 64:
                assert PRODUCTS[arch] in ptx, "slower than the chip's own matrix products"
    assert wide > 0 or not call.streams


@pytest.mark.parametrize("depth", [1, 2])
def test_gates_are_read_before_any_is_written(depth: int) -> None:
    """Several threads hold a row: a barrier stands between its loads and its stores in place."""
    call = CALLS[f"close_gates, {depth}, 10"]
    [launch] = launches_of(lambda: call.fused()(*call.args, **call.options))
    text = compiled(launch, 90).asm["ttir"]
    lines = [re.search(r"tt\.load|tt\.store|barrier", line) for line in text.splitlines()]
    steps = [found.group() for found in lines if found]
    last_load = len(steps) - 1 - steps[::-1].index("tt.load")
    assert "barrier" in steps
    assert steps.index("barrier") > last_load
    in_place = steps[steps.index("barrier") :].count("tt.store")
    assert in_place == 5, "order, count, depth, stop and keep are written behind it"
