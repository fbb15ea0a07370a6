"""Kernels compiled ahead of time for a chip that need not be there, and what they take of it.

A kernel that spills registers or loads element by element is correct and slow; both show in the
machine code. `compile_case` makes that code with Triton's bundled assembler, so that a machine
without a GPU can refuse it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCHS = (80, 90, 100)
"""A100, H100 and H200, B200."""
MAX_REGISTERS = 255
"""Of a thread; beyond them values spill to memory."""


@dataclass(frozen=True)
class Case:
    """One tuned configuration of a kernel.

    Attributes:
        kernel: the `@triton.jit` function.
        signature: type of every argument, e.g. `*bf16`, `i32`, `constexpr`.
        constexprs: value of every constexpr argument.
        divisible: arguments that are multiples of 16, which the launch would find out by itself.
        num_warps, num_stages: as launched.
        max_registers: more is a regression. vector_loads: 128-bit loads must appear.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int = MAX_REGISTERS
    vector_loads: bool = False


def case_of(
    name: str,
    kernel: Any,
    types: Mapping[str, str],
    max_registers: int,
    num_warps: int = 4,
    **constexprs: Any,
) -> Case:
    """A case by the types of arguments; pointers are aligned, as torch's memory is.

    Args:
        types: of all arguments but `constexprs`; more is harmless.
    """
    types = {**types, **dict.fromkeys(constexprs, "constexpr")}
    signature = {argument: types[argument] for argument in kernel.arg_names}
    return Case(
        name=name,
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        divisible=tuple(name for name, type_ in signature.items() if type_.startswith("*")),
        num_warps=num_warps,
        max_registers=max_registers,
    )


@dataclass(frozen=True)
class Resources:
    """What the machine code takes, per thread but for `shared_bytes`, which is per block.

    Attributes:
        stack_bytes: local memory; spills end up there.
        vector_loads: 128-bit global loads in the PTX.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    spill_bytes: int
    vector_loads: int
    ptx: str = field(repr=False)


def compile_case(case: Case, arch: int) -> Resources:
    """Compiles for sm_`arch` and reads the assembler's report.

    Not in a process where `TRITON_INTERPRET` was set before Triton was imported.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    places = {name: place for place, name in enumerate(case.kernel.arg_names)}
    source = ASTSource(
        fn=case.kernel,
        signature=dict(case.signature),
        constexprs={(places[name],): value for name, value in case.constexprs.items()},
        attrs={(places[name],): [["tt.divisibility", 16]] for name in case.divisible},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return _resources(compiled.asm["ptx"], compiled.asm["cubin"], arch)


def _resources(ptx: str, cubin: bytes, arch: int) -> Resources:
    usage = _usage(cubin)
    return Resources(
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        shared_bytes=usage["SHARED"],
        spill_bytes=_spilled(ptx, arch),
        vector_loads=len(re.findall(r"ld\.global[\w.:]*\.v4\.b32|ld\.global[\w.:]*\.v2\.b64", ptx)),
        ptx=ptx,
    )


def _usage(cubin: bytes) -> dict[str, int]:
    """`REG:48 STACK:0 SHARED:1024 ...` of the one function."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _run("cuobjdump", "-res-usage", file.name)
    found = {name: int(value) for name, value in re.findall(r"([A-Z]+)(?:\[0\])?:(\d+)", text)}
    missing = {"REG", "STACK", "SHARED"} - found.keys()
    assert not missing, f"cuobjdump says nothing of {missing}: {text}"
    return found


def _spilled(ptx: str, arch: int) -> int:
    """Bytes that the assembler stores and loads to spill registers."""
    tool = "ptxas-blackwell" if arch >= 100 else "ptxas"
    suffix = "a" if arch >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        text = _run(tool, "-v", f"-arch=sm_{arch}{suffix}", str(path), "-o", f"{folder}/out")
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    assert spills, f"{tool} says nothing of spills: {text}"
    return sum(map(int, spills))


def _run(tool: str, *arguments: str) -> str:
    import triton.backends.nvidia as nvidia

    path = Path(nvidia.__file__).parent / "bin" / tool
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
