"""The `rounds` table of a trace set as arrays, whole: a thousandth of its nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specctl.errors import TraceMismatchError
from specctl.logs.parquet import collected, scan_files
from specctl.logs.positions import Bools, Ints, coded
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import segment_files

COUNTS = ("offered_depth", "num_drafted", "num_accepted", "num_emitted")


@dataclass(frozen=True)
class RoundTable:
    """R rounds (in dense traces: positions) of P prompts, in the order of the log's chunks."""

    is_dense: bool  # they are positions; else live rounds
    # prompt, category: `[R]` int32 codes into `prompt_ids` and `categories`
    prompt: Ints
    prompt_ids: tuple[str, ...]
    category: Ints
    categories: tuple[str, ...]
    # offered_depth, num_drafted, num_accepted, num_emitted: `[R]` int32
    offered_depth: Ints
    num_drafted: Ints
    num_accepted: Ints
    num_emitted: Ints

    @property
    def num_prompts(self) -> int:
        """P."""
        return len(self.prompt_ids)

    @property
    def is_cut(self) -> Bools:
        """`[R]`: the text ended on the accepted path, so nothing is known of the next depth."""
        return np.equal(self.num_emitted, self.num_accepted)


def read_round_table(traces: TraceSet) -> RoundTable:
    """The `rounds` rows of every file.

    Raises:
        TraceEmptyError: no rounds. TraceMismatchError: live and dense rounds together.
    """
    import polars as pl

    rounds = scan_files("rounds", [files["rounds"] for files in segment_files(traces)])
    names = pl.col("prompt_id", "category", "kind").cast(pl.String)
    table = collected(rounds.select(names, pl.col(*COUNTS).cast(pl.Int32)))
    kinds = table["kind"].unique().to_list()
    if kinds not in (["dense"], ["live"]):
        raise TraceMismatchError(
            "traces: expected all rounds live, or all dense, found "
            f"{' and '.join(map(repr, kinds))}",
            hint="report on these folders one at a time",
        )
    prompts, categories = coded(table["prompt_id"]), coded(table["category"])
    counts = (table[name].to_numpy() for name in COUNTS)
    return RoundTable(kinds == ["dense"], *prompts, *categories, *counts)
