"""A cost model as a file has it."""

from __future__ import annotations

COST = {
    "kind": "linear",
    "cost_model_version": 1,
    "source": "made up",
    "verify_fixed_us": 1000.0,
    "verify_token_us": 10.0,
    "verify_cached_token_us": 0.0,
    "draft_fixed_us": 100.0,
    "draft_token_us": 1.0,
    "step_us": 50.0,
}
