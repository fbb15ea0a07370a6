"""Torch reference of `js_distance`: that of the floor, where a policy decides by it."""

from specctl.divergence import js_distance

__all__ = ["js_distance"]
