"""What a machine calls itself."""

from __future__ import annotations

import platform
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch


def current(device: torch.device) -> AbstractContextManager[None]:
    """Makes a CUDA device the current one for a block: kernels are launched on that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def hardware_name(device: torch.device) -> str:
    """The device's own name: the GPU's, or the processor's where Linux tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
