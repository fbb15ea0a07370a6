"""`specctl profile`: measures a pair on the machine at hand and fits its cost model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

import torch

from specctl.policy import Chain, Policy, RootOnly
from specctl.replay.cost.fit import Samples, fit_grid, held_out_error
from specctl.replay.cost.graphed import GraphProbe
from specctl.replay.cost.loop import graphed_loop_us, loop_us, prefill_us
from specctl.replay.cost.machine import this_machine, validity
from specctl.replay.cost.model import CostModel
from specctl.replay.cost.points import GRAPH_READS, ProfileGrid, check_grid, tree_shapes
from specctl.replay.cost.probe import ONE, PROBE_DEPTH, RoundProbe, RoundSamples
from specctl.replay.cost.records import COST_MODEL_VERSION, DraftGrids, HeldOut, TableCost
from specctl.runtime.graphs import GraphSettings
from specctl.runtime.graphs.settings import TOKEN_STEPS, tiers_up_to
from specctl.runtime.load import Pair

PLAIN = Policy(shape=RootOnly())
DRAFTING = Policy(shape=Chain(num_draft_tokens=PROBE_DEPTH))


@dataclass
class Measured:
    """All samples of a profile; `loop` and `prefill` are a plain decode's."""

    rounds: RoundSamples = field(default_factory=RoundSamples)
    loop: Samples = field(default_factory=Samples)
    prefill: Samples = field(default_factory=Samples)
    draft_loop: Samples = field(default_factory=Samples)
    draft_prefill: Samples = field(default_factory=Samples)


def profile(
    pair: Pair,
    grid: ProfileGrid,
    *,
    graphs: GraphSettings | None = None,
    on_step: Callable[[], object] = lambda: None,
) -> CostModel:
    """Measures and fits; one to two minutes for the embedded pair on one thread.

    A target alone has no trees to verify: it is timed at plain rounds.

    Args:
        graphs: how captured rounds are captured; None times the ordinary loop's. See
            `timed.timed_rounds`.
        on_step: called `grid.num_steps` times.

    Raises:
        UsageError: a grid that this pair has no room for, or rounds that cannot be captured.
    """
    if pair.drafter is None:
        grid = replace(grid, tokens=(1,))
    if graphs is not None:
        grid = grid.for_graphs()
    check_grid(pair, grid)
    measured = Measured()
    with torch.inference_mode():
        for _ in range(grid.num_passes):
            for measure in _measurements(pair, grid, graphs, measured):
                measure()
                on_step()
    return CostModel(fit_table(pair, grid, measured, graphs))


def fit_table(
    pair: Pair, grid: ProfileGrid, measured: Measured, graphs: GraphSettings | None
) -> TableCost:
    """The record of a profile's samples, with the error at what is held out of the fit."""
    rounds, (measured_at, expires) = measured.rounds, validity(datetime.now(UTC))
    table = TableCost(
        cost_model_version=COST_MODEL_VERSION,
        machine=this_machine(pair),
        pair=pair.fingerprint,
        measured=measured_at,
        expires=expires,
        num_samples=min(len(times) for times in rounds.verify.by_point.values()),
        rounds="ordinary" if graphs is None else "graphs",
        capture_limit_tokens=grid.capture_limit_tokens,
        token_tiers=() if graphs is None or grid.capture_limit_tokens else _tiers(graphs),
        verify=fit_grid(rounds.verify.at(grid.tokens)),
        loop=fit_grid(measured.loop),
        prefill=fit_grid(measured.prefill.at(grid.prompt_tokens)),
        draft=_fit_draft(grid, measured) if pair.drafter is not None else None,
        held_out={},
    )
    return table.model_copy(update={"held_out": _errors(table, grid, measured)})


def _tiers(graphs: GraphSettings) -> tuple[int, ...]:
    """Totals that captured rounds are padded to, whatever the policy; its largest is one more."""
    least = graphs.flat_tokens
    return tiers_up_to(max(TOKEN_STEPS[-1], least), least=least)


def _fit_draft(grid: ProfileGrid, measured: Measured) -> DraftGrids:
    rounds = measured.rounds
    return DraftGrids(
        root=fit_grid(rounds.root),
        level=fit_grid(rounds.level.at(grid.widths)),
        select=fit_grid(rounds.select.at(grid.widths)),
        extend=fit_grid(rounds.extend),
        loop=fit_grid(measured.draft_loop),
        prefill=fit_grid(measured.draft_prefill.at(grid.prompt_tokens)),
    )


def _errors(table: TableCost, grid: ProfileGrid, measured: Measured) -> dict[str, HeldOut]:
    """By part, at the points that were held out of its fit."""
    parts = {
        "verify": (table.verify, measured.rounds.verify, grid.held_tokens),
        "prefill": (table.prefill, measured.prefill, grid.held_prompts),
    }
    if table.draft is not None:
        parts |= {
            "draft.level": (table.draft.level, measured.rounds.level, grid.held_widths),
            "draft.prefill": (table.draft.prefill, measured.draft_prefill, grid.held_prompts),
        }
    held = {name: (fitted, s.at(sizes)) for name, (fitted, s, sizes) in parts.items()}
    return {name: held_out_error(fitted, s) for name, (fitted, s) in held.items() if s.by_point}


def _measurements(
    pair: Pair, grid: ProfileGrid, graphs: GraphSettings | None, into: Measured
) -> Iterator[Callable[[], None]]:
    """One pass over the grid, as `grid.num_steps / grid.num_passes` calls."""
    for batch in grid.batch_sizes:
        for context in grid.context_tokens:
            yield partial(_probe, pair, grid, batch, context, graphs, into.rounds)
        yield partial(_time_loop, pair, grid, batch, graphs, into)
    for length in grid.prompt_tokens + grid.held_prompts:
        yield partial(_time_prefill, pair, grid, length, graphs, into)


def _probe(
    pair: Pair,
    grid: ProfileGrid,
    batch: int,
    context: int,
    graphs: GraphSettings | None,
    into: RoundSamples,
) -> None:
    tokens, widths = grid.tokens + grid.held_tokens, grid.widths + grid.held_widths
    trees = tree_shapes(tokens, widths) if pair.drafter else []
    if graphs is None:
        probe = RoundProbe(pair, batch, context, trees, grid.read, grid.num_rounds)
    else:
        trees += GRAPH_READS if pair.drafter else []
        probe = GraphProbe(pair, batch, context, trees, grid.num_rounds, graphs)
    for tree in [None, *trees]:
        probe.run(tree, into)


def _time_loop(
    pair: Pair, grid: ProfileGrid, batch: int, graphs: GraphSettings | None, into: Measured
) -> None:
    time_steps = loop_us if graphs is None else partial(graphed_loop_us, graphs=graphs)
    context, at = grid.context_tokens[0], (batch, ONE, ONE)
    into.loop.add(at, time_steps(pair, PLAIN, batch, context, grid.loop_tokens))
    if pair.drafter is not None:
        into.draft_loop.add(at, time_steps(pair, DRAFTING, batch, context, grid.loop_tokens))


def _time_prefill(
    pair: Pair, grid: ProfileGrid, length: int, graphs: GraphSettings | None, into: Measured
) -> None:
    for us in prefill_us(pair, PLAIN, length, grid.num_rounds, graphs):
        into.prefill.add((ONE, ONE, length), us)
    if pair.drafter is not None:
        for us in prefill_us(pair, DRAFTING, length, grid.num_rounds, graphs):
            into.draft_prefill.add((ONE, ONE, length), us)
