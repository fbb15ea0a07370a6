"""Sums of policies over a log, one request at a time: static settings from a summary, the others
from their rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specctl.logs.tree_log import DenseLog, LogChunk
from specctl.policy import Policy
from specctl.progress import advance
from specctl.replay.metrics import Columns, Sums, by_prompt, join_sums, request_sums
from specctl.replay.outcomes import check_replayable, map_policies
from specctl.replay.rounds import Clock, Rounds, replay_chunk, walk_outcomes
from specctl.replay.static import static_submissions


def replayed_sums(
    log: DenseLog,
    policies: Sequence[Policy],
    clock: Clock | None,
    complete: Callable[[Columns], Columns] = lambda columns: columns,
) -> list[Sums]:
    """Sums of every policy by prompt, in the order of the log; `settings` progress.

    Args:
        complete: adds columns to those of requests, `[Q]`.
    """

    def summed(run: Rounds) -> Sums:
        return by_prompt(run.positions, complete(request_sums(run, clock)))

    def replayed(policy: Policy, chunk: LogChunk) -> Sums:
        return summed(replay_chunk(policy, chunk, with_bounds=False))

    found: dict[int, Sums] = {}
    for index, of in static_submissions(log, policies):
        rounds = walk_outcomes(of.policy, of.positions, of.outcomes, of.max_tokens)
        found[index] = summed(rounds)
        advance("settings")
    others = {index: one for index, one in enumerate(policies) if index not in found}
    for policy in others.values():
        check_replayable(policy)
    parts = map_policies(log, list(others.values()), replayed) if others else ()
    for index, of_policy in zip(others, zip(*parts, strict=True), strict=True):
        found[index] = join_sums(of_policy)
        advance("settings")
    return [found[index] for index in range(len(policies))]
