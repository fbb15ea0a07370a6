"""The right to make digests reachable while garbage collection may be at work (`garbage`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from specctl.artifacts.facts import utc_seconds
from specctl.errors import RegistryError
from specctl.registry.entries import MAX_DIGESTS, Action, Author, Keep
from specctl.registry.log import commit
from specctl.registry.room import Registry
from specctl.registry.state import GarbageState


@dataclass(frozen=True)
class Hold:
    """The right to make digests reachable, until the publish limit has passed."""

    registry: Registry
    began_s: float
    began_utc: str

    @classmethod
    def now(cls, registry: Registry) -> Hold:
        """One that begins now."""
        return cls(registry, registry.clock.elapsed_s(), registry.clock.utc())

    def check(self) -> None:
        """Stands right before a commit.

        Two clocks are asked, and the one that went further counts: the first may have stood still
        while the machine was suspended, the second may have been set back.

        Raises:
            RegistryError: E_TIMEOUT.
        """
        clock, limit_s = self.registry.clock, self.registry.marker.publish_limit_s
        by_utc_s = utc_seconds(clock.utc()) - utc_seconds(self.began_utc)
        spent_s = max(clock.elapsed_s() - self.began_s, by_utc_s)
        if spent_s > limit_s:
            raise RegistryError(
                "E_TIMEOUT",
                f"publication to {self.registry.url}",
                expected=f"to be done within {limit_s} s, as garbage collection counts on that",
                found=f"{spent_s:.0f} s",
                fix="do it again; what was transferred is kept",
            )


def hold(registry: Registry, digests: Iterable[str], author: Author) -> Hold:
    """Protects digests from a sweep that has not begun; see the head of `garbage`.

    Raises:
        RegistryError: E_BUSY while one of them is being swept.
        StoreError: a store that commits could be lost in.
    """
    registry.check_store()  # before anything is transferred
    held = Hold.now(registry)
    _keep(registry, frozenset(digests), author, lambda state: state.marked.keys())
    return held


def tell_stored(registry: Registry, digests: Iterable[str], author: Author) -> None:
    """Says of what garbage collection took once that it is there again; stands behind storing it.

    Said any earlier, what a publisher who died has not stored would count as lost.

    Raises:
        RegistryError: E_BUSY while one of them is being swept.
    """
    _keep(registry, frozenset(digests), author, lambda state: state.collected)


def _keep(
    registry: Registry,
    wanted: frozenset[str],
    author: Author,
    known: Callable[[GarbageState], Collection[str]],
) -> None:
    """Appends keeps for those of the wanted digests that the log knows as such."""

    def decide(state: GarbageState) -> Action | None:
        being_swept = wanted & set(state.doomed)
        if being_swept:
            raise busy(registry.url, f"{len(being_swept)} of its digests being deleted")
        kept = sorted(wanted.intersection(known(state)))
        return Keep(digests=tuple(kept[:MAX_DIGESTS])) if kept else None

    log = registry.garbage_log()
    while commit(log, decide, author, now=registry.clock.utc) is not None:
        pass  # one entry holds `MAX_DIGESTS`


def busy(url: str, found: str) -> RegistryError:
    """E_BUSY: something that must wait for a sweep."""
    return RegistryError(
        "E_BUSY",
        url,
        expected="no sweep under way",
        found=found,
        fix="wait until it ends; if it died, `specctl registry gc --sweep --resume`",
    )
