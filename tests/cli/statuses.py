"""What the command line ends with, by kind of error."""

from __future__ import annotations

USAGE, ARTIFACT, INPUT, MODEL, OUTPUT = 2, 3, 4, 5, 6
