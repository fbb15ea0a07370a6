"""The figures of a deployed policy that an alarm watches, prompt by prompt.

Live rows hold them as served. On dense traces the policy is replayed, so the traces of a fit are a
reference for served traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specctl.errors import TraceEmptyError
from specctl.lazy import torch
from specctl.logs.node_sample import LoggedNodes
from specctl.logs.parquet import collected, scan_files
from specctl.logs.positions import Floats, Longs
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, LiveLog, open_log, segment_files
from specctl.policy import Policy, build_shape, policy_digest
from specctl.replay.rounds import check_held, replay
from specctl.stats import MIN_PROMPTS, sums_by
from specctl.trace import token_mode
from specctl.tree import gather

if TYPE_CHECKING:
    import polars as pl

DEEP = 4
"""Levels from this one on are counted together."""
COLUMNS = (
    "calls",
    "tokens",
    "verified",
    *(f"{what}_{depth}" for depth in range(1, DEEP + 1) for what in ("tried", "accepted")),
    "judged",
    "surprise",
    "other_policy",
    "whole",
    "cut_short",
)
"""Sums of a prompt.

`tried_d`, `accepted_d`: rounds that drafted level d after an accepted path, and of these the
rounds that accepted it; for `DEEP`, levels instead of rounds. `judged`: verified draft nodes of
known fate. `surprise`: accepted ones of these, less the sum of their scores. `other_policy`: rounds
that another policy decided. `whole`: rounds of the policy that do not end a text. `cut_short`: of
these the rounds whose accepted path ended in a node without verified children: a gate, stop or
limit came too early.
"""
SIGNALS = {
    "tokens per call": {"tokens per call": ("tokens", "calls")},
    "verified per call": {"verified per call": ("verified", "calls")},
    "acceptance": {
        **{f"acceptance at depth {d}": (f"accepted_{d}", f"tried_{d}") for d in range(1, DEEP)},
        f"acceptance from depth {DEEP} on": (f"accepted_{DEEP}", f"tried_{DEEP}"),
    },
    "calibration": {"calibration": ("surprise", "judged")},
    "fallbacks": {"fallbacks": ("other_policy", "calls")},
    "cut short": {"cut short": ("cut_short", "whole")},
}
"""Figures of sums, above over below, in the groups that share one stake. `prompt tokens` and
`categories` are further groups."""
Terms = dict[str, dict[str, tuple[Floats, Floats]]]
"""`[U, 2]` numerators and denominators of the reference and of the stream, by group and signal."""
UNITS = ("prompt", "hour", "day", "conversation")
"""Units; the user names one that is exchangeable while nothing changes."""
SILENCE = np.timedelta64(1, "h")
"""A conversation ends after this pause."""
MOST_CATEGORIES = 12
"""Watched categories; rarer ones of the reference are counted together."""
REST = "other"


@dataclass(frozen=True)
class Prompts:
    """P prompts in the order in which they were finished."""

    ids: NDArray[np.object_]
    category: NDArray[np.object_]
    finished: NDArray[np.object_]  # UTC time of the segment with its end, as text
    context: Floats  # tokens of the prompt and its first root
    sums: Floats  # [P, S], columns `COLUMNS`; NaN without logged nodes
    unit: Longs | None = None  # 0 to U - 1, in order; None: each prompt is a unit

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_units(self) -> int:
        """U."""
        return len(self) if self.unit is None else len(np.unique(self.unit))

    def start_of(self, unit: int) -> int:
        """The index of a unit's first prompt."""
        return unit if self.unit is None else int(np.searchsorted(self.unit, unit))

    def split(self, num_prompts: int) -> tuple[Prompts, Prompts]:
        """The first units, with at least `num_prompts` prompts and `MIN_PROMPTS` units, and the
        rest."""
        last = min(num_prompts, len(self)) - 1
        num_units = last + 1 if self.unit is None or last < 0 else int(self.unit[last]) + 1
        start = self.start_of(max(num_units, MIN_PROMPTS))
        return self.take(slice(start)), self.take(slice(start, None))

    def take(self, rows: Any) -> Prompts:
        """Selects prompts by index, slice or mask."""
        columns = {name: column[rows] for name, column in vars(self).items() if name != "unit"}
        unit = None if self.unit is None else np.unique(self.unit[rows], return_inverse=True)[1]
        return replace(self, **columns, unit=unit)

    def column(self, name: str) -> Floats:
        """`[P]` one of `COLUMNS`."""
        return self.sums[:, COLUMNS.index(name)]

    def terms(self, above: NDArray[Any], below: NDArray[Any] | None = None) -> Floats:
        """`[U, 2]` sums of a figure's numerator and denominator `[P]`; 0 where either is unknown.

        Args:
            below: None for a mean over prompts.
        """
        sides = np.asarray(above, float), np.ones(len(self)) if below is None else below
        table = np.stack(sides, 1)
        table[~np.isfinite(table).all(1)] = 0.0
        return table if self.unit is None else sums_by(self.unit, self.num_units, table)


