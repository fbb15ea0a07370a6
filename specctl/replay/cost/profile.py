"""`specctl profile`: a pair measured on the machine at hand, and its cost model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specctl.errors import InvariantError, UsageError
from specctl.formatting import Detail, Table, count, pair_title, rounded
from specctl.policy import Chain, Policy, RootOnly, StaticTree
from specctl.policy.family import MAX_TOKENS, MAX_TOP_K
from specctl.progress import advance, progress
from specctl.replay.config import ProfileGrid
from specctl.replay.cost.files import validity
from specctl.replay.cost.live import check_live, checked_policies, time_decider
from specctl.replay.cost.model import (
    LARGEST_ERROR,
    WAITING,
    DraftGrids,
    Grid,
    HeldOut,
    Machine,
    TableCost,
    decider_of,
    decider_text,
)
from specctl.replay.cost.probe import (
    MEASUREMENTS,
    ONE,
    PROBE_DEPTH,
    WARM_UPS,
    Bench,
    RoundProbe,
    Samples,
    Times,
    loop_us,
    prefill_us,
    probed_tree,
    tree_capacity,
)
from specctl.runtime.capture import token_tiers
from specctl.runtime.identity import hardware_name
from specctl.runtime.load import Pair
from specctl.runtime.requests import Request
from specctl.runtime.words import NamedPolicy

Floats = NDArray[np.float64]
PLAIN = Policy(shape=RootOnly())
DRAFTING = Policy(shape=Chain(num_draft_tokens=PROBE_DEPTH))
MOST_TOKENS = 2048
"""Largest tier of captured rounds in a table."""
GRAPH_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Tokens per request whose batch totals are tiers of captured rounds, for batches of 1, 2, 4 ..."""
GRAPH_READS = tuple(StaticTree(depth=d, top_k=1, num_tokens=d + 1) for d in (1, 8))
"""Trees that give two points of reading: a captured round reads one token more than its depth."""
QUICK_BATCHES = (1, 4)
"""Default batch sizes of a quick profile."""
NUM_LOOP_STEPS = 4
"""Fewest rounds over which the loop of captured rounds is timed in one pass."""
NUM_TIMED, NUM_TIMED_QUICK = 3, 2
"""Timed runs of each policy that is checked; the median counts."""
DRIVER = Path("/proc/driver/nvidia/version")


# ---------------------------------------------------------------------------------- the points


def settled(grid: ProfileGrid, bench: Bench) -> ProfileGrid:
    """The grid for this pair: plain rounds alone for a target without a drafter, fewer passes and
    batch sizes for a quick profile, and with graphs texts that are long enough to warm up, capture
    and time the loop's rounds.

    Raises:
        UsageError: a grid beyond the model's context, or trees larger than a probe can grow.
    """
    changes: dict[str, Any] = {}
    if bench.graphs is not None:
        if "tokens" not in grid.model_fields_set:
            changes["tokens"] = GRAPH_TOKENS
        least = (WARM_UPS + NUM_LOOP_STEPS) * (PROBE_DEPTH + 1) + 1
        changes["loop_tokens"] = max(grid.loop_tokens, least)
    if bench.pair.drafter is None:
        changes["tokens"] = (1,)
    if grid.quick:
        changes |= {"num_passes": 1, "num_rounds": 3}
        if "batch_sizes" not in grid.model_fields_set:
            changes["batch_sizes"] = QUICK_BATCHES
    grid = grid.model_copy(update=changes)
    largest, widest = grid.tokens[-1], grid.widths[-1]
    room = bench.pair.target.model.context_tokens - largest
    most = min(tree_capacity(min(widest, MAX_TOP_K)), MAX_TOKENS)
    longest = max(grid.context_tokens[-1], grid.prompt_tokens[-1] + grid.loop_tokens)
    for holds, broken in (
        (grid.batch_sizes[0] == 1, "--batch-sizes must begin with 1"),
        (grid.tokens[0] == 1, "--verified-tokens must begin with 1, a plain round"),
        (grid.widths[0] == 1, "--widths must begin with 1, a chain"),
        (widest <= MAX_TOP_K, f"--widths may be at most {MAX_TOP_K}"),
        (largest <= most, f"--verified-tokens may be at most {most} at these widths"),
        (longest <= room, f"--contexts may be at most {room}, the model's room"),
    ):
        if not holds:
            raise UsageError(broken)
    return grid


