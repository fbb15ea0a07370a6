"""Adapters, the round and the decode loop: what a serving box imports."""
