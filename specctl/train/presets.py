"""Settings of the papers that need a fit, by name. Settings without a fit are policy words such as
`eagle3-paper` (docs/policies.md).

A preset sets a verb's options to the values that its paper states; other options keep their
defaults. The pages of the systems list the remaining departures, with reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A paper's settings of one fit."""

    verb: str  # of `specctl fit`
    source: str  # paper and section
    options: Mapping[str, Any]  # by parameter of the verb


_ECHO = {"depth": 8, "width": 10, "max_width": 10, "num_tokens": 60, "rerank": True}
PRESETS = {
    "heterospec-paper": Preset(
        "hetero",
        "HeteroSpec, arXiv:2505.13254, sections 4.1 to 4.3, Eq. 2 as printed",
        {
            "base": "eagle2:8x10/60",  # "official" EAGLE-3
            "label": "tcr",
            "filter": "fully_accepted",
            "algorithm": "printed",
            "path": "conditional",
            "max_leaf_depth": 3,
            "gammas": "0.3,0.6,1.0",
        },
    ),
    "c2t-paper": Preset(
        "c2t",
        "C2T, arXiv:2502.13652, sections 4.1 and 4.2, appendices B.1 to B.3 and B.6",
        {
            "predicts": "joint",
            "depth": 11,
            "first_top_k": 15,
            "second_top_k": 15,
            "keep_leaves": False,
            "beta": 0.5,
            "hidden": 48,
            "epochs": 10,
            "min_steps": 1,
            "nodes_per_step": 1024,
            "held_out": 0.05,
        },
    ),
    "echo-paper": Preset("echo", "ECHO, arXiv:2604.09603, section C.4, batch 1", _ECHO),
    "echo-dense": Preset(
        "echo",
        "ECHO, section 5, the ablation with a gate at every level",
        {**_ECHO, "max_gates": 8, "delta": 0.5},
    ),
    "echo-batch-paper": Preset(
        "echo",
        "ECHO, arXiv:2604.09603, section C.4, batches above 1",
        {
            **_ECHO,
            "width": 3,
            "rerank": False,
            "batch_size": 8,  # the least of its figures' 8 to 256
        },
    ),
    "mars-paper": Preset(
        "mars",
        "MARS, arXiv:2601.15498, Algorithm 1, and section 4.1: draft length 7, top 10",
        {
            "mode": "alg1",
            "form": "ratio",
            "thetas": "0.9",
            "shape": "eagle2:7x10/50",  # its scripts' --total-token 50
        },
    ),
}


def names_for(verb: str) -> tuple[str, ...]:
    """Presets of a verb of `specctl fit`."""
    return tuple(name for name, one in PRESETS.items() if one.verb == verb)
