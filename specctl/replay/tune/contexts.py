"""The fastest chain by load and context: chosen on training prompts, judged on held-out ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specctl.formatting import NOTHING, Table, listed
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
    """The fastest chain in rounds whose text has these tokens."""

    context_tokens: tuple[int, int]  # least and most, root included
    num_draft_tokens: int  # 0 is plain decoding
    against_plain: Interval  # on held-out prompts, paired


class LoadLengths(ResultRecord):
    """The fastest chains at a load: one for all contexts, and one for each part by context."""

    batch_size: int
    num_draft_tokens: int  # of the one for all
    against_plain: Interval  # its speed over plain decoding, on held-out prompts, paired
    parts: tuple[ContextLength, ...]
    against_one: Interval  # of the lengths by context together, over the one for all, likewise


def lengths_by_context(
    log: DenseLog, model: CostModel, split: Split, seed: int
) -> tuple[LoadLengths, ...]:
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

    def drawn(length: int, sums: Floats) -> Floats:
        totals = resamples.drawn(sums[held])
        return with_time_error(totals, [1], model.time_error, str(length), seed)

    found, places = [], range(num_parts)
    for column, load in enumerate(loads, start=1):
        sums = {length: table[:, :, [0, column]] for length, table in tables.items()}

        def fastest(of: slice, sums: dict[int, Floats] = sums) -> int:
            rates = {k: first_over_second(one[train, of].sum((0, 1))) for k, one in sums.items()}
            return max(rates, key=rates.__getitem__)  # the shortest of equals

        def gain(ours: Sequence[int], theirs: int, of: slice, sums: Any = sums) -> Interval:
            """Speed of a length for each part over one for all of them."""
            own, other = (
                np.sum(
                    [drawn(k, sums[k][:, at]) for k, at in zip(each, places[of], strict=True)], 0
                )
                for each in (ours, [theirs] * len(ours))
            )
            return resamples.read(first_over_second(own) / first_over_second(other))

        whole, parts = slice(None), [slice(at, at + 1) for at in places]
        one, best = fastest(whole), [fastest(of) for of in parts]
        inside = [positions.context_tokens[part == at] for at in places]
        found.append(
            LoadLengths(
                batch_size=load,
                num_draft_tokens=one,
                against_plain=gain([one] * num_parts, 0, whole),
                parts=tuple(
                    ContextLength(
                        context_tokens=(int(texts.min()), int(texts.max())),
                        num_draft_tokens=length,
                        against_plain=gain([length], 0, of),
                    )
                    for texts, length, of in zip(inside, best, parts, strict=True)
                ),
                against_one=gain(best, one, whole),
            )
        )
    return tuple(found)


def context_table(found: Sequence[LoadLengths]) -> Table:
    """By load the fastest chain for all contexts, those by context, and what these gain."""
    rows = []
    for one in found:
        lengths = [part.num_draft_tokens for part in one.parts]
        best, plain, gain = one.num_draft_tokens, NOTHING, NOTHING
        if best:
            plain = f"× {one.against_plain.text('.2f')}"
        if {*lengths} != {best}:
            gain = f"× {one.against_one.text('.2f')}"
        by_context = ", ".join(str(k or "off") for k in lengths)
        rows.append([str(one.batch_size), str(best or "off"), plain, by_context, gain])
    texts = listed("{:,} to {:,}".format(*part.context_tokens) for part in found[0].parts)
    loads = [str(one.batch_size) for one in found if one.against_one.low > 1]
    pays = "No gain of lengths by context is shown."
    if loads:
        pays = f"At {listed(loads)} together lengths by context pay. {NOT_BY_CONTEXT}"
    return Table(
        "Fastest chain, one for all contexts and by context",
        ("together", "one", "over plain", "by context", "over the one"),
        rows,
        f"By context: texts of {texts} tokens. Chosen on training prompts; × is held out, paired, "
        f"with 95% intervals. {pays}",
    )
