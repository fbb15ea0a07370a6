"""The command line: one function a verb, no logic. Heavy imports stay inside the verbs."""

from specctl.cli import collecting, fitting, replaying, running, showing
from specctl.cli.app import INTERRUPTED, app, fit_app, main

VERBS = (collecting, fitting, replaying, running, showing)
"""Modules whose import registers a verb, in the order of `--help`."""

__all__ = ["INTERRUPTED", "VERBS", "app", "fit_app", "main"]