def over(terms: Floats) -> Floats:
    """Figures `[U]` of terms `[U, 2]`; NaN if undefined."""
    above, below = terms.T
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below > 0, above / below, np.nan)


def watched(reference: Prompts, stream: Prompts) -> Terms:
    """The signals that both sides have."""
    sides = (reference, stream)
    found: dict[str, dict[str, list[Floats]]] = {
        group: {
            name: [side.terms(side.column(above), side.column(below)) for side in sides]
            for name, (above, below) in signals.items()
        }
        for group, signals in SIGNALS.items()
    }
    found["prompt tokens"] = {"prompt tokens": [side.terms(side.context) for side in sides]}
    names, counts = np.unique(reference.category.astype(str), return_counts=True)
    kept = names[np.argsort(-counts, kind="stable")][:MOST_CATEGORIES]
    if len({*names, *stream.category}) > 1:
        found["categories"] = {
            f"category {name}": [side.terms(side.category == name) for side in sides]
            for name in kept
        }
        rest = [side.terms(~np.isin(side.category.astype(str), kept)) for side in sides]
        found["categories"][f"category {REST}"] = rest
    known = {
        group: {
            name: (before, since)
            for name, (before, since) in signals.items()
            if (before[:, 1] > 0).any() and (since[:, 1] > 0).any()
        }
        for group, signals in found.items()
    }
    return {group: signals for group, signals in known.items() if signals}


# --------------------------------------------------------------------------- units


def in_units(prompts: Prompts, unit: str) -> Prompts:
    """The prompts of whole units, ordered by the ends of units, so that new units come last.

    Units that may be incomplete are left out: the first and the last hour or day of a log, and
    conversations without a pause of `SILENCE` since.

    Args:
        prompts: in order of time.
        unit: of `UNITS`; hours and days are UTC.
    """
    if unit == "prompt":
        return prompts
    if unit == "conversation":
        codes, is_whole = _conversations(prompts)
    else:
        length = len("2026-01-31" if unit == "day" else "2026-01-31 12")
        codes = np.unique([time[:length] for time in prompts.finished], return_inverse=True)[1]
        is_whole = (codes > 0) & (codes < codes.max())
    order = np.argsort(codes, kind="stable")
    order = order[is_whole[order]]
    return replace(prompts.take(order), unit=np.unique(codes[order], return_inverse=True)[1])


def _conversations(prompts: Prompts) -> tuple[Longs, NDArray[np.bool_]]:
    """`[P]` rank of each prompt's conversation by its end, and whether it has ended.

    Prompts of a conversation have ids that are equal up to the last `#`, and no pause of `SILENCE`.
    """
    codes, ends, latest = np.zeros(len(prompts), np.int64), list[Any](), dict[str, int]()
    times = prompts.finished.astype("datetime64[s]")
    for row, (name, time) in enumerate(zip(prompts.ids, times, strict=True)):
        key = str(name).rpartition("#")[0] or str(name)
        code = latest.get(key)
        if code is None or time - ends[code] > SILENCE:
            code = latest[key] = len(ends)
            ends.append(time)
        codes[row], ends[code] = code, time
    ended = np.array(ends)
    place = np.argsort(np.argsort(ended, kind="stable"))
    return place[codes], (times[-1] - ended > SILENCE)[codes]