def tree_shapes(tokens: Sequence[int], widths: Sequence[int]) -> list[StaticTree]:
    """Trees of every size and of every width; sizes are dealt to the widths in turn."""
    turn = cycle(sorted(widths))
    shapes = [
        probed_tree(next(width for width in turn if tree_capacity(width) >= size), size)
        for size in sorted(tokens)
        if size > 1
    ]
    return shapes + [probed_tree(width, PROBE_DEPTH + 1) for width in sorted(widths)]


# --------------------------------------------------------------------------------- measurement


def profile(
    bench: Bench,
    grid: ProfileGrid,
    *,
    requests: Sequence[Request] = (),
    policies: Sequence[NamedPolicy] = (),
) -> TableCost:
    """Measures and fits; one to two minutes for the embedded pair on one thread.

    Args:
        requests: decoded at the end as a check of the model; empty for no check.
        policies: their own decisions are timed too, on these requests.

    Raises:
        UsageError: a grid that this pair has no room for, or rounds that cannot be captured.
    """
    grid, samples = settled(grid, bench), Samples()
    batches, num_timed = grid.batch_sizes, NUM_TIMED_QUICK if grid.quick else NUM_TIMED
    num_steps, checked = grid.num_steps, list[Policy]()
    if requests:
        checked = [*checked_policies(bench.pair, grid), *(one.policy for one in policies)]
        num_steps += len(policies) * len(batches) + (1 + num_timed) * len(checked)
    with torch.inference_mode(), progress(MEASUREMENTS, num_steps):
        for _ in range(grid.num_passes):
            _measure(bench, grid, samples)
        model = fit_table(bench, grid, samples)
        if requests:
            deciders = {
                decider_of(one.policy): time_decider(bench, one, batches, requests)
                for one in policies
            }
            model = model.model_copy(update={"deciders": deciders})
            checks = check_live(bench, model, requests, checked, num_timed)
            model = model.model_copy(update={"checks": checks})
    return model


def _measure(bench: Bench, grid: ProfileGrid, into: Samples) -> None:
    """One pass over the grid."""
    modes, trees, read = {"": PLAIN}, list[StaticTree](), grid.read
    if bench.pair.drafter is not None:
        modes["draft."] = DRAFTING
        trees = tree_shapes(grid.tokens + grid.held("tokens"), grid.widths + grid.held("widths"))
    if bench.graphs is not None:
        trees += GRAPH_READS if trees else ()
        read = (ONE,)
    for batch in grid.batch_sizes:
        for context in grid.context_tokens:
            probe = RoundProbe(bench, batch, context, trees, read)
            for tree in (None, *trees):
                probe.run(tree, grid.num_rounds, into)
            advance(MEASUREMENTS)
        requests = bench.random_requests(batch, grid.context_tokens[0], grid.loop_tokens)
        for mode, policy in modes.items():
            into.add(f"{mode}loop", (batch, ONE, ONE), loop_us(bench, policy, requests))
        advance(MEASUREMENTS)
    for length in grid.prompt_tokens + grid.held("prompt_tokens"):
        requests = bench.random_requests(grid.num_rounds + 1, length, 1)
        for mode, policy in modes.items():
            for us in prefill_us(bench, policy, requests):
                into.add(f"{mode}prefill", (ONE, ONE, length), us)
        advance(MEASUREMENTS)


# ----------------------------------------------------------------------------------------- fit

AXES = {
    "verify": "tokens",
    "prefill": "prompt_tokens",
    "draft.level": "widths",
    "draft.prefill": "prompt_tokens",
    "draft.select": "widths",
}
"""Parts with held-out points, and the axis of `ProfileGrid` that their sizes are on."""


