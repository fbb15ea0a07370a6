"""Training C2T's two-layer network (arXiv:2502.13652, section 4.1 and appendix B).

Contiguous slices of tensors that were shuffled once, `Adam(fused=True)`, one thread, no
DataLoader: the network is so small that anything else would cost more than its arithmetic
(notes/dependencies.md, section 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from specctl.errors import UsageError
from specctl.logs.positions import Bools, Singles
from specctl.policy import FfnScorer
from specctl.train.configs import FfnConfig

LAST_LR_FRAC = 0.02
"""Of the learning rate, where its cosine ends: a constant rate leaves the last steps' noise in."""
TUNING_LR_FRAC = 0.1
"""Of the learning rate, where a fitted network is tuned to a few rows more: a whole one, for as
many steps as a fresh network gets, fits these rows and forgets all others (docs/LOG.md)."""


def train_ffn(
    features: Singles,
    accepted: Bools,
    names: tuple[str, ...],
    config: FfnConfig,
    *,
    log_kept: float = 0.0,
    start: FfnScorer | None = None,
    on_epoch: Callable[[int], None] | None = None,
) -> FfnScorer:
    """Fits the network to rows by binary cross-entropy.

    Args:
        features: `[M, F]`, columns as `names`. accepted: `[M]`, both kinds present.
        log_kept: log of the share of negatives among the rows; it becomes part of the bias, so
            that the network speaks of all nodes, not of the sampled ones.
        start: fine-tune this one instead, with its own standardisation and size, for `epochs`
            passes at a tenth of the rate.

    Raises:
        UsageError: training diverged.
    """
    generator = torch.Generator().manual_seed(config.seed)
    mean, scale = _standard(features) if start is None else (start.mean, start.scale)
    with _threads(config.threads):
        order = torch.randperm(len(features), generator=generator)
        rows = torch.from_numpy(features)[order]
        rows = rows.sub_(torch.tensor(mean)).div_(torch.tensor(scale))
        labels = torch.from_numpy(accepted)[order].float()
        weights = _fresh(len(names), config.hidden, generator) if start is None else _of(start)
        weights[-1].data.sub_(0.0 if start is None else log_kept)
        if start is not None:
            config = config.model_copy(update={"lr": TUNING_LR_FRAC * config.lr, "min_steps": 1})
        _descend(weights, rows, labels, config, generator, on_epoch)
    weights[-1].data.add_(log_kept)
    return _record(weights, names, mean, scale)


def _descend(
    weights: list[Tensor],
    rows: Tensor,
    labels: Tensor,
    config: FfnConfig,
    generator: torch.Generator,
    on_epoch: Callable[[int], None] | None,
) -> None:
    starts = torch.arange(0, len(rows), config.batch_size)
    optimizer = torch.optim.Adam(weights, lr=config.lr, fused=True)
    num_epochs = config.num_epochs(len(rows))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: _lr_frac(epoch / num_epochs)
    )
    for _ in range(num_epochs):
        for begin in starts[torch.randperm(len(starts), generator=generator)].tolist():
            part = slice(begin, begin + config.batch_size)
            loss = binary_cross_entropy_with_logits(_logit(weights, rows[part]), labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        if on_epoch is not None:
            on_epoch(1)


def _lr_frac(done: float) -> float:
    return LAST_LR_FRAC + (1 - LAST_LR_FRAC) * (1 + math.cos(math.pi * done)) / 2


def _logit(weights: list[Tensor], rows: Tensor) -> Tensor:
    w1, b1, w2, b2 = weights
    return torch.addmm(b1, rows, w1.T).relu_().mv(w2).add(b2)


def _standard(features: Singles) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and spread of each feature; a constant one keeps its unit."""
    mean = features.mean(0, dtype=np.float64).astype(np.float32)
    spread = features.std(0, dtype=np.float64).astype(np.float32)
    return tuple(mean.tolist()), tuple(np.where(spread > 0, spread, 1.0).tolist())


def _fresh(num_features: int, hidden: int, generator: torch.Generator) -> list[Tensor]:
    """Uniform within 1 / sqrt(fan-in), as torch's linear layers start."""

    def uniform(fan_in: int, *shape: int) -> Tensor:
        values = torch.rand(shape, generator=generator).mul_(2).sub_(1).div_(math.sqrt(fan_in))
        return values.requires_grad_()

    sizes = ((num_features, hidden, num_features), (num_features, hidden), (hidden, hidden))
    return [*(uniform(*size) for size in sizes), uniform(hidden, 1)]


def _of(scorer: FfnScorer) -> list[Tensor]:
    arrays = (scorer.w1, scorer.b1, scorer.w2, scorer.b2)
    return [torch.tensor(array, dtype=torch.float32).requires_grad_() for array in arrays]


def _record(
    weights: list[Tensor], names: tuple[str, ...], mean: tuple[float, ...], scale: tuple[float, ...]
) -> FfnScorer:
    if not all(bool(torch.isfinite(w).all()) for w in weights):
        raise UsageError(
            "training of the network",
            expected="finite weights",
            found="NaN or infinity",
            fix="lower --lr",
        )
    w1, b1, w2, b2 = (weight.detach().tolist() for weight in weights)
    return FfnScorer(
        features=names,
        mean=mean,
        scale=scale,
        w1=tuple(map(tuple, w1)),
        b1=tuple(b1),
        w2=tuple(w2),
        b2=tuple(b2),
    )


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
