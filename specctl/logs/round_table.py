"""The `rounds` table of a trace set as arrays, whole: a thousandth of its nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specctl.errors import TraceMismatchError
from specctl.logs.positions import Bools, Floats, Ints
from specctl.logs.trace_columns import coded, round_columns, segment_files
from specctl.logs.trace_set import TraceSet

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
    import pyarrow as pa
    import pyarrow.compute as pc

    names = ("prompt_id", "category", "kind", "phi", *COUNTS)
    parts = [round_columns(files, names) for files in segment_files(traces)]
    table = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
    kinds = table["kind"].unique().to_pylist()
    if kinds not in (["dense"], ["live"]):
        raise TraceMismatchError(
            "traces",
            expected="all rounds live, or all dense",
            found=" and ".join(map(repr, kinds)),
            fix="report on these folders one at a time",
        )
    prompt, prompt_ids = coded(table["prompt_id"])
    category, categories = coded(table["category"])
    # Null, which no count or rank is, becomes 0.
    counts = {n: np.asarray(pc.fill_null(table[n], 0).to_numpy(), np.int32) for n in COUNTS}
    phi = table["phi"].to_numpy().astype(np.float64)
    return RoundTable(kinds[0], prompt, prompt_ids, category, categories, phi=phi, **counts)
