"""Tests of the repository's scripts."""
