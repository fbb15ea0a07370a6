"""Offline calibration and a lean runtime for tree speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specctl.version import __version__

if TYPE_CHECKING:
    from specctl.runtime.api import Decoder

__all__ = ["Decoder", "__version__"]


def __getattr__(name: str) -> Any:
    """Loads `Decoder` on first use: importing specctl alone costs no torch."""
    if name == "Decoder":
        from specctl.runtime.api import Decoder

        return Decoder
    raise AttributeError(f"module 'specctl' has no attribute {name!r}")
