"""Small cost models with round numbers, to work by hand, and a tiny pair to measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specctl.artifacts.manifest import PairFingerprint
from specctl.replay.config import ProfileGrid
from specctl.replay.cost.model import DraftGrids, Grid, Machine, TableCost
from specctl.replay.cost.rates import LinearCost
from specctl.replay.metrics import LoadClock
from specctl.runtime.load import Pair, Target
from tests.runtime.toy import toy_pair

SHA = "sha256:" + 64 * "a"
MACHINE = Machine(
    device="Test CPU",
    num_cpus=2,
    num_threads=1,
    dtype="float32",
    torch="2.13.0",
    transformers="5.17.0",
    cuda=None,
    driver=None,
)
FINGERPRINT = PairFingerprint(
    target_digest=SHA, drafter_digest=SHA, tokenizer_digest=SHA, target="toy", drafter="small"
)


def linear_cost(**rates: Any) -> LinearCost:
    """A linear form; rates that are not given are 0."""
    names = ("verify_fixed", "verify_token", "verify_cached_token", "draft_fixed", "draft_token")
    free = {f"{name}_us": 0.0 for name in (*names, "step")}
    return LinearCost(**{"cost_model_version": 1, "source": "by hand", **free, **rates})


def linear_clock(batch_size: int = 1, **rates: float) -> LoadClock:
    """100 us a verification and 10 a token of it; 20 us a draft and 5 a drafted node; 1 a step."""
    usual = {"verify_fixed_us": 100.0, "verify_token_us": 10.0, "step_us": 1.0}
    drafting = {"draft_fixed_us": 20.0, "draft_token_us": 5.0}
    return LoadClock(linear_cost(**{**usual, **drafting, **rates}), batch_size)


LINEAR = linear_cost(
    verify_fixed_us=1000.0,
    verify_token_us=10.0,
    verify_cached_token_us=0.5,
    draft_fixed_us=200.0,
    draft_token_us=5.0,
    draft_cached_token_us=0.25,
    step_us=100.0,
)


SMALL = ProfileGrid(
    batch_sizes=(1, 2),
    context_tokens=(8, 24),
    tokens=(1, 4, 8),
    widths=(1, 3),
    prompt_tokens=(3, 12),
    num_passes=1,
    num_rounds=3,
    loop_tokens=4,
)


def grid(us: Any, batch: Any = (1,), context: Any = (1,), sizes: Any = (1,)) -> Grid:
    """A grid of given times, its spreads zero."""
    values = tuple(tuple(tuple(map(float, row)) for row in plane) for plane in us)
    zeros = tuple(tuple(tuple(0.0 for _ in row) for row in plane) for plane in us)
    return Grid(batch_sizes=batch, context_tokens=context, sizes=sizes, us=values, iqr_us=zeros)


VERIFY = grid(
    [[[10, 20, 30], [12, 24, 40]], [[20, 40, 60], [24, 48, 80]]],
    batch=(1, 3),
    context=(64, 128),
    sizes=(1, 4, 8),
)
DRAFT = DraftGrids(
    root=grid([[[3]], [[5]]], batch=(1, 3)),
    level=grid([[[2, 4]], [[4, 8]]], batch=(1, 3), sizes=(1, 5)),
    select=grid([[[0.5]], [[1.5]]], batch=(1, 3)),
    extend=grid([[[6, 7, 10]], [[8, 9, 12]]], batch=(1, 3), sizes=(1, 2, 5)),
    loop=grid([[[1.5]], [[2.5]]], batch=(1, 3)),
    prefill=grid([[[100, 300]]], sizes=(10, 30)),
)


def table_model(**changes: Any) -> TableCost:
    """A table; `changes` replace fields."""
    fields: dict[str, Any] = {
        "cost_model_version": 1,
        "machine": MACHINE,
        "pair": FINGERPRINT,
        "measured": "2026-11-21T12:00:00Z",
        "expires": "2027-02-19T12:00:00Z",
        "num_samples": 9,
        "capture_limit_tokens": 0,
        "verify": VERIFY,
        "loop": grid([[[1]], [[2]]], batch=(1, 3)),
        "prefill": grid([[[90, 270]]], sizes=(10, 30)),
        "draft": DRAFT,
        "held_out": {},
    }
    return TableCost(**{**fields, **changes})


def toy() -> Pair:
    """A random pair of two layers, loaded from nowhere."""
    model, drafter = toy_pair()
    target = Target("toy", Path(), model, None, (), SHA, SHA)
    return Pair(target, drafter, "small", SHA)
