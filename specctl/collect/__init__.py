"""Prompts in, traces out."""
