"""Device time of a round by what it was for, from a trace.

A piece of work is booked by the first of these that applies:

1. its name, for our own kernels: features, decisions and trees are policy, the commit is commit;
2. the call that its launch stands in: a drafter's pass is draft, the target's is verify;
3. the part of a captured round, or else the lap, that its launch falls into. Whatever else is
   launched while a tree grows keeps its books, hence policy; behind verification it is commit.

Kernels inside a graph have one launch for all. The same function was run once without a graph, to
warm up, and was profiled then: a replay has the kernels of that run, in their order. Where their
names differ, 1 and what most of the part is for decide, and the time so booked is told as
`by_graph`.

Of what is policy, `by_op` tells our kernels apart: features, decisions (what a policy adds to a
static tree), trees; and torch's own operators, which are books.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache
from importlib import import_module
from itertools import groupby

from specctl.kernels.dispatch import has_triton

from .trace import CALL, GRAPH, LAP, Mark, Trace, Work

PHASES = ("draft", "policy", "verify", "commit")
OPS = ("features", "deciding", "trees", "books")
OWN_MODULES = {
    "node_features.fused": ("policy", "features"),
    "policy_eval.fused": ("policy", "deciding"),
    "tree_build.fused": ("policy", "trees"),
    "bookkeeping.fused": ("policy", "books"),
    "commit_kv.fused": ("commit", "commit"),
}
LONGEST_ALIGNED = 200
"""Kernels of a part whose names are compared one by one; a longer part is a model's pass."""
_OF_LAP = {
    "draft": "policy",
    "policy": "policy",
    "verify": "verify",
    "commit": "commit",
    "other": "commit",
}


@dataclass
class Split:
    """Means of a round, us of device time.

    Attributes:
        by_phase: by `PHASES`. by_op: the policy's, by `OPS`.
        busy_us: in which anything ran, overlaps counted once.
        by_graph_us: of the phases' time, what only the graph's kind could tell.
        unknown_us: work whose launch the trace does not hold; in no phase.
        num_work, num_launches, num_waits: kernels and copies, calls for them, host waits.
    """

    by_phase: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    by_op: dict[str, float] = field(default_factory=lambda: dict.fromkeys(OPS, 0.0))
    busy_us: float = 0.0
    by_graph_us: float = 0.0
    unknown_us: float = 0.0
    num_work: float = 0.0
    num_launches: float = 0.0
    num_waits: float = 0.0


class Bookkeeper:
    """Books traces; what it learned of a graph's parts in one serves it in the next."""

    def __init__(self) -> None:
        self._learned: dict[str, list[tuple[str, str]]] = {}

    def learn(self, trace: Trace) -> None:
        """Remembers the kernels of every part of a round that ran without its graph."""
        marks = _Marks(trace)
        parts: dict[str, list[tuple[str, str]]] = {}
        for work in _in_launch_order(trace):
            key = marks.graph(work)
            if key is not None and not work.is_replay and work.is_kernel:
                parts.setdefault(key, []).append((work.name, marks.phase(work)))
        self._learned |= {key: part for key, part in parts.items() if key not in self._learned}

    def split(self, trace: Trace, num_rounds: int) -> Split:
        """The work of so many rounds."""
        marks, found = _Marks(trace), Split()
        for launch, group in groupby(_in_launch_order(trace), key=lambda work: work.correlation):
            works = list(group)
            found.num_launches += launch >= 0
            for work, phase, is_guess in self._booked(works, marks):
                if phase is None:
                    found.unknown_us += work.us
                    continue
                found.by_phase[phase] += work.us
                if phase == "policy":
                    found.by_op[op_of(work.name)] += work.us
                found.by_graph_us += work.us if is_guess else 0.0
        found.busy_us = busy_us(trace.work)
        found.num_work, found.num_waits = float(len(trace.work)), float(trace.num_waits)
        return _per_round(found, num_rounds)

    def _booked(
        self, works: Sequence[Work], marks: _Marks
    ) -> Iterable[tuple[Work, str | None, bool]]:
        """The work of one launch: each piece, its phase, whether only the graph told it."""
        first = works[0]
        if first.launched_us is None:
            return [(work, None, False) for work in works]
        if not first.is_replay:
            return [(work, marks.phase(work), False) for work in works]
        key, names = marks.graph(first) or "", [work.name for work in works if work.is_kernel]
        learned = iter(self._phases_of(key, names))
        booked = []
        for work in works:
            own = name_phase(work.name)
            told = next(learned) if work.is_kernel else None
            booked.append((work, own or told or kind_phase(key), not (own or told)))
        return booked

    def _phases_of(self, key: str, names: list[str]) -> list[str | None]:
        """What was learned of a part's kernels; None for one that was not there."""
        learned = self._learned.get(key, [])
        known, found = [name for name, _ in learned], [None for _ in names]
        phases: list[str | None] = [phase for _, phase in learned]
        if known == names:
            return phases
        if max(len(known), len(names)) > LONGEST_ALIGNED:
            return found
        for here, there, size in SequenceMatcher(None, names, known, False).get_matching_blocks():
            found[here : here + size] = phases[there : there + size]
        return found


