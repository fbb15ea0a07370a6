"""The version of specctl; nothing else, so that every room may name it."""

__version__ = "0.1.0"
