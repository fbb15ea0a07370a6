"""One turn of garbage collection, as its user asks for it."""

from __future__ import annotations

from collections.abc import Callable

from specctl.artifacts.facts import utc_seconds
from specctl.errors import UsageError
from specctl.registry.entries import Author
from specctl.registry.garbage import check_grace, end_dead_sweep, mark, sweep
from specctl.registry.room import Registry
from specctl.stores.local import TEMPORARY, LocalStore
from specctl.stores.probing import now_s


def collect(
    registry: Registry,
    author: Author,
    *,
    is_marking: bool,
    is_sweeping: bool,
    grace_s: float,
    retention_s: float,
    resume: bool = False,
    on_removed: Callable[[], None] = lambda: None,
) -> list[tuple[str, list[str]]]:
    """`sweep`, then `mark`, as asked; what each did, as `("swept", digests)`.

    Args:
        resume: end a sweep that died before the new one; see `end_dead_sweep`.

    Raises:
        UsageError: neither was asked for; see also `sweep`.
        StoreError: the store does not tell its time, see `now_s`.
    """
    _check_asked(is_marking=is_marking, is_sweeping=is_sweeping, resume=resume)
    done: list[tuple[str, list[str]]] = []
    if is_sweeping:
        check_grace(registry, grace_s)
    if resume:
        done.append(("left", end_dead_sweep(registry, author)))
    if is_sweeping:
        swept = sweep(
            registry,
            author,
            grace_s=grace_s + _ahead_s(registry),
            retention_s=retention_s,
            on_removed=on_removed,
        )
        done.append(("swept", swept))
        done += _cleared(registry, grace_s)
    if is_marking:
        done.append(("marked", mark(registry, author, retention_s=retention_s)))
    return done


def _ahead_s(registry: Registry) -> float:
    """How far the own clock is ahead of the store's, seconds; a sweep waits for so much longer.

    The mark may be of another collector, whose clock was right, and somebody still publishing.
    """
    stores_s = now_s(registry.store)  # asked first: what that takes may only lengthen the wait
    return max(0.0, utc_seconds(registry.clock.utc()) - stores_s)


def _cleared(registry: Registry, older_than_s: float) -> list[tuple[str, list[str]]]:
    """Removes what writers to a folder left unfinished when they died: no put takes a grace."""
    if not isinstance(registry.store, LocalStore):
        return []
    names = registry.store.clear_temporary(older_than_s)
    return [("cleared", [f"{TEMPORARY}/{name}" for name in names])] if names else []


def _check_asked(*, is_marking: bool, is_sweeping: bool, resume: bool) -> None:
    if not (is_marking or is_sweeping):
        raise UsageError("gc", expected="--mark, --sweep or both", found="neither", fix="say which")
    if resume and not is_sweeping:
        raise UsageError(
            "gc --resume", expected="--sweep beside it", found="none", fix="say --sweep too"
        )
