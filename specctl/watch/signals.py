"""What every prompt says of a deployed policy: the figures that an alarm watches, prompt by prompt.

Live rows hold them as they were served. Of dense traces the policy is replayed, which gives the
rounds that it would have run, so the traces of a fit are a reference for the traffic of a service.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

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

DEEP = 4
"""Levels from here on count as one."""
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
"""Sums of a prompt. `tried_d`, `accepted_d`: rounds that drafted level d behind an accepted path,
and those of which it was accepted; of the last, levels. `judged`: verified draft nodes whose fate
is known; `surprise`: of these accepted, less what their scores promised. `other_policy`: rounds
that another policy decided. `whole`: rounds of the policy that end no text; `cut_short`: of these,
where the accepted path ended because nothing was verified behind it, not because the target
refused: a gate, a stop or a limit came too early."""
RATIOS = {
    "tokens per call": ("tokens", "calls"),
    "verified per call": ("verified", "calls"),
    **{f"acceptance at depth {d}": (f"accepted_{d}", f"tried_{d}") for d in range(1, DEEP)},
    f"acceptance from depth {DEEP} on": (f"accepted_{DEEP}", f"tried_{DEEP}"),
    "calibration": ("surprise", "judged"),
    "fallbacks": ("other_policy", "calls"),
    "cut short": ("cut_short", "whole"),
}
"""Figures of sums: above over below."""
UNITS = ("prompt", "hour", "day", "conversation")
"""Units that are exchangeable while nothing changes, by the user's knowledge of the traffic."""
SILENCE = np.timedelta64(1, "h")
"""A conversation has ended after so long without a prompt."""
GROUPS = {
    "tokens per call": ("tokens per call",),
    "verified per call": ("verified per call",),
    "acceptance": tuple(name for name in RATIOS if name.startswith("acceptance")),
    "calibration": ("calibration",),
    "fallbacks": ("fallbacks",),
    "cut short": ("cut short",),
}
"""Signals that share one stake. `prompt tokens` and `categories` stand beside them."""
MOST_CATEGORIES = 12
"""Categories that are watched; rarer ones of the reference count together."""
REST = "other"


@dataclass(frozen=True)
class Prompts:
    """P prompts in the order in which they were finished."""

    ids: NDArray[np.object_]
    category: NDArray[np.object_]
    finished: NDArray[np.object_]  # UTC time of the segment that finished each, as text
    context: Floats  # tokens of the prompt, with its first root
    sums: Floats  # [P, S], columns `COLUMNS`; NaN where the log holds no nodes
    unit: Longs | None = None  # 0 to U - 1, in order; None: each is one by itself

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_units(self) -> int:
        """U."""
        return len(self) if self.unit is None else len(np.unique(self.unit))

    def start_of(self, unit: int) -> int:
        """The place of a unit's first prompt."""
        return unit if self.unit is None else int(np.searchsorted(self.unit, unit))

    def split(self, num_prompts: int) -> tuple[Prompts, Prompts]:
        """The first units, as many as hold `num_prompts` and `MIN_PROMPTS` at least, and the
        others."""
        last = min(num_prompts, len(self)) - 1
        num_units = last + 1 if self.unit is None or last < 0 else int(self.unit[last]) + 1
        start = self.start_of(max(num_units, MIN_PROMPTS))
        return self.take(slice(start)), self.take(slice(start, None))

    def take(self, rows: Any) -> Prompts:
        """Some of them, by index, slice or mask."""
        columns = {name: column[rows] for name, column in vars(self).items() if name != "unit"}
        unit = None if self.unit is None else np.unique(self.unit[rows], return_inverse=True)[1]
        return replace(self, **columns, unit=unit)

    def column(self, name: str) -> Floats:
        """`[P]` one of `COLUMNS`."""
        return self.sums[:, COLUMNS.index(name)]

    def figure(self, name: str) -> Floats:
        """`[U]` one of `RATIOS`; NaN where a unit has none."""
        return over(self.terms(*(self.column(part) for part in RATIOS[name])))

    def terms(self, above: NDArray[Any], below: NDArray[Any] | None = None) -> Floats:
        """`[U, 2]`: sums of a figure's two sides `[P]`, 0 where either is not known.

        Args:
            below: None for a mean over prompts.
        """
        sides = np.asarray(above, float), np.ones(len(self)) if below is None else below
        table = np.stack(sides, 1)
        table[~np.isfinite(table).all(1)] = 0.0
        return table if self.unit is None else sums_by(self.unit, self.num_units, table)


def over(terms: Floats) -> Floats:
    """The figures `[U]` of terms `[U, 2]`; NaN where there is none."""
    above, below = terms.T
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below > 0, above / below, np.nan)


