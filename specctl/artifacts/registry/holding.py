"""The right to make digests reachable while garbage collection may be at work (`garbage`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specctl.artifacts.registry.entries import MAX_DIGESTS, Action, Author, Keep
from specctl.artifacts.registry.log import commit
from specctl.artifacts.registry.room import Registry
from specctl.artifacts.registry.state import GarbageState
from specctl.errors import RegistryError


@dataclass(frozen=True)
class Hold:
    """The right to make digests reachable, until the publish limit has passed."""

    registry: Registry
    began_s: float

    def check(self) -> None:
        """Stands right before a commit.

        Raises:
            RegistryError: E_TIMEOUT.
        """
        limit_s = self.registry.marker.publish_limit_s
        spent_s = self.registry.clock.elapsed_s() - self.began_s
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
    """
    began_s, wanted = registry.clock.elapsed_s(), frozenset(digests)

    def decide(state: GarbageState) -> Action | None:
        being_swept = wanted & set(state.doomed)
        if being_swept:
            raise busy(registry, f"{len(being_swept)} of its digests being deleted")
        known = sorted(wanted & (state.marked.keys() | state.collected))
        return Keep(digests=tuple(known[:MAX_DIGESTS])) if known else None

    commit(registry.garbage_log(), decide, author, now=registry.clock.utc)
    return Hold(registry, began_s)


def busy(registry: Registry, found: str) -> RegistryError:
    """E_BUSY: something that must wait for a sweep."""
    return RegistryError(
        "E_BUSY",
        registry.url,
        expected="no sweep under way",
        found=found,
        fix="wait until it ends; if it died, `specctl registry gc --sweep --resume`",
    )
