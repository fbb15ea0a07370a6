"""Exports, right and wrong, that tests hold to our records and to the engines' own parsers."""

from __future__ import annotations

from typing import Any

from specctl.engines.engine import EngineDrafter, Export, Serving
from specctl.engines.export import ENGINES
from specctl.policy import Policy
from specctl.runtime.words import resolve_policy

SCHEDULE = "schedule:from_batch=1/5/17:num_draft_tokens=5/2/0"
TAILED = "schedule:from_batch=1/5:num_draft_tokens=5/2"
AS_IT_IS = {
    "vllm": (
        *("ar", "chain", "chain:1", SCHEDULE, TAILED),
        *("chain+ratio", f"{TAILED}+ratio"),
        *("confidence", "svip", "adaedl:threshold=0.3", "adasd_stop:window=6"),
        *("stop:signal=survival:threshold=0.5:window=5", "stop:signal=entropy:threshold=1.5"),
        *("threshold:top_k=1", "opt_tree:top_k=1", "ddd:top_k=1"),
        *("echo:width=1:max_width=1:gate_levels=2/:thresholds=0.5/", "chain+survival:max_tokens=8"),
    ),
    "sglang": ("ar", "chain", "eagle2", "eagle2:3x4/16", SCHEDULE, TAILED),
    "transformers": ("ar", "chain", "confidence", "confidence:threshold=0.7:window=8"),
    "llamacpp": (
        *("ar", "chain", "p_min:threshold=0.5", "p_min:window=5:min_draft_tokens=2"),
        "p_min:threshold=0.7:window=8:min_draft_tokens=2",
    ),
}
"""Policies that each engine runs, in words that are the shortest for them."""
CASES = [(engine, words) for engine, all_words in AS_IT_IS.items() for words in all_words]
HEAD = {"method": "eagle3", "model": "head"}
RANGES = "num_speculative_tokens_per_batch_size"
WRONG_VLLM: dict[str, tuple[dict[str, Any], bool]] = {
    "no draft token": ({"num_speculative_tokens": 0}, True),
    "a negative length": ({"num_speculative_tokens": 3, RANGES: [[1, 4, -1]]}, True),
    "a first batch size of 2": ({"num_speculative_tokens": 3, RANGES: [[2, 4, 3]]}, True),
    "a range that ends before it starts": (
        {"num_speculative_tokens": 3, RANGES: [[1, 4, 3], [9, 5, 1]]},
        True,
    ),
    "ranges that overlap": ({"num_speculative_tokens": 3, RANGES: [[1, 4, 3], [4, 8, 1]]}, True),
    "no range": ({"num_speculative_tokens": 3, RANGES: []}, True),
    "an unknown key": ({"num_speculative_tokens": 3, "tree": "(0,)"}, True),
    "an unknown method": ({"num_speculative_tokens": 3, "method": "eagle9"}, True),
    "made-up rates without their method": (
        {"num_speculative_tokens": 1, "synthetic_acceptance_rates": [0.5]},
        True,
    ),
    "a length above all": ({"num_speculative_tokens": 3, RANGES: [[1, 4, 5]]}, False),
}
"""Settings to add to `HEAD`, and whether vLLM refuses them too, or else changes them silently."""
WRONG_SGLANG: dict[str, tuple[Any, bool]] = {
    "no batch size": ({"candidate_steps": [1, 3]}, True),
    "no candidate": ({"1": {"candidate_steps": []}}, True),
    "a negative candidate": ({"1": {"candidate_steps": [-1, 3]}}, True),
    "no candidates": ({"1": {"ema_alpha": 0.5}}, True),
    "a list": ([], True),
    "true for a number": ({"1": {"candidate_steps": [True]}}, False),
    "a weight of 0": ({"1": {"candidate_steps": [1, 3], "ema_alpha": 0}}, False),
    "an unknown setting": ({"1": {"candidate_steps": [1, 3], "ema_beta": 0.2}}, False),
    "a hundred tokens": ({"1": {"candidate_steps": [100]}}, False),
    "candidates out of order": ({"1": {"candidate_steps": [3, 1]}}, False),
    "batch size 0": ({"0": {"candidate_steps": [3]}, "1": {"candidate_steps": [3]}}, False),
    "a batch size in other digits": ({"²": {"candidate_steps": [3]}}, True),
}
"""Adaptive files, and whether SGLang refuses them too, or else takes them without a word."""
WRONG_LLAMACPP: dict[str, dict[str, Any]] = {
    "a probability above 1": {"spec_draft_p_min": 1.5},
    "a probability below 0": {"spec_draft_p_min": -0.5},
    "a longer least than most": {"spec_draft_n_min": 4},
    "no draft token": {"spec_draft_n_max": 0},
    "true for a number": {"spec_draft_n_max": True},
    "another type": {"spec_type": "eagle3"},
    "drafts without a type": {"spec_type": None},
    "a probability without drafts": {
        **dict.fromkeys(("spec_type", "spec_draft_model", "spec_draft_n_max")),
        "spec_draft_p_min": 0.5,
    },
    "rates of another length": {"spec_synth_rates": [0.5]},
    "rates that rise": {"spec_synth_rates": [0.5, 0.6, 0.1]},
    "rates that are made up": {"spec_synth_rates": [0.5, 0.4, 0.1]},
    "an unknown flag": {"spec_draft_depth": 3},
    "a removed flag": {"draft_max": 3},
    "an empty name of the target": {"model": ""},
}
"""Flags to add to those of a chain of 3, which llama.cpp refuses or takes without a word."""


def exported(engine: str, policy: Policy | str, **settings: Any) -> Export:
    """An export of a policy that the engine runs, for a head named `head`."""
    if isinstance(policy, str):
        policy = resolve_policy(policy).policy
    method = "draft_model" if engine == "transformers" else "eagle3"
    model = "head.gguf" if engine == "llamacpp" else "head"
    drafter = EngineDrafter(model=model, method=method)
    assert ENGINES[engine].losses(policy) == ()
    return ENGINES[engine].write(policy, Serving(drafter=drafter, **settings))