def watched(reference: Prompts, stream: Prompts) -> dict[str, dict[str, tuple[Floats, Floats]]]:
    """Terms `[U, 2]` of the reference and of the stream, by group and signal; of figures that
    neither has there are none."""
    sides = (reference, stream)

    def ratio(name: str) -> list[Floats]:
        return [side.terms(*(side.column(part) for part in RATIOS[name])) for side in sides]

    found = {group: {name: ratio(name) for name in names} for group, names in GROUPS.items()}
    found["prompt tokens"] = {"prompt tokens": [side.terms(side.context) for side in sides]}
    names, counts = np.unique(reference.category.astype(str), return_counts=True)
    kept = names[np.argsort(-counts, kind="stable")][:MOST_CATEGORIES]
    if len({*names, *stream.category}) > 1:
        found["categories"] = {
            f"category {name}": [side.terms(side.category == name) for side in sides]
            for name in kept
        } | {
            f"category {REST}": [
                side.terms(~np.isin(side.category.astype(str), kept)) for side in sides
            ]
        }
    known = {
        group: {
            name: (first, second)
            for name, (first, second) in signals.items()
            if (first[:, 1] > 0).any() and (second[:, 1] > 0).any()
        }
        for group, signals in found.items()
    }
    return {group: signals for group, signals in known.items() if signals}


# --------------------------------------------------------------------------- units


def in_units(prompts: Prompts, unit: str) -> Prompts:
    """The prompts in whole units, unit behind unit in the order in which these end, so that what a
    log gains later comes behind.

    The first and the last hour or day of a log may be parts, and a conversation may go on until
    `SILENCE`: these are left out.

    Args:
        prompts: in order of time. unit: of `UNITS`; hours and days are of UTC.
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
    """`[P]` place of each prompt's conversation in order of their ends, and whether it has ended.

    A conversation's prompts have ids that are equal up to the last `#`, and no pause of `SILENCE`.
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
    """The prompts of a set under a policy: as served, or replayed where the set is dense.

    Raises:
        TraceEmptyError: live rows, none of which the policy decided.
        TraceMismatchError: dense traces that lack what the policy wants, see `check_held`.
        UsageError: a policy that cannot be replayed. TraceError: see `open_log`.
    """
    log = open_log(traces)
    if isinstance(log, DenseLog):
        found, whole = _replayed(traces, log, policy)
    else:
        found, whole = _served(traces, policy)
    return _in_time(_with_nodes(found, traces, policy, whole), traces)


def _in_time(prompts: Prompts, traces: TraceSet) -> Prompts:
    """In order of the names of the segments that finished them, whichever writer's and set's: these
    begin with the time. So what is finished later comes behind, where writers' clocks agree."""
    segments = (segment for part in traces.parts for segment in part.segments)
    names = {prompt: segment.name for segment in segments for prompt in segment.prompt_ids}
    found = [names[prompt] for prompt in prompts.ids]
    order = np.argsort(np.array(found), kind="stable")
    finished = np.array([_time_of(name) for name in found], object)
    return replace(prompts, finished=finished).take(order)


def _served(traces: TraceSet, policy: Policy) -> tuple[Prompts, NDArray[np.bool_]]:
    """The prompts, and the rows of the log that are rounds of the policy but for texts' last ones.

    A prompt is the policy's whose first round it decided: one during which an alias was moved would
    look as if the new policy had failed in it.
    """
    import polars as pl

    digest, names = policy_digest(policy), ("request_id", "prompt_id", "category", "policy_digest")
    numbers = ("round_idx", "context_tokens", *COUNTS)
    parts = []
    for files in segment_files(traces):
        rounds = scan_files("rounds", [files["rounds"]])
        last = pl.col("round_idx").max().over("request_id")
        part = rounds.select(
            pl.col(names).cast(pl.String),
            pl.col(numbers).cast(pl.Int64),
            last=pl.col("round_idx") == last,
        )
        parts.append(collected(part))
    table = pl.concat(parts)
    ours = table["policy_digest"] == digest
    begun = table.filter(ours & (table["round_idx"] == 0))["prompt_id"].unique()
    if not len(begun):
        others = sorted(name[:19] for name in table["policy_digest"].unique())
        raise TraceEmptyError(
            f"the live traces hold no rounds of the policy {digest[:19]}, but of "
            f"{', '.join(others)}",
            hint="name the policy that the traffic was served with: specctl show TRACES",
        )
    whole = (ours & ~table["last"]).to_numpy()
    rows = table["prompt_id"].is_in(begun.implode()).to_numpy()
    numbered = [table[name].to_numpy()[rows] for name in numbers]
    first, context, offered, verified, accepted, emitted = numbered
    ids, category = (
        table[name].to_numpy().astype(object)[rows] for name in ("prompt_id", "category")
    )
    found = _summed(
        ids,
        category,
        context,
        first == 0,
        offered=offered,
        verified=verified,
        accepted=accepted,
        emitted=emitted,
        other=~ours.to_numpy()[rows],
        whole=whole[rows],
    )
    return found, whole


COUNTS = ("offered_depth", "num_verified", "num_accepted", "num_emitted")