# --------------------------------------------------------------------------- readers


def read_prompts(traces: TraceSet, policy: Policy) -> Prompts:
    """The prompts of a set under a policy: as served, or replayed on dense traces.

    Raises:
        TraceEmptyError: no live row is of the policy.
        TraceMismatchError: dense traces lack support for the policy, see `check_held`.
        UsageError: the policy cannot be replayed.
        TraceError: see `open_log`.
    """
    log = open_log(traces)
    if isinstance(log, DenseLog):
        found, whole = _replayed(traces, log, policy)
    else:
        found, whole = _served(traces, policy)
    return _in_time(_with_nodes(found, traces, policy, whole), traces)


def _in_time(prompts: Prompts, traces: TraceSet) -> Prompts:
    """Prompts in order of the names of the segments with their ends, which begin with the time: in
    order of time, if the writers' clocks agree."""
    segments = (segment for part in traces.parts for segment in part.segments)
    names = {prompt: segment.name for segment in segments for prompt in segment.prompt_ids}
    found = [names[prompt] for prompt in prompts.ids]
    order = np.argsort(np.array(found), kind="stable")
    finished = np.array([_time_of(name) for name in found], object)
    return replace(prompts, finished=finished).take(order)


def _served(traces: TraceSet, policy: Policy) -> tuple[Prompts, NDArray[np.bool_]]:
    """The prompts of the policy, and a mask of its rounds in the log except texts' last ones.

    A prompt belongs to the policy of its first round: if an alias moves during a prompt, the new
    policy is not charged for it.
    """
    import polars as pl

    digest = policy_digest(policy)
    is_ours, is_first = pl.col("policy_digest") == digest, pl.col("round_idx") == 0
    is_last = pl.col("round_idx") == pl.col("round_idx").max().over("request_id")
    parts = [
        collected(
            scan_files("rounds", [files["rounds"]]).select(
                pl.col("prompt_id", "category", "policy_digest").cast(pl.String),
                pl.col("context_tokens", *COUNTS).cast(pl.Int64),
                is_first=is_first,
                other_policy=~is_ours,
                whole=is_ours & ~is_last,
            )
        )
        for files in segment_files(traces)
    ]
    table = pl.concat(parts)
    begun = table.filter("is_first", ~pl.col("other_policy"))["prompt_id"].unique()
    if not len(begun):
        others = sorted(name[:19] for name in table["policy_digest"].unique())
        raise TraceEmptyError(
            f"the live traces hold no rounds of the policy {digest[:19]}, but of "
            f"{', '.join(others)}",
            hint="name the policy that the traffic was served with: specctl show TRACES",
        )
    rows = table.filter(pl.col("prompt_id").is_in(begun.implode()))
    return summed(rows), table["whole"].to_numpy()


COUNTS = ("offered_depth", "num_verified", "num_accepted", "num_emitted")


def summed(rounds: pl.DataFrame) -> Prompts:
    """Prompts of a table of rounds, in order of their first; NaN for `judged` and `surprise`.

    A path that ends with the text does not try the next level. `cut_short` is for chains only.
    """
    import polars as pl

    offered, verified, accepted, emitted = (pl.col(name) for name in COUNTS)
    tried = pl.min_horizontal(accepted + (emitted > accepted), offered)
    by_depth = {
        f"{name}_{depth}": (one - (DEEP - 1)).clip(0) if depth == DEEP else one >= depth
        for depth in range(1, DEEP + 1)
        for name, one in (("tried", tried), ("accepted", accepted))
    }
    table = rounds.with_columns(
        calls=1,
        tokens=emitted,
        verified=verified,
        **by_depth,
        judged=np.nan,
        surprise=np.nan,
        cut_short=pl.col("whole") & (accepted + 1 >= verified),
    )
    found = table.group_by("prompt_id", maintain_order=True).agg(
        pl.col("category").first(),
        pl.col("context_tokens").filter("is_first").first(),
        pl.col(COLUMNS).cast(pl.Float64).sum(),
    )
    ids, category = (found[name].to_numpy().astype(object) for name in ("prompt_id", "category"))
    context = found["context_tokens"].to_numpy().astype(float)
    nowhen = np.full(len(found), "", object)
    return Prompts(ids, category, nowhen, context, found.select(COLUMNS).to_numpy())


