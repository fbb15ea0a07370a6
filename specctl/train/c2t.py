"""`fit c2t`: a two-layer network that prunes draft trees (arXiv:2502.13652).

Departures from the paper (docs/c2t.md): prompts are split, negatives are sampled with the bias
corrected, and acceptance given the parent is multiplied along the path. `predicts="joint"` is the
paper's label.

The network is so small that overhead would cost more than its arithmetic. So training (section 4.1
and appendix B) takes contiguous slices of tensors shuffled once, `Adam(fused=True)`, one thread and
no DataLoader.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from specctl.errors import UsageError
from specctl.logs.node_sample import LoggedNodes
from specctl.logs.positions import Bools, Singles
from specctl.policy import FfnScorer
from specctl.train.configs import C2TConfig, FfnConfig
from specctl.train.report import Fit
from specctl.train.scored import ScoredReport, judge, read_sides, scored_figures, scored_fit

LAST_LR_FRAC = 0.02
"""End of the learning rate's cosine; a constant rate would keep the noise of the last steps."""


class C2TReport(ScoredReport):
    """`report.json` of a fit."""

    config: C2TConfig


def fit_c2t(source: LoggedNodes, prompt_ids: Iterable[str], config: C2TConfig) -> Fit[C2TReport]:
    """Fits the network and chooses beta on training prompts; reports on held-out ones.

    Raises:
        UsageError: options contradict each other or the log's support, beta keeps nothing, or no
            beta reaches the recall.
        TraceEmptyError: too few prompts, or labels of one kind.
    """
    sides = read_sides(source, prompt_ids, config)
    rows = sides.train
    names = config.nodes.features
    scorer = train_ffn(rows.features, rows.accepted, names, config.ffn, log_kept=rows.log_kept)
    judged = judge(source, scorer, config, sides.split)
    data = C2TReport(**scored_figures(scorer, sides, judged))
    network = f"A network of {config.ffn.hidden} hidden units (arXiv:2502.13652)"
    return scored_fit(data, scorer, sides, "c2t", "C2T policy", network)


def train_ffn(
    features: Singles,
    accepted: Bools,
    names: tuple[str, ...],
    config: FfnConfig,
    *,
    log_kept: float = 0.0,
) -> FfnScorer:
    """Fits the network to rows by binary cross-entropy.

    Args:
        features: `[M, F]`, columns as `names`.
        accepted: `[M]`, with both values.
        log_kept: log of the share of negatives that were sampled; added to the bias, so that the
            network predicts for all nodes.
    """
    generator = torch.Generator().manual_seed(config.seed)
    mean = features.mean(0, dtype=np.float64).astype(np.float32)
    spread = features.std(0, dtype=np.float64).astype(np.float32)
    scale = np.where(spread > 0, spread, np.float32(1))  # a constant feature keeps its unit
    with _threads(config.threads):
        order = torch.randperm(len(features), generator=generator)
        rows = torch.from_numpy(features)[order]
        rows = rows.sub_(torch.from_numpy(mean)).div_(torch.from_numpy(scale))
        labels = torch.from_numpy(accepted)[order].float()
        weights = _fresh(len(names), config.hidden, generator)
        _descend(weights, rows, labels, config, generator)
    weights[-1].data.add_(log_kept)
    if not all(bool(torch.isfinite(weight).all()) for weight in weights):
        raise UsageError(
            "training diverged: weights of the network are not finite", hint="lower --lr"
        )
    w1, b1, w2, b2 = (weight.detach().tolist() for weight in weights)
    return FfnScorer(
        features=names,
        mean=tuple(mean.tolist()),
        scale=tuple(scale.tolist()),
        w1=tuple(map(tuple, w1)),
        b1=tuple(b1),
        w2=tuple(w2),
        b2=tuple(b2),
    )


def _descend(
    weights: list[Tensor],
    rows: Tensor,
    labels: Tensor,
    config: FfnConfig,
    generator: torch.Generator,
) -> None:
    """Adam over slices of the rows, in a new order every epoch."""
    starts = torch.arange(0, len(rows), config.batch_size)
    optimizer = torch.optim.Adam(weights, lr=config.lr, fused=True)
    num_epochs = config.num_epochs(len(rows))

    def lr_frac(epoch: int) -> float:
        falling = (1 + math.cos(math.pi * (epoch / num_epochs))) / 2
        return LAST_LR_FRAC + (1 - LAST_LR_FRAC) * falling

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_frac)
    w1, b1, w2, b2 = weights
    for _ in range(num_epochs):
        for begin in starts[torch.randperm(len(starts), generator=generator)].tolist():
            part = slice(begin, begin + config.batch_size)
            logit = torch.addmm(b1, rows[part], w1.T).relu_().mv(w2).add(b2)
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(logit, labels[part]).backward()
            optimizer.step()
        schedule.step()


def _fresh(num_features: int, hidden: int, generator: torch.Generator) -> list[Tensor]:
    """Initial weights, uniform within 1 / sqrt(fan-in), as in torch's linear layers."""
    sizes = [((hidden, num_features), num_features), ((hidden,), num_features)]
    return [
        torch.rand(shape, generator=generator)
        .mul_(2)
        .sub_(1)
        .div_(math.sqrt(fan_in))
        .requires_grad_()
        for shape, fan_in in [*sizes, ((hidden,), hidden), ((1,), hidden)]
    ]


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