def fit_table(bench: Bench, grid: ProfileGrid, samples: Samples) -> TableCost:
    """The record of a profile's samples, with the error at the points held out of the fit."""
    measured_at, expires = validity(datetime.now(UTC))
    tiers: tuple[int, ...] = ()  # the policy's largest tree is one more
    if bench.graphs is not None and not grid.capture_limit_tokens:
        least = bench.graphs.flat_tokens
        tiers = token_tiers(max(MOST_TOKENS, least), least)
    fitted, held_out = dict[str, Grid](), dict[str, HeldOut]()
    for part, times in samples.by_part.items():
        axis = AXES.get(part)
        fitted[part] = fit_grid(times if axis is None else samples.at(part, getattr(grid, axis)))
        held = {} if axis is None else samples.at(part, grid.held(axis))
        if held and part != "draft.select":
            held_out[part] = held_out_error(fitted[part], held)
    draft = {p.removeprefix("draft."): of for p, of in fitted.items() if p.startswith("draft.")}
    return TableCost(
        cost_model_version=1,
        machine=this_machine(bench.pair),
        pair=bench.pair.fingerprint,
        measured=measured_at,
        expires=expires,
        num_samples=min(len(times) for times in samples.by_part["verify"].values()),
        rounds="ordinary" if bench.graphs is None else "graphs",
        capture_limit_tokens=grid.capture_limit_tokens,
        token_tiers=tiers,
        verify=fitted["verify"],
        loop=fitted["loop"],
        prefill=fitted["prefill"],
        draft=DraftGrids(**draft) if draft else None,
        held_out=held_out,
    )


def this_machine(pair: Pair) -> Machine:
    """The machine at hand, as the pair is loaded on it."""
    devices = pair.target.model.devices
    on_gpu = devices[0].type == "cuda"
    driver = DRIVER.read_text().splitlines()[0].strip() if DRIVER.exists() else None
    return Machine(
        device=hardware_name(*devices),
        num_cpus=os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        dtype=str(pair.target.model.dtype).removeprefix("torch."),
        torch=torch.__version__,
        transformers=version("transformers"),
        cuda=torch.version.cuda if on_gpu else None,
        driver=driver if on_gpu else None,
    )


def fit_grid(times: Times) -> Grid:
    """A grid over the points of samples, which must be a full grid.

    Medians are made monotone by isotonic regression along sizes: at the first context, then for the
    non-negative increment of each further context. So times rise with tokens and with context, and
    a cached token costs more the more tokens attend to it; extrapolations stay sorted too.
    """
    axes = [sorted(set(axis)) for axis in zip(*times, strict=True)]
    medians, spreads = np.empty((2, *(len(axis) for axis in axes)))
    if len(times) != medians.size:
        raise InvariantError(
            f"a grid of {medians.size} points has timings at {len(times)}",
            hint="report this grid",
        )
    for point, us in times.items():
        place = tuple(axis.index(value) for axis, value in zip(axes, point, strict=True))
        low, high = np.percentile(us, (25, 75))
        medians[place], spreads[place] = np.median(us), high - low

    def tuples(cube: Floats) -> Any:
        """Nested tuples of plain floats, to a tenth of a nanosecond."""
        return tuple(
            tuple(tuple(round(float(value), 4) for value in row) for row in plane) for plane in cube
        )

    return Grid(
        batch_sizes=tuple(axes[0]),
        context_tokens=tuple(axes[1]),
        sizes=tuple(axes[2]),
        us=tuples(np.stack([monotone(plane) for plane in medians])),
        iqr_us=tuples(spreads),
    )


def monotone(plane: Floats) -> Floats:
    """`[C, S]` made non-decreasing along both axes; increments along C rise along S too."""
    rows = [isotonic(plane[0])]
    for before, after in pairwise(plane):
        rows.append(rows[-1] + np.maximum(isotonic(after - before), 0.0))
    return np.maximum.accumulate(np.stack(rows), 1)  # sums may fall by a last digit