def _time_of(name: str) -> str:
    """`2026-01-31 12:00:00` of a segment's name."""
    day, hour, minute, second = name[:8], name[9:11], name[11:13], name[13:15]
    return f"{day[:4]}-{day[4:6]}-{day[6:]} {hour}:{minute}:{second}"


def _replayed(traces: TraceSet, log: DenseLog, policy: Policy) -> tuple[Prompts, NDArray[np.bool_]]:
    import polars as pl

    [run] = replay(log, [policy], with_bounds=False)
    names = " + ".join(part.place.name for part in traces.parts)
    check_held(log, policy, run.outcomes.support, f"replay of {policy.name} on {names}")
    positions, outcomes = run.positions, run.outcomes
    rounds = pl.DataFrame(
        {
            "prompt_id": pl.Series(positions.prompt_ids)[positions.prompt[run.request]],
            "category": pl.Series(positions.categories)[positions.category[run.request]],
            "context_tokens": run.context_tokens,
            "offered_depth": outcomes.levels,
            "num_verified": outcomes.verified,
            "num_accepted": outcomes.accepted,
            "num_emitted": run.emitted,
            "whole": ~run.is_last,
        }
    )
    whole = run.visited.copy()
    whole[run.visited] = ~run.is_last
    return summed(rounds.with_columns(is_first=True, other_policy=False)), whole


def _with_nodes(
    prompts: Prompts, traces: TraceSet, policy: Policy, whole_rounds: NDArray[np.bool_]
) -> Prompts:
    """Adds `judged` and `surprise`, and of trees `cut_short`; NaN if the rows lack inputs of the
    policy.

    The score of a node is a pruning policy's, else its joint probability.

    Args:
        whole_rounds: `[R]` mask of the policy's rounds in the log except texts' last ones, whose
            continuation is unknown.
    """
    rule, log = build_shape(policy.shape), open_log(traces)
    columns = ("judged", "surprise", "cut_short")[: 2 if rule.top_k == 1 else 3]
    sums, places = prompts.sums.copy(), [COLUMNS.index(name) for name in columns]
    is_lacking = rule.memory_size > 0 or rule.max_depth == 0
    if rule.needs_text and isinstance(log, LiveLog):
        is_lacking |= token_mode(traces.header.collect) == "drop"
        log = replace(log, reads_text=True)
    sums[:, places] = np.nan if is_lacking else 0.0
    if is_lacking:
        return replace(prompts, sums=sums)
    row_of, start = {name: row for row, name in enumerate(prompts.ids)}, 0
    for batch in LoggedNodes(log).batches(rule):
        submitted = batch.submitted[:, 1:]
        at = submitted.clamp(min=0)
        scores = batch.pool.joint_logp if batch.scores is None else batch.scores
        known = batch.known.gather(1, at) & (submitted >= 0)
        promised = scores.gather(1, at).double().exp()
        surprise = (batch.accepted.gather(1, at).double() - promised).masked_fill(~known, 0.0)
        slots = batch.submitted
        path = gather(batch.accepted, slots, 0)
        last = slots.gather(1, gather(batch.pool.depth, slots, 0).mul(path).argmax(1)[:, None])
        goes_on = (gather(batch.pool.parent, slots, -1) == last).any(1)
        of_round = torch.stack((known.sum(1).double(), surprise.sum(1), (~goes_on).double()), 1)
        is_whole = whole_rounds[start : start + len(of_round)]
        start += len(of_round)
        named = zip(batch.prompt_id[is_whole], of_round.numpy()[is_whole], strict=True)
        for name, one in named:
            if name in row_of:
                sums[row_of[name], places] += one[: len(columns)]
    return replace(prompts, sums=sums)
