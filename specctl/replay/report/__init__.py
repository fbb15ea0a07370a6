"""The report: one self-contained HTML page on a pair, from its traces and results."""

from specctl.replay.report.build import build_page
from specctl.replay.report.evidence import Evidence, gather_evidence, num_passes
from specctl.replay.report.given import Given, LadderResults, ReplayResults, TuneResults, read_given
from specctl.replay.report.page import Page, write_page

__all__ = [
    "Evidence",
    "Given",
    "LadderResults",
    "Page",
    "ReplayResults",
    "TuneResults",
    "build_page",
    "gather_evidence",
    "num_passes",
    "read_given",
    "write_page",
]
