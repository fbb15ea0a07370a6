"""Several sets of one pair as one new set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specctl.collect.commits import Commit
from specctl.collect.files import segment_path
from specctl.collect.foreign import files_of, inspect_files
from specctl.collect.header import TraceHeader, read_header
from specctl.collect.logs import CommitLog
from specctl.collect.opening import open_log
from specctl.collect.places import Place, open_place, split_reference
from specctl.collect.same_run import merged_header
from specctl.collect.store import TraceWriter
from specctl.collect.tables import Comparison, read_tables
from specctl.collect.texts import committed_texts
from specctl.collect.words import count


@dataclass
class Merge:
    """What a merge did.

    Attributes:
        num_repeats: prompts that another source, or an earlier sitting, had with equal rows.
    """

    out: str
    num_prompts: int = 0
    num_repeats: int = 0
    owners: dict[str, tuple[Place, Commit]] = field(default_factory=dict, repr=False)
    comparison: Comparison = field(default_factory=Comparison, repr=False)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("out", "num_prompts", "num_repeats")}

    def render(self) -> str:
        """For a person."""
        left_out = f", {count(self.num_repeats, 'equal repeat')} left out"
        written = f"{count(self.num_prompts, 'prompt')} written to {self.out}"
        return written + (left_out if self.num_repeats else "")


def merge(
    sources: Sequence[str],
    out: str,
    *,
    resume: bool = False,
    on_prompts: Callable[[int], None] | None = None,
) -> Merge:
    """Writes the rows of sets into a new one; prompts that several hold must have equal rows.

    Sets of several machines are one of them all: the header of the new one names each.

    Args:
        sources: folders or URLs, with `@sha256:<hex>` for snapshots.
        resume: go on with a merge that was interrupted.

    Raises:
        TraceMismatchError: another pair, sampling, treatment of tokens or configuration.
        TraceCorruptError: damage, or different rows of one prompt, naming both sets.
        OutputError, StoreError: see `TraceWriter.open`.
    """
    header, logs = open_sources(sources)
    done = Merge(out)
    with TraceWriter.open(out, header, resume=resume) as writer:
        _begin_with(done, writer)
        for log in logs:
            for commit in log.commits:
                repeats = _known(done, log.place, commit)
                prompts = [p for p in commit.prompt_ids if p not in repeats]
                if prompts:
                    writer.learn(committed_texts([commit]))
                    writer.commit(prompts, read_tables(log.place, commit, without=repeats))
                done.num_prompts += len(prompts)
                done.num_repeats += len(repeats)
                if on_prompts is not None:
                    on_prompts(len(commit.prompt_ids))
    return done


def open_sources(sources: Sequence[str]) -> tuple[TraceHeader, list[CommitLog]]:
    """The header of the merged set, and the logs to read, all of whose files were inspected."""
    places = [open_place(split_reference(name)[0]) for name in sources]
    header = merged_header(places, [read_header(place) for place in places])
    logs = [open_log(name, allow_repeats=True) for name in sources]
    for log in logs:
        if log.place.root is not None:  # what came from a bucket was inspected on its way here
            paths = {s.key: segment_path(log.place, s) for s in log.segments}
            inspect_files(f for commit in log.commits for f in files_of(log.place, commit, paths))
    return header, logs


def _begin_with(done: Merge, writer: TraceWriter) -> None:
    """What an earlier sitting wrote counts like a source that came first: rows must be equal."""
    if writer.committed:
        log = open_log(done.out)
        done.owners |= {p: (log.place, commit) for commit in log.commits for p in commit.prompt_ids}


def _known(done: Merge, place: Place, commit: Commit) -> set[str]:
    """Prompts of a commit that an earlier one gave, after checking that their rows are equal."""
    repeats: dict[str, list[str]] = {}
    for prompt in commit.prompt_ids:
        _, first = done.owners.setdefault(prompt, (place, commit))
        if first is not commit:
            repeats.setdefault(first.digest, []).append(prompt)
    for prompts in repeats.values():
        done.comparison.check(prompts, done.owners[prompts[0]], (place, commit))
    return {prompt for prompts in repeats.values() for prompt in prompts}
