"""The command line: one function a verb, no logic. Heavy imports stay inside the verbs."""

from specctl.cli import collecting, fitting, running, showing
from specctl.cli.app import INTERRUPTED, app, fit_app, main

__all__ = [
    "INTERRUPTED",
    "app",
    "collecting",
    "fit_app",
    "fitting",
    "main",
    "running",
    "showing",
]