class _Marks:
    """Finds the marks around a launch."""

    def __init__(self, trace: Trace) -> None:
        self.laps = trace.under(LAP)
        self.lap_starts = [lap.start_us for lap in self.laps]
        self.calls, self.graphs = _outermost(trace.under(CALL)), _outermost(trace.under(GRAPH))

    def phase(self, work: Work) -> str:
        """Of work that was launched by itself."""
        assert work.launched_us is not None
        at_us, own = work.launched_us, name_phase(work.name)
        return own or _around(self.calls, at_us) or self._of_part(at_us) or self._of_lap(at_us)

    def graph(self, work: Work) -> str | None:
        """The key of the part of a round that it was launched in."""
        return None if work.launched_us is None else _around(self.graphs, work.launched_us)

    def _of_part(self, launched_us: float) -> str | None:
        """Beside the models' passes, growing is keeping books."""
        key = _around(self.graphs, launched_us)
        kind = None if key is None else kind_phase(key)
        return "policy" if kind == "draft" else kind

    def _of_lap(self, launched_us: float) -> str:
        """A lap closes what came before it; behind the last one a round is being booked."""
        place = bisect_left(self.lap_starts, launched_us)
        return _OF_LAP[self.laps[place].name] if place < len(self.laps) else "commit"


def name_phase(name: str) -> str | None:
    """What one of our own kernels is for."""
    return own_kernels().get(name, (None, ""))[0]


def op_of(name: str) -> str:
    """Which of our ops a piece of the policy's work is."""
    return own_kernels().get(name, ("", "books"))[1]


@cache
def own_kernels() -> dict[str, tuple[str, str]]:
    """Phase and op of our Triton kernels, those that say by themselves what they are for."""
    if not has_triton():
        return {}
    from triton.runtime import JITFunction

    return {
        name: told
        for module, told in OWN_MODULES.items()
        for name, value in vars(import_module(f"specctl.kernels.{module}")).items()
        if isinstance(value, JITFunction)
    }


def kind_phase(key: str) -> str:
    """What most of a part of a round is for, by the words of its key."""
    for word, phase in (("ask", "verify"), ("commit", "commit"), ("select", "policy")):
        if f"'{word}'" in key:
            return phase
    return "draft"


def busy_us(work: Iterable[Work]) -> float:
    """Time in which anything ran; work in order of its start."""
    total, until = 0.0, float("-inf")
    for piece in work:
        total += max(0.0, piece.end_us - max(piece.start_us, until))
        until = max(until, piece.end_us)
    return total


def _in_launch_order(trace: Trace) -> list[Work]:
    """One launch after the other, the work of each in the device's order."""
    return sorted(trace.work, key=lambda work: (work.correlation, work.start_us))


def _outermost(marks: Sequence[Mark]) -> list[Mark]:
    """Marks that stand in no other; given in order of their start."""
    found: list[Mark] = []
    for mark in marks:
        if not found or mark.start_us >= found[-1].end_us:
            found.append(mark)
    return found


def _around(marks: Sequence[Mark], at_us: float) -> str | None:
    """The one of some disjoint marks that a moment falls into."""
    place = bisect_right(marks, at_us, key=lambda mark: mark.start_us) - 1
    return marks[place].name if place >= 0 and at_us <= marks[place].end_us else None


def _per_round(total: Split, num_rounds: int) -> Split:
    return Split(
        **{
            name: {key: us / num_rounds for key, us in value.items()}
            if isinstance(value, dict)
            else value / num_rounds
            for name, value in vars(total).items()
        }
    )
