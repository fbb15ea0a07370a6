"""The `rounds` table of a trace set as arrays, whole: a thousandth of its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specctl.errors import TraceMismatchError
from specctl.logs.parquet import collected, scan_files
from specctl.logs.positions import Bools, Floats, Ints, coded
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import segment_files

COUNTS = (
    "offered_depth",
    "num_verified",
    "num_drafted",
    "num_accepted",
    "num_emitted",
    "tcr",
    "phi_depth",
)


@dataclass(frozen=True)
class RoundTable:
    """R rounds (in dense traces: positions) of P prompts, in the order of the log's chunks.

    Attributes:
        kind: `dense` or `live`.
        prompt, category: `[R]` int32 codes into `prompt_ids` and `categories`.
        offered_depth, num_verified, num_drafted, num_accepted, num_emitted: `[R]` int32.
        tcr: `[R]` int32 rank, 0 where the trace has none. phi_depth: `[R]` int32, 0 for none.
        phi: `[R]` float64 nats, NaN for none.
    """

    kind: str
    prompt: Ints
    prompt_ids: tuple[str, ...]
    category: Ints
    categories: tuple[str, ...]
    offered_depth: Ints
    num_verified: Ints
    num_drafted: Ints
    num_accepted: Ints
    num_emitted: Ints
    tcr: Ints
    phi_depth: Ints
    phi: Floats

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
    # Null, which no count or rank is, becomes 0; of Φ it becomes NaN.
    counts = pl.col(*COUNTS).cast(pl.Int32).fill_null(0)
    phi = pl.col("phi").cast(pl.Float64).fill_null(float("nan"))
    table = collected(rounds.select(names, counts, phi))
    kinds = table["kind"].unique().to_list()
    if kinds not in (["dense"], ["live"]):
        raise TraceMismatchError(
            "traces",
            expected="all rounds live, or all dense",
            found=" and ".join(map(repr, kinds)),
            fix="report on these folders one at a time",
        )
    prompts, categories = coded(table["prompt_id"]), coded(table["category"])
    values: dict[str, Any] = {name: table[name].to_numpy() for name in (*COUNTS, "phi")}
    return RoundTable(kinds[0], *prompts, *categories, **values)
