"""Data of dense traces that fits read beyond single nodes: positions, walks and replays.

`fit cart` reads the rounds of a base tree, `fit echo` the confidence of every level and replayed
gates, `fit adasd` the tokens that chains tested and what stops cost, `fit mars` where a relaxed
acceptance could first have left the logged texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specctl.artifacts.manifest import PairFingerprint
from specctl.errors import TraceMismatchError, UsageError
from specctl.features import phi
from specctl.logs.fit_data import (
    ROUND_COLUMNS,
    Openings,
    PositionRows,
    PromptCosts,
    ReplayedTotals,
    RowSample,
    TestedTokens,
    position_rows,
)
from specctl.logs.logged_draft import LoggedDraft, logged_drafts
from specctl.logs.parquet import collected, scan_files
from specctl.logs.positions import Bools, Longs, join_rows
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, LogChunk
from specctl.policy import EntropyStop, Policy, SparseGates, StaticTree, build_shape
from specctl.policy.adasd import first_rejected
from specctl.policy.mars import Mars, TopTwo, closeness
from specctl.policy.verification import Strict
from specctl.replay.outcomes import OnlineStep, check_replayable, needs_entropy, online_steps
from specctl.replay.rounds import Clock, replay_parts
from specctl.replay.walk import walk
from specctl.runtime.policy_spec import resolve_policy
from specctl.stats import add_by, lengthened
from specctl.tree import gather, take

if TYPE_CHECKING:  # slow to import
    import polars as pl

OnPositions = Callable[[int], None]

# ----------------------------------------------------------------- bins: rounds of a base tree


@dataclass(frozen=True)
class FitRounds:
    """A `rounds` table with the columns that `fit cart` reads.

    Attributes:
        policy: record of the tree that the rounds were drafted with.
        num_rounds: from which they were sampled.
        num_left_out: positions that cannot be labelled, see `PositionRows`.
    """

    rounds: pl.DataFrame
    policy: Mapping[str, Any]
    num_rounds: int
    num_left_out: int = 0


def rounds_to_fit(
    traces: TraceSet,
    base: str | None,
    *,
    max_rows: int | None = None,
    seed: int = 0,
    conditional: bool = False,
    num_threads: int = 1,
    on_positions: OnPositions | None = None,
) -> FitRounds:
    """The rounds of live traces as they are; of dense ones, what the base tree would do.

    Args:
        base: static tree to draft at every position, e.g. `eagle2:depth=6`; dense traces only.
            None: that of the traces, else eagle2's, as deep and wide as they hold.
        max_rows, seed: see `RowSample`.
        conditional: sum Φ along the path whose last token is the likeliest by itself.

    Raises:
        UsageError: a base for live traces, one that is not a static tree, or one that they lack.
    """
    import polars as pl

    if "dense" not in traces.header.collect:
        if base is not None:
            raise UsageError(
                "--base",
                expected="dense traces, which any base tree can be replayed on",
                found="live ones, drafted with the tree that they were collected with",
                fix="leave it out, or collect with --dense",
            )
        if conditional:
            raise UsageError(
                "--path conditional",
                expected="dense traces, of which Φ is computed",
                found="live ones, whose Φ was summed along the likeliest path",
                fix="leave it out, or collect with --dense",
            )
        sample = RowSample(max_rows, seed)
        for files in traces.segment_files():
            part = scan_files("rounds", [files["rounds"]]).select(*ROUND_COLUMNS)
            sample.add(collected(part, str(files["rounds"])))
        return FitRounds(sample.rows(), traces.header.policy, sample.num_rows)
    log = DenseLog.open(traces)
    held, usual = log.support, StaticTree()
    if base is None:
        sizes = min(usual.depth, held.depth), min(usual.top_k, held.top_k)
        base = "eagle2:depth={}:top_k={}".format(*sizes)
    shape = resolve_policy(base).policy.shape
    if not isinstance(shape, StaticTree):
        raise UsageError(
            "--base",
            expected="a static tree such as eagle2:depth=6:top_k=8:num_tokens=48",
            found=base,
            fix="name one",
        )
    if shape.depth > held.depth or shape.top_k > held.top_k:
        raise UsageError(
            "--base",
            expected=f"at most depth={held.depth}:top_k={held.top_k}, which the traces hold",
            found=base,
            fix="name a smaller tree, or collect deeper or wider (--depth, --children)",
        )

    def columns(draft: LoggedDraft) -> dict[str, Tensor]:
        return {"phi": phi(draft.pool, conditional=conditional), "tcr": draft.terminal_rank.int()}

    found = position_rows(
        log,
        build_shape(shape),
        columns,
        max_rows=max_rows,
        seed=seed,
        num_threads=num_threads,
        on_positions=on_positions,
    )
    depth, top_k = (pl.lit(value, pl.Int16) for value in (shape.depth, shape.top_k))
    rounds = found.rows.rename({"accepted": "num_accepted"}).with_columns(
        offered_depth=depth,
        top_k=top_k,
        phi_depth=depth,
        fully_accepted=pl.col("num_accepted") == shape.depth,
        tcr=pl.when(pl.col("tcr") > 0).then("tcr"),
    )
    policy = Policy(shape=shape).model_dump(mode="json")
    return FitRounds(rounds, policy, found.num_rows, found.num_left_out)


# ----------------------------------------------------------------- gates


def gate_rows(
    log: DenseLog,
    shape: SparseGates,
    *,
    max_rows: int | None = None,
    seed: int = 0,
    num_threads: int = 1,
    on_positions: OnPositions | None = None,
) -> PositionRows:
    """Every position as if no gate ever closed.

    Args:
        max_rows, seed: see `RowSample`.

    Returns:
        Rows with `level_1` to `level_D`: the log-probability of the likeliest path to each level,
        nats (ECHO, Eq. 6).
    """
    never = tuple(0.0 for _ in shape.thresholds)
    rule = build_shape(shape.model_copy(update={"thresholds": never}))

    def columns(draft: LoggedDraft) -> dict[str, Tensor]:
        joint = draft.pool.joint_logp
        best = torch.full((len(joint), rule.max_depth + 1), -torch.inf)
        best = best.scatter_reduce(1, draft.pool.tree.depth, joint, "amax")
        return {f"level_{d}": best[:, d] for d in range(1, rule.max_depth + 1)}

    return position_rows(
        log,
        rule,
        columns,
        max_rows=max_rows,
        seed=seed,
        with_entropy=False,
        num_threads=num_threads,
        on_positions=on_positions,
    )


TOTALS = ("calls", "tokens", "accepted", "verified", "levels", "time_us")


@dataclass(frozen=True)
class Replayer:
    """Replays policies over some prompts of a log, one request at a time."""

    log: DenseLog
    clock: Clock | None = None
    num_threads: int = 1

    def __call__(self, policies: Sequence[Policy], prompts: Sequence[str]) -> list[ReplayedTotals]:
        part, sums = self.log.only(prompts), np.zeros((len(policies), len(TOTALS) + 1))
        options: dict[str, Any] = {"with_bounds": False, "num_threads": self.num_threads}
        for runs in replay_parts(part, policies, **options):
            for total, run in zip(sums, runs, strict=True):
                counts = run.counts(self.clock)
                shares = counts["accepted"] / np.maximum(counts["levels"], 1)
                total += [*(counts[name].sum() for name in TOTALS), shares.sum()]
        return [self._totals(*total) for total in sums.tolist()]

    def _totals(self, *sums: float) -> ReplayedTotals:
        *counts, time_us, shares = sums
        return ReplayedTotals(
            **{name: int(count) for name, count in zip(TOTALS, counts, strict=False)},
            utilisation=shares / counts[0],
            time_us=None if self.clock is None else time_us,
        )


# ----------------------------------------------------------------- stops

DISTANCE = "js_distance"
NEVER = 1 << 40
"""More samples than any request has."""


def tokens_tested(log: DenseLog, window: int) -> TestedTokens:
    """Of all requests, decoded in chains of `window` tokens that never stop early.

    Args:
        log: with the column `js_distance`, if it holds chains alone.
    """
    rule = build_shape(EntropyStop(window=window, min_samples=NEVER))
    parts = []
    for chunk in log.chunks(extra=(DISTANCE,)):
        for step in online_steps(rule, chunk):
            place, accepted, node = tested_nodes(step)
            entropy, distance = chunk.entropy.numpy()[node], chunk.extra[DISTANCE][node]
            prompt = chunk.positions.row_prompts[step.rows[place]]
            parts.append((prompt, accepted, entropy.astype(float), distance.astype(float)))
    return TestedTokens(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def tested_nodes(step: OnlineStep) -> tuple[Longs, Bools, Longs]:
    """The M nodes of the accepted paths and the first rejected ones, as far as the text tells.

    Returns:
        `[M]` each: which of the step's requests, whether it was accepted, its index in the log.
    """
    draft, path = step.draft, step.outcome.path

    def logged(index: Tensor) -> Tensor:
        """Log index of nodes of the submitted trees, -1 for none."""
        pool = draft.submitted.gather(1, index.clamp(min=0))
        node = draft.node.gather(1, pool.clamp(min=0))
        return node.masked_fill((index < 0) | (pool < 0), -1)

    rejected = first_rejected(step.outcome.tree, path)
    node = torch.cat([logged(path[:, 1:]), logged(rejected[:, None])], 1)
    # Beyond the end of the text nothing tells what would have come: no acceptance, no rejection.
    depth = torch.arange(1, node.shape[1] + 1).expand_as(node).clone()
    depth[:, -1] = draft.on_path.sum(1)
    node = node.masked_fill(depth > draft.remaining[:, None], -1)
    row, place = (index.numpy() for index in (node >= 0).nonzero(as_tuple=True))
    return row, place < node.shape[1] - 1, node[node >= 0].numpy()


def prompt_costs(log: DenseLog, policies: Sequence[Policy], clock: Clock) -> list[PromptCosts]:
    """Replays policies over a whole log, in one pass.

    Args:
        clock: what a round takes.
    """
    names = ("calls", "tokens", "levels", "verified", "time_us", "censored")
    places = dict[str, int]()
    tables = [np.zeros((0, len(names))) for _ in policies]
    for runs in replay_parts(log, policies, with_bounds=False):
        positions = runs[0].positions
        here = [places.setdefault(name, len(places)) for name in positions.prompt_ids]
        prompt = np.array(here)[positions.prompt]
        for index, run in enumerate(runs):
            counts = run.counts(clock)
            tables[index] = lengthened(tables[index], len(places))
            add_by(tables[index], prompt[run.request], [counts[name] for name in names])
    found = (table[: len(places)].T for table in tables)
    return [
        PromptCosts(tuple(places), *costs, 1 - float(censored.sum() / costs[0].sum()))  # type: ignore[call-arg]
        for *costs, censored in found
    ]


def target_steps(draft_cost: float) -> Clock:
    """Rounds in units of target forwards, each drafted level costing `draft_cost` of one."""
    return lambda run: 1.0 + draft_cost * run.outcomes.levels.astype(np.float64)


# ----------------------------------------------------------------- relaxations

TOP_TWO_COLUMNS = ("target_rank", "target_top1_logit", "target_top2_logit", "token_id")
NOTHING = float("-inf")


def logged_openings(
    traces: TraceSet,
    pair: PairFingerprint,
    policy: Policy,
    acceptance: Mars,
    sampled: Callable[[DenseLog], DenseLog] = lambda log: log,
) -> Openings:
    """Distance of each strict round from a relaxation.

    Texts shorter than the log's limit ended by themselves, with a token that is never relaxed.

    Args:
        traces: dense, of the pair.
        policy: shape under which the texts are decoded, strictly.
        acceptance: its form says what closeness is, its list what is denied; its threshold is not
            used.
        sampled: the part of the log to read.

    Raises:
        UsageError: a policy that a log cannot tell, or one that remembers earlier rounds.
        TraceError: live traces, of another pair, or without token ids, by which tokens are denied.
    """
    found, log = traces.fingerprint, DenseLog.open(traces)
    names = ("target_digest", "drafter_digest", "tokenizer_digest")
    if any(getattr(found, name) != getattr(pair, name) for name in names):
        raise TraceMismatchError(
            "--traces",
            expected=f"traces of {pair.target} with {pair.drafter}",
            found=f"{found.target} with {found.drafter}",
            fix="give traces of the pair that is judged",
        )
    limits = [int(str(header.collect["max_new_tokens"])) for header in traces.headers]
    policy = policy.model_copy(update={"acceptance": Strict()})
    check_replayable(policy)
    rule = build_shape(policy.shape)
    if rule.memory_size:
        raise UsageError(
            f"--traces with {policy.name}",
            expected="a shape that decides by the position alone",
            found="one that learns from earlier rounds",
            fix="leave --traces out",
        )
    log.check_tokens("tokens that are never relaxed", "keep")
    parts: list[Openings] = []
    for chunk in sampled(log).chunks(with_entropy=needs_entropy(policy), extra=TOP_TWO_COLUMNS):
        before = sum(len(part.num_tokens) for part in parts)
        ends = [_round_ends(draft, acceptance) for draft in logged_drafts(rule, chunk)]
        accepted, close = (np.concatenate(column) for column in zip(*ends, strict=True))
        parts.append(_walked(chunk, accepted, close, limits, before))
    return join_rows(parts)


@torch.inference_mode()
def _round_ends(draft: LoggedDraft, acceptance: Mars) -> tuple[Any, Any]:
    """Draft tokens accepted, and how close the second choice came among the children of the last
    accepted node, `[B]` both."""
    on_path, extra = draft.on_path, draft.chunk.extra
    tree = take(draft.pool.tree, draft.submitted)
    last = tree.depth.masked_fill(~on_path, -1).argmax(1)
    node = gather(draft.node, draft.submitted, -1)
    behind, node = (tree.parent == last[:, None]) & (node >= 0), node.clamp(min=0)
    rank, first, second, token = (
        torch.from_numpy(np.asarray(extra[name], np.float64))[node] for name in TOP_TWO_COLUMNS
    )
    best = TopTwo(node, node, first.float(), second.float())
    denied = torch.tensor(acceptance.deny_token_ids, dtype=torch.int64)
    allowed = behind & (rank == 2) & ~torch.isin(token.long(), denied)
    values = closeness(acceptance, best).masked_fill(~allowed, NOTHING).amax(1)
    values = values.masked_fill((behind & (rank == 1)).any(1), NOTHING)
    return (on_path.sum(1) - 1).numpy(), values.numpy()


def _walked(
    chunk: LogChunk, accepted: Any, close: Any, limits: list[int], num_before: int
) -> Openings:
    positions = chunk.positions
    request = positions.request
    num_tokens = positions.remaining[positions.start[:-1]].astype(np.int64) + 1
    place = num_tokens[request] - positions.remaining + accepted
    # A round's end is about the token at `place`; the last one of a text that ended by itself is
    # denied, and behind a text there is nothing.
    last = num_tokens - ~np.isin(num_tokens, limits)
    values = np.where(place < last[request], close, np.float32(NOTHING)).astype(np.float32)
    seen: Bools = walk(positions, np.minimum(accepted, positions.remaining) + 1)
    return Openings(
        num_tokens, request[seen] + num_before, place[seen].astype(np.int64), values[seen]
    )
