"""Scores policies from traces."""