def _summed(
    ids: NDArray[np.object_],
    category: NDArray[np.object_],
    context: NDArray[Any],
    starts: NDArray[np.bool_],
    **counts: Any,
) -> Prompts:
    """Prompts of rounds `[M]`, in order of their first; `starts`: rounds that begin a request."""
    names, first, codes = np.unique(ids, return_index=True, return_inverse=True)
    begun = np.flatnonzero(starts)[np.unique(ids[starts], return_index=True)[1]]
    order = np.argsort(first)
    sums = round_sums(np.argsort(order)[codes], len(names), **counts)
    texts = names[order], category[first[order]], np.full(len(names), "", object)
    return Prompts(*texts, context[begun[order]].astype(float), sums)


def round_sums(
    prompt: Longs,
    num_prompts: int,
    *,
    offered: NDArray[Any],
    verified: NDArray[Any],
    accepted: NDArray[Any],
    emitted: NDArray[Any],
    whole: NDArray[np.bool_],
    other: NDArray[Any] | None = None,
) -> Floats:
    """`[P, S]` sums of rounds `[M]`, given each round's prompt; NaN in `NODE_COLUMNS`.

    A path that the end of the text cut is not tried at the next level. `cut_short` is of chains.
    """
    tried = np.minimum(accepted + (emitted > accepted), offered)
    by_depth = []
    for depth in range(1, DEEP):
        by_depth += [tried >= depth, accepted >= depth]
    by_depth += [np.maximum(tried - DEEP + 1, 0), np.maximum(accepted - DEEP + 1, 0)]
    ones, unknown = np.ones(len(prompt)), np.full(len(prompt), np.nan)
    switched = np.zeros(len(prompt)) if other is None else other
    cut_short = whole & (accepted + 1 >= verified)
    columns = (ones, emitted, verified, *by_depth, unknown, unknown, switched, whole, cut_short)
    return sums_by(prompt, num_prompts, [np.asarray(column, float) for column in columns])


def _time_of(name: str) -> str:
    """`2026-01-31 12:00:00` of a segment's name."""
    day, hour, minute, second = name[:8], name[9:11], name[11:13], name[13:15]
    return f"{day[:4]}-{day[4:6]}-{day[6:]} {hour}:{minute}:{second}"


def _replayed(traces: TraceSet, log: DenseLog, policy: Policy) -> tuple[Prompts, NDArray[np.bool_]]:
    [run] = replay(log, [policy], with_bounds=False)
    names = " + ".join(part.place.name for part in traces.parts)
    check_held(log, policy, run.outcomes.support, f"replay of {policy.name} on {names}")
    positions = run.positions
    found = _summed(
        np.array(positions.prompt_ids, object)[positions.prompt[run.request]],
        np.array(positions.categories, object)[positions.category[run.request]],
        run.context_tokens,
        np.ones(len(run.request), np.bool_),
        offered=run.outcomes.levels,
        verified=run.outcomes.verified,
        accepted=run.outcomes.accepted,
        emitted=run.emitted,
        whole=~run.is_last,
    )
    whole = run.visited.copy()
    whole[run.visited] = ~run.is_last
    return found, whole


NODE_COLUMNS = ("judged", "surprise", "cut_short")
"""Sums over nodes; of chains the last one is a sum over rounds."""


def _with_nodes(
    prompts: Prompts, traces: TraceSet, policy: Policy, whole_rounds: NDArray[np.bool_]
) -> Prompts:
    by_prompt = _node_sums(traces, policy, whole_rounds)
    is_chain = build_shape(policy.shape).top_k == 1
    columns = NODE_COLUMNS[: 2 if is_chain else 3]
    sums, places = prompts.sums.copy(), [COLUMNS.index(name) for name in columns]
    sums[:, places] = np.nan
    if by_prompt is not None:
        nothing = np.zeros(len(NODE_COLUMNS))
        sums[:, places] = [by_prompt.get(name, nothing)[: len(columns)] for name in prompts.ids]
    return replace(prompts, sums=sums)


def _node_sums(
    traces: TraceSet, policy: Policy, whole_rounds: NDArray[np.bool_]
) -> dict[str, Floats] | None:
    """`NODE_COLUMNS` of prompts: verified draft nodes of known fate, accepted ones less the sum
    of scores, and rounds that were cut short; None where the rows lack what the policy reads.

    The score is what a pruning policy gave the path, of others its joint probability.

    Args:
        whole_rounds: `[R]` rows of the log that are rounds of the policy, but for those that end
            a text: what it would have gone on with is not known.
    """
    rule, log = build_shape(policy.shape), open_log(traces)
    if rule.memory_size or rule.max_depth == 0:
        return None
    if rule.needs_text and isinstance(log, LiveLog):
        if token_mode(traces.header.collect) == "drop":
            return None
        log = replace(log, reads_text=True)
    found: dict[str, Floats] = {}
    index = 0
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
        columns = (known.sum(1).double(), surprise.sum(1), (~goes_on).double())
        sums = torch.stack(columns, 1).numpy()
        rows = whole_rounds[index : index + len(sums)]
        for name, one in zip(batch.prompt_id[rows], sums[rows], strict=True):
            found[name] = found.get(name, 0.0) + one
        index += len(sums)
    return found
