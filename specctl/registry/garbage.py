"""Garbage collection in two phases, with put-if-absent and nothing else.

All of it is one more log, `_gc`, whose entries come in one total order:

    mark   digests that no log and no pin reached
    keep   digests that a publisher found marked, and is about to use
    sweep  marked digests, not kept and old enough, that are being deleted from now on
    swept  the end of that

Whoever is about to use digests (push, promote, rollback, pin) calls `holding.hold` first: it reads
this log, keeps what is marked, and is refused what is being swept. It then has `publish_limit_s`
to make the digests reachable, by a log entry or a pin; `Hold.check` stands right before that.

Why nothing that is used is ever deleted. Say a user held at time r and committed at time c, and a
mark m that names one of its digests was made at time t.

- t before r. The user saw m and appended a keep. A sweep appends its entry by compare-and-swap on
  this same log, so it either read that keep and leaves the digest out, or came first: then the user
  saw it, and was refused until `swept`; what it stores after that is stored anew.
- t after r. A sweep of m begins at least one grace after t (as m says, or as the store dates it
  where that is later), and reads all logs and pins then. As grace >= 2 * publish_limit_s > c - r,
  the commit is among what it reads.

Only the single request between `check` and its answer is not covered by the limit; the grace is
twice the limit for that, and for clocks that differ. Listings of names and pins may be stale by
less than the grace. A sweep that died blocks the next one, and those who need its digests, until
`end_dead_sweep` ends it: two sweeps at once could delete what was stored between them.

Only who began a sweep deletes what it names, as only they have read the logs for it. Entries of
`_gc` are not signed, and whoever may push may write some: a sweep that is found under way may name
what is in use. So ending it deletes nothing; what it left is marked anew, by what is reachable
then. For the same reason a sweep stops where another has ended it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

from specctl.artifacts.facts import utc_seconds
from specctl.errors import ArtifactError, RegistryError, UsageError
from specctl.registry.entries import (
    MAX_DIGESTS,
    Action,
    Author,
    Logged,
    Mark,
    Move,
    Publish,
    Sweep,
    Swept,
)
from specctl.registry.holding import busy
from specctl.registry.layout import log_folder, log_key
from specctl.registry.log import Log, commit
from specctl.registry.names import GARBAGE
from specctl.registry.pins import pinned_digests
from specctl.registry.room import Registry
from specctl.registry.state import GarbageState, NameState

RETENTION_S = 90 * 24 * 3600
"""How long every entry of a log keeps what it names."""
MIN_GRACES = 2
"""Publish limits that a grace must cover."""


def reachable(
    registry: Registry, retention_s: float, *, gone: Collection[str] = frozenset()
) -> set[str]:
    """Digests that must stay, with all that they are made of.

    These are, of every name: what an entry younger than the retention names or moved away from,
    what an alias points to, and the newest version; and what is pinned. A parent is provenance,
    not content: it stays only by a right of its own.

    Args:
        gone: what garbage collection took (`GarbageState.gone`); there nothing is left to keep.

    Raises:
        ArtifactError: E_MISSING for a manifest that is lost: what it is made of is not known, so
            nothing can be called garbage.
        RegistryError: E_NAME, E_LOG for a history that cannot be read, for the same reason.
    """
    oldest = utc_seconds(registry.clock.utc()) - retention_s
    roots = pinned_digests(registry)
    for name in registry.all_names():
        roots |= _roots(registry.log(name), oldest)
    return set[str]().union(*(_kept(registry, digest, gone) for digest in roots))


def _kept(registry: Registry, digest: str, gone: Collection[str]) -> frozenset[str]:
    try:
        return registry.content.parts(digest)
    except ArtifactError as error:
        if error.code != "E_MISSING":
            raise
        if digest in gone:
            return frozenset([digest])
        raise ArtifactError(
            "E_MISSING",
            f"{registry.url}, gc",
            expected=f"the manifest of {digest}, which is in use",
            found="none",
            fix="nothing was collected; run `specctl registry fsck`, push that artifact again",
        ) from None


def _roots(log: Log[NameState], oldest: float) -> set[str]:
    found = {pointer.digest for pointer in log.state.aliases.values()}
    found |= set(list(log.state.versions)[-1:])
    for logged in log.entries:
        action = logged.entry.action
        if isinstance(action, Publish | Move) and utc_seconds(logged.entry.created) >= oldest:
            found.add(action.digest)
            before = action.expected_digest if isinstance(action, Move) else None
            found |= {before} if before else set()
    return found


def mark(registry: Registry, author: Author, *, retention_s: float = RETENTION_S) -> list[str]:
    """Marks what is unreachable and not marked yet, at most `MAX_DIGESTS` a call; returns it."""
    held = set(registry.content.held())  # before the logs: what is newer than them is not listed
    gone = registry.garbage_log().state.gone
    unreachable = held - reachable(registry, retention_s, gone=gone)
    marked: list[str] = []

    def decide(state: GarbageState) -> Action | None:
        marked[:] = sorted(unreachable - state.marked.keys() - set(state.doomed))[:MAX_DIGESTS]
        return Mark(digests=tuple(marked)) if marked else None

    commit(registry.garbage_log(), decide, author, now=registry.clock.utc)
    return marked


def sweep(
    registry: Registry,
    author: Author,
    *,
    grace_s: float,
    retention_s: float = RETENTION_S,
    on_removed: Callable[[], None] = lambda: None,
) -> list[str]:
    """Deletes what was marked at least a grace ago and is unreachable still; returns it.

    Raises:
        UsageError: a grace below `MIN_GRACES` publish limits.
        RegistryError: E_BUSY while another sweep is under way.
    """
    check_grace(registry, grace_s)
    log = registry.garbage_log()
    begun = _begin(registry, log, author, grace_s, retention_s)
    if begun is None:
        return []
    removed = []
    for digest in _doomed(log, begun):
        registry.content.remove(digest)
        removed.append(digest)
        on_removed()
    _end(registry, log, author, begun.entry.generation)
    return removed


def _doomed(log: Log[GarbageState], begun: Logged) -> Iterator[str]:
    """What a sweep names, as long as nobody else has ended it: then the rest may be in use."""
    assert isinstance(begun.entry.action, Sweep)
    for digest in begun.entry.action.digests:
        log.refresh()
        if log.state.sweep_generation != begun.entry.generation:
            return
        yield digest


def end_dead_sweep(registry: Registry, author: Author) -> list[str]:
    """Ends a sweep that died; returns what it named and is still there, for the next mark.

    Only the caller can know that it is dead. Nothing is deleted.

    Raises:
        RegistryError: E_NO_SWEEP.
    """
    log = registry.garbage_log()
    doomed, generation = set(log.state.doomed), log.state.sweep_generation
    if generation is None:
        raise _no_sweep(registry.url)
    _end(registry, log, author, generation)
    return sorted(doomed.intersection(registry.content.held()))


def _end(registry: Registry, log: Log[GarbageState], author: Author, sweep_generation: int) -> None:
    """Appends the end of a sweep, unless another who ended the same one came first."""

    def decide(state: GarbageState) -> Action | None:
        if state.sweep_generation != sweep_generation:
            return None
        return Swept(sweep_generation=sweep_generation)

    commit(log, decide, author, now=registry.clock.utc)


def _begin(
    registry: Registry, log: Log[GarbageState], author: Author, grace_s: float, retention_s: float
) -> Logged | None:
    """Appends the sweep entry, over the newest keeps and over logs read after the grace."""
    latest = utc_seconds(registry.clock.utc()) - grace_s
    stored = {one.key: one.modified_s for one in registry.store.objects(log_folder(GARBAGE))}

    def decide(state: GarbageState) -> Action | None:
        if state.sweep_generation is not None:
            raise busy(registry.url, f"the sweep of generation {state.sweep_generation}")
        aged = {digest for digest, by in state.marked.items() if _marked_s(by, stored) <= latest}
        if not aged:
            return None
        kept = reachable(registry, retention_s, gone=state.gone)
        doomed = sorted(aged - kept)[:MAX_DIGESTS]
        return Sweep(digests=tuple(doomed)) if doomed else None

    return commit(log, decide, author, now=registry.clock.utc)


def _marked_s(logged: Logged, stored: Mapping[str, float]) -> float:
    """When the grace of a mark begins, seconds since the epoch: when it says, or was stored, later.

    Whoever may push may write a mark that says it is old; the store's own time they cannot write.
    """
    key = log_key(GARBAGE, logged.entry.generation)
    return max(utc_seconds(logged.entry.created), stored.get(key, math.inf))


def check_grace(registry: Registry, grace_s: float) -> None:
    """Refuses a grace that a publication could outlast.

    Raises:
        UsageError: less than `MIN_GRACES` publish limits.
    """
    least = MIN_GRACES * registry.marker.publish_limit_s
    if grace_s < least:
        raise UsageError(
            "--grace",
            expected=f"at least {least} s, {MIN_GRACES} times the longest publication here",
            found=f"{grace_s:g} s",
            fix="wait longer: a publication may be using what was marked",
        )


def _no_sweep(url: str) -> RegistryError:
    return RegistryError(
        "E_NO_SWEEP",
        url,
        expected="a sweep that did not end",
        found="none",
        fix="sweep without --resume",
    )
