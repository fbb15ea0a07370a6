"""The command line: one function a verb, no logic. Heavy imports stay inside the verbs."""

from specctl.cli import collecting, fitting, judging, registry, running, showing, traces
from specctl.cli.app import INTERRUPTED, app, fit_app, main

VERBS = (collecting, showing, traces, fitting, judging, running, registry)
"""Modules whose import registers a verb, in the order of the work."""

__all__ = ["INTERRUPTED", "VERBS", "app", "fit_app", "main"]
