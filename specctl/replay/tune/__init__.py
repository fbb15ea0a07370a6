"""Tuning: search the settings of policy families by replay, choose, report on other prompts."""
