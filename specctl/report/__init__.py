"""The report: one self-contained HTML page on a pair, from its traces and results."""

from specctl.report.build import build_page
from specctl.report.given import Given, read_given, settings_for
from specctl.report.page import Page

__all__ = ["Given", "Page", "build_page", "read_given", "settings_for"]
