"""Rows on the host, until their prompt is finished and committed, or dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from specctl.collect.admission import Losses
from specctl.collect.frames import Frame, pick


@dataclass
class Held:
    """Rows that wait for their prompt's end.

    Attributes:
        finished: prompts whose rows are complete.
        losses: rows of dropped prompts that were here, and prompts given up here.
    """

    frames: list[Frame] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    losses: Losses = field(default_factory=Losses)
    _given_up: set[str] = field(default_factory=set)

    @property
    def size_bytes(self) -> int:
        return sum(frame.size_bytes for frame in self.frames)

    @property
    def prompt_ids(self) -> set[str]:
        """Of the rows."""
        return {request.prompt_id for frame in self.frames for request in frame.requests}

    def add(self, frame: Frame) -> None:
        """Keeps the rows of a frame but for those of prompts that were given up."""
        lost, kept = split(frame, self._given_up)
        self.losses.num_rounds += len(lost.requests)
        if kept.requests:
            self.frames.append(kept)

    def finish(self, prompt_id: str) -> None:
        """Its rows are complete, unless it was given up."""
        if prompt_id in self._given_up:
            self._given_up.remove(prompt_id)
        else:
            self.finished.add(prompt_id)

    def drop(self, prompt_ids: Collection[str]) -> None:
        """Forgets the rows of prompts, which get no more of them."""
        self.losses.num_rounds += sum(len(frame.requests) for frame in self._take(prompt_ids))
        self.losses.num_prompts -= len(self._given_up.intersection(prompt_ids))  # counted twice
        self._given_up.difference_update(prompt_ids)

    def give_up(self) -> None:
        """Drops the prompt that holds most rows, and the rows that it will still get."""
        rows = Counter(r.prompt_id for frame in self.frames for r in frame.requests)
        [(prompt_id, _)] = rows.most_common(1)
        self.drop([prompt_id])
        self.losses.num_prompts += 1
        self._given_up.add(prompt_id)

    def take_finished(self) -> tuple[set[str], list[Frame]]:
        """The finished prompts and their rows, which are held no longer."""
        finished, self.finished = self.finished, set()
        return finished, self._take(finished)

    def _take(self, prompt_ids: Collection[str]) -> list[Frame]:
        parts = [split(frame, prompt_ids) for frame in self.frames]
        self.frames = [rest for _, rest in parts if rest.requests]
        return [taken for taken, _ in parts if taken.requests]


def split(frame: Frame, prompt_ids: Collection[str]) -> tuple[Frame, Frame]:
    """Rows of these prompts, and of the others."""
    among = [request.prompt_id in prompt_ids for request in frame.requests]
    taken = pick(frame, [row for row, one in enumerate(among) if one])
    return taken, pick(frame, [row for row, one in enumerate(among) if not one])
