"""The command line: one function a verb, no logic. Heavy imports stay inside the verbs."""

from specctl.cli.app import load_all_verbs, main

__all__ = ["load_all_verbs", "main"]
