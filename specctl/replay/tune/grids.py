"""The stated grids: which values of which settings tuning looks at, family by family.

`specctl tune --show-grid` prints them, `--grid field=v1,v2` replaces one, a setting in the name of
a family (`svip:window=8`) fixes it.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("1", "2", "3", "4", "5", "6", "7", "8", "10", "12", "16")
WINDOWS = ("2", "3", "4", "6", "8", "10", "15", "20")
PROBS = ("0.05", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9")
Grid = dict[str, tuple[str, ...]]
"""Values of each setting, as they are written behind the name of a policy."""


@dataclass(frozen=True)
class Scaled:
    """Values that only a load makes absolute.

    Attributes:
        factors: times `unit`. unit: `batch size`, or `best static rate`, its tokens/s over the
            training prompts.
        as_is: values that are not scaled.
    """

    factors: tuple[float, ...]
    unit: str
    as_is: tuple[str, ...] = ()


SHAPES: dict[str, Grid] = {
    "chain": {"num_draft_tokens": LEVELS},
    "eagle2": {
        "depth": LEVELS,
        "top_k": ("2", "4", "8", "10"),
        "num_tokens": ("3", "4", "6", "8", "12", "16", "24", "32", "48", "64"),
    },
    "confidence": {"threshold": PROBS, "window": WINDOWS},
    "svip": {
        "threshold": ("0.3", "0.5", "0.7", "0.9", "1.1", "1.3", "1.6", "2.0"),
        "window": WINDOWS,
    },
    "adaedl": {"threshold": PROBS, "window": WINDOWS},
    "ddd": {
        "depth": ("4", "6", "8", "11"),
        "top_k": ("4", "8", "10"),
        "num_tokens": ("12", "24", "48", "60"),
        "check_levels": ("2/4/6", "3/5/7", "5/7/9"),
        "min_beam_logp": ("-0.1", "-0.3", "-0.7", "-1.2", "-2.0"),
    },
    "opt_tree": {
        "depth": ("4", "6", "8", "10"),
        "top_k": ("4", "8", "10"),
        "num_tokens": ("6", "12", "24", "51"),
        "min_gain": ("0.05", "0.1", "0.2", "0.3", "0.5", "0.8"),
    },
    "threshold": {
        "depth": ("2", "4", "6", "8", "10"),
        "top_k": ("4", "8", "10"),
        "min_prob": ("0.01", "0.02", "0.03", "0.05", "0.08", "0.12", "0.2", "0.3", "0.4", "0.6"),
    },
}
SIGNALS: dict[str, Grid] = {
    "confidence": SHAPES["confidence"],
    "survival": {"threshold": ("0.01", "0.03", *PROBS[:-2]), "window": WINDOWS},
    "entropy": {
        "threshold": ("0.25", "0.5", "1.0", "1.5", "2.0", "2.5", "3.0", "4.0"),
        "window": WINDOWS,
    },
    "sqrt_entropy": SHAPES["svip"],
    "entropy_bound": SHAPES["adaedl"],
}
"""Of `stop`, whose threshold has the unit of its signal."""
SHARED_SHAPES: dict[str, Grid] = {
    "chain": {"num_draft_tokens": ("2", "3", "4", "6", "8", "11")},
    "eagle2": {
        "depth": ("3", "5", "8"),
        "top_k": ("4", "8"),
        "num_tokens": ("8", "16", "32", "64"),
    },
    "threshold": {"depth": ("5", "8"), "top_k": ("4", "8"), "min_prob": ("0.01", "0.05")},
}
"""Coarser, for shapes that a budget trims anyway."""
BUDGETS: dict[str, dict[str, Scaled | tuple[str, ...]]] = {
    "survival": {
        "max_tokens": Scaled((2, 3, 4, 6, 8, 12, 16, 24), "batch size", ("by step costs",))
    },
    "marginal": {
        "tokens_per_s": Scaled((0.5, 0.7, 0.85, 0.95, 1.05, 1.15, 1.3), "best static rate")
    },
    "echo_budget": {
        "max_tokens": Scaled((2, 3, 4, 6, 8, 12, 16, 24), "batch size"),
        "default_width": ("1", "2", "3"),
    },
}
BY_COSTS = "by step costs"
"""Of `max_tokens`: none is given, so the step costs decide alone."""
BETAS = ("0.003", "0.01", "0.02", "0.04", "0.08", "0.15", "0.3", "0.5")
FITTED: dict[str, Grid] = {
    "hetero": {
        "num_tokens": ("12", "16", "24", "32", "48", "64"),
        "alpha": ("0", "1", "2", "3", "4", "6"),
        "gammas": ("0.3/0.6/1.0", "0.5/0.75/1.0", "1.0/1.0/1.0"),
    },
    "c2t": {
        "beta": BETAS,
        "depth": ("4", "8"),
        "num_tokens": ("none", "16"),
    },
    "echo": {
        "depth": ("3", "4", "6", "8"),
        "width": ("1", "2", "3", "4"),
        "num_tokens": ("8", "16", "32", "48"),
    },
    "adasd_stop": {"window": WINDOWS},
}
"""Of fitted artifacts, by shape; what a fit learned stays as fitted."""
SHARED_FITTED: dict[str, Grid] = {
    "hetero": {"num_tokens": ("24", "48")},
    "c2t": {"beta": ("0.01", "0.05", "0.2"), "depth": ("4",)},
    "echo": {"width": ("1", "2", "3"), "depth": ("4",)},
}
"""The same under a budget, which trims nodes but no levels; other settings stay as fitted."""
MAX_SETTINGS = 4096
"""Of one family; more is a slip of the keyboard."""