def isotonic(values: Floats) -> Floats:
    """The non-decreasing sequence nearest in squares.

    By the max-min formula (Robertson, Wright and Dykstra, 1988): value i is the maximum over starts
    s <= i of the minimum over ends e >= i of the mean of s .. e. There are a dozen values at most,
    and scikit-learn is absent where serving is timed.
    """
    size = len(values)
    means = np.full((size, size), np.inf)
    for start in range(size):
        for end in range(start, size):
            means[start, end] = values[start : end + 1].mean()
    return np.array([means[: i + 1, i:].min(1).max() for i in range(size)])


def held_out_error(grid: Grid, times: Times) -> HeldOut:
    """Relative error of a grid at points outside its fit."""
    batch, context, sizes = (np.array(axis) for axis in zip(*times, strict=True))
    measured = np.array([np.median(us) for us in times.values()])
    error = np.abs(grid.read(sizes, batch, context) - measured) / measured
    return HeldOut(num_points=len(error), mape=float(error.mean()), worst=float(error.max()))


# ------------------------------------------------------------------------------------- summary


def spread(grid: Grid) -> float:
    """Interquartile range over time, median of a grid's points."""
    return float(np.median(np.array(grid.iqr_us) / np.array(grid.us)))


def summary_json(model: TableCost) -> dict[str, Any]:
    """The model without its grids, and the spread of verification."""
    grids = {"verify", "loop", "prefill", "draft"}
    return model.model_dump(mode="json", exclude=grids) | {"spread": spread(model.verify)}


def check_lines(model: TableCost) -> Iterator[str]:
    """Predicted and measured speed of the checked policies."""
    for check in model.checks:
        predicted, measured = (
            1e6 * check.num_tokens / us for us in (check.predicted_us, check.measured_us)
        )
        waiting = f", {check.waited:.0%} of the time waiting" if check.waited > WAITING else ""
        yield (
            f"check: {rounded(check.policy)}: {predicted:.0f} tokens/s predicted, "
            f"{measured:.0f} measured ({check.error:+.0%}{waiting})"
        )


def check_verdict(model: TableCost) -> str:
    """Whether speeds by the model can be trusted, in one line."""
    worst = max(model.checks, key=lambda check: abs(check.error), default=None)
    if worst is None:
        return "The clock was not checked by decoding."
    if abs(worst.error) <= LARGEST_ERROR:
        return f"The clock holds: off by at most {abs(worst.error):.0%} in its own check."
    if model.disturbed_check is not None:
        undisturbed = max(abs(check.undisturbed_error) for check in model.checks)
        return (
            f"The clock's check was disturbed, {worst.waited:.0%} of its time waiting: off by "
            f"{undisturbed:.0%} on this thread's own time, not confirmed in wall time. Measure "
            "again on a quiet machine."
        )
    off = f"off by {worst.error:+.0%} in its own check ({rounded(worst.policy)})"
    return f"The clock is {off}: measure again on a quiet machine."


def render(model: TableCost) -> list[Any]:
    """Verification by size and batch, held-out error and checks."""
    machine, grid = model.machine, model.verify
    table: Any = Table(
        f"{pair_title(model.pair.target, model.pair.drafter)}\n"
        f"ms to verify, by tokens per request, at {grid.context_tokens[0]} tokens of context; "
        f"{machine.dtype}, {machine.device}, {count(machine.num_threads, 'thread')}",
        ("batch", *map(str, grid.sizes)),
        [
            (str(batch), *(f"{us / 1e3:.2f}" for us in plane[0]))
            for batch, plane in zip(grid.batch_sizes, grid.us, strict=True)
        ],
        left=0,
    )
    return [
        check_verdict(model),
        table,
        f"mean error at held-out points: {model.held_out_text or 'nothing held out'}",
        Detail(f"spread of verification (IQR over median): {spread(model.verify):.1%}"),
        Detail(f"{model.num_samples} {model.rounds} rounds a point"),
        *(
            f"decisions of {rounded(decider_text(name))}: "
            f"{', '.join(f'{us:.0f}' for us in cost.level_us)} us a level at batches of "
            f"{', '.join(map(str, cost.batch_sizes))}"
            for name, cost in model.deciders.items()
        ),
        *check_lines(model),
        *(["No verdict rests on it without --force."] if model.failed_check else []),
    ]
