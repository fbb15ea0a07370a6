"""What every tuned kernel must keep to."""

from __future__ import annotations

from specctl.kernels.aot import Case, Resources


def assert_tight(case: Case, found: Resources) -> None:
    """No stack, no spills, registers below the ceiling, wide loads where rows are read."""
    assert found.stack_bytes == 0
    assert found.spill_bytes == 0
    assert found.registers <= case.max_registers
    assert found.vector_loads > 0 or not case.vector_loads
