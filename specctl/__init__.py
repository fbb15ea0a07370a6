"""Offline calibration, exact replay and a lean runtime for tree speculative decoding."""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("specctl")
