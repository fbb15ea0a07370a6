"""The fastest chain by load and context: chosen on training prompts, judged on held-out ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from specctl.formatting import NOTHING, Table
from specctl.logs.advice import NOT_BY_CONTEXT
from specctl.logs.positions import Floats, context_parts
from specctl.logs.tree_log import DenseLog
from specctl.policy import Chain, Policy, RootOnly
from specctl.replay.cost.model import CostModel
from specctl.replay.facts import ResultRecord
from specctl.replay.metrics import LoadClock, by_prompt, request_sums
from specctl.replay.rounds import replay
from specctl.stats import (
    Interval,
    Resamples,
    Split,
    first_over_second,
    sums_by,
    with_time_error,
)

LOADS = (1, 8, 32, 64)


class ContextLength(ResultRecord):
    """The fastest chain at a load, in rounds whose text has these tokens."""

    batch_size: int
    context_tokens: tuple[int, int]  # least and most, root included
    num_draft_tokens: int  # 0 is plain decoding
    against_plain: Interval  # on held-out prompts, paired


def lengths_by_context(
    log: DenseLog, model: CostModel, split: Split, seed: int
) -> tuple[ContextLength, ...]:
    """The fastest chains at every load that the clock knows, in up to four parts by context; none
    where all texts are alike.

    A batch is of equal rounds, see `LoadClock`.
    """
    shapes = [RootOnly(), *(Chain(num_draft_tokens=k + 1) for k in range(log.support.depth))]
    runs = replay(log, [Policy(shape=shape) for shape in shapes], with_bounds=False)
    positions, loads = runs[0].positions, LoadClock.known(model, LOADS)
    part = context_parts(positions.context_tokens)
    if part is None:
        return ()
    num_prompts, num_parts = len(positions.prompt_ids), int(part.max()) + 1
    tables: dict[int, Floats] = {}  # by length, `[P, parts, 1 + loads]`: tokens, us at each load
    for length, run in enumerate(runs):
        if not by_prompt(positions, request_sums(run)).is_supported:
            continue
        place = positions.prompt[run.request] * num_parts + part[run.visited]
        columns: list[Any] = [run.emitted, *(LoadClock(model, load)(run) for load in loads)]
        totals = sums_by(place, num_prompts * num_parts, columns)
        tables[length] = totals.reshape(num_prompts, num_parts, -1)
    code = {name: place for place, name in enumerate(positions.prompt_ids)}
    train, held = (
        [code[name] for name in names if name in code] for names in (split.train, split.held_out)
    )
    resamples = Resamples.draw(len(held), seed=seed)

    def held_out_rate(length: int, sums: Floats) -> Floats:
        drawn = resamples.drawn(sums[held])
        return first_over_second(with_time_error(drawn, [1], model.time_error, str(length), seed))

    found = []
    for of in range(num_parts):
        inside = positions.context_tokens[part == of]
        for column, load in enumerate(loads, start=1):
            sums = {length: table[:, of, [0, column]] for length, table in tables.items()}
            on_train = {k: float(first_over_second(one[train].sum(0))) for k, one in sums.items()}
            best = max(on_train, key=on_train.__getitem__)  # the shortest of equals
            gain = held_out_rate(best, sums[best]) / held_out_rate(0, sums[0])
            found.append(
                ContextLength(
                    batch_size=load,
                    context_tokens=(int(inside.min()), int(inside.max())),
                    num_draft_tokens=best,
                    against_plain=resamples.read(gain),
                )
            )
    return tuple(found)


def context_table(found: Sequence[ContextLength]) -> Table:
    """Contexts by loads: the fastest chain, and its speed over plain decoding."""
    loads = sorted({one.batch_size for one in found})
    by_load = {one.batch_size: one.num_draft_tokens for one in found}
    rows: dict[tuple[int, int], list[str]] = {}
    for one in found:
        low, high = one.context_tokens
        cells = rows.setdefault(one.context_tokens, [f"{low:,} to {high:,}"])
        gain = one.against_plain
        best = (f"{one.num_draft_tokens}: × {gain.value:.2f}", gain.text(".2f"))
        cells += best if one.num_draft_tokens else ("off", NOTHING)
    differ = any(one.num_draft_tokens != by_load[one.batch_size] for one in found)
    heads = [(f"{load} together", f"95% at {load}") for load in loads]
    return Table(
        "Fastest chain by context",
        ("tokens of text", *chain.from_iterable(heads)),
        [*rows.values()],
        "Chosen on training prompts; × is over plain decoding, held out. "
        + NOT_BY_CONTEXT * differ,
        wide=[spread for _, spread in heads],
    )
