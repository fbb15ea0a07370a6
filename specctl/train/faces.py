"""The faces of `certify`: the thresholds of MARS, `fit mars`, and the clip of AdaSD, `fit adasd`.

A run of MARS records the largest opening of each text (`Answer.opening`). Under a laxer theta whose
bound is at or above it the text is the same, so the answer is copied instead of decoded.

AdaSD's acceptance follows the request and does not judge the tokens that it admits; the clip bounds
its threshold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.policy.mars import bound, mars_acceptance
from specctl.policy.verification import Verification
from specctl.runtime.load import Pair
from specctl.runtime.requests import RoundRecord
from specctl.train.certify import Face
from specctl.train.configs import MarsConfig
from specctl.train.paired import Opening


def check_mode(mode: str, *, greedy: bool) -> None:
    """Refuses a mode that does not fit the sampling."""
    if mode == "alg1" and not greedy:
        raise UsageError(
            "--mode alg1, the paper's Algorithm 1, is for greedy decoding",
            hint="use --mode sound, or leave --temperature out",
        )


def opening_of(config: MarsConfig, pair: Pair) -> Opening:
    """Closeness to relaxation, in the configuration's form, at the end of each path."""
    eos_ids, device = pair.target.eos_ids, pair.target.model.device
    rule = mars_acceptance(config.acceptance(config.thetas[0]), device, eos_ids)

    def of_round(record: RoundRecord) -> Tensor:
        last = (record.path >= 0).sum(1, keepdim=True) - 1
        none = torch.zeros_like(record.position)
        greedy = [request.sampling.greedy for request in record.requests]
        given = Verification(  # nothing is drawn, so seeds are 0
            tree=record.tree,
            target_ids=record.target_ids,
            logits=record.target_logits,
            processed=record.processed,
            greedy=torch.tensor(greedy, device=none.device),
            seeds=none,
            positions=record.tree.depth,
            memory=none[:, None].double(),
        )
        return rule.openings(given).gather(1, record.path.gather(1, last))[:, 0]

    denied = ",".join(map(str, sorted({*config.deny_token_ids, *eos_ids})))
    return Opening(f"{config.form}, denied {denied}", of_round, bound)


MARS = Face(
    kind="mars",
    title="Relaxed acceptance",
    what="Accepts the target's second choice where the target is nearly indifferent "
    "(MARS, arXiv:2601.15498).",
    setting="theta",
    limits=(
        "The promise is about checkable answers to such prompts, under this shape and this "
        "decoding. The draft decides what can be relaxed: fit again for another shape, pair or "
        "load.",
        "Thresholds on logits do not carry over between models: z2 / z1 moves with the "
        "logits' origin.",
        "Answers that change without an answer key, such as prose, are not judged.",
    ),
    opening=opening_of,
)

ADASD = Face(
    kind="adasd",
    title="AdaSD",
    what="Accepts a token where drafter and target are closer than a threshold that each request "
    "learns from the tokens that were accepted and rejected in its earlier rounds "
    "(arXiv:2512.11280).",
    setting="clip",
    limits=(
        "The acceptance looks at distributions, never at right or wrong; only the clip is "
        "certified, for checkable answers to such prompts, under this shape and this decoding. "
        "Fit again for another shape, pair or load.",
        "Answers that change without an answer key, such as prose, are not judged.",
    ),
)
