"""The command line: one function a verb, no logic. Heavy imports stay inside the verbs."""

from specctl.cli import (
    collecting,
    composing,
    fitting,
    fitting_auto,
    importing,
    laddering,
    profiling,
    registry,
    replaying,
    reporting,
    running,
    showing,
    traces,
    tuning,
)
from specctl.cli.app import INTERRUPTED, app, fit_app, main

VERBS = (
    collecting,
    importing,
    traces,
    fitting,
    fitting_auto,
    profiling,
    replaying,
    laddering,
    tuning,
    composing,
    reporting,
    running,
    showing,
    registry,
)
"""Modules whose import registers a verb, in the order of the work."""

__all__ = ["INTERRUPTED", "VERBS", "app", "fit_app", "main"]
