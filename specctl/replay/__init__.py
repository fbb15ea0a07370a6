"""Replay: score policies from logs, exactly, without the models."""
