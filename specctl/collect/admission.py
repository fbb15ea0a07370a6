"""What the decoding thread does where the recorder's queue is full: wait, or drop prompts.

Only whole prompts are dropped, because a trace of a prompt is all or nothing: a round without room
takes all prompts of its batch along, with their rounds before and after it. A dropped prompt is
not committed, so that `--resume` collects it again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from specctl.collect.backlog import Backlog
from specctl.collect.transfer import Event, Lane
from specctl.runtime.observe import RoundRecord

WhenFull = Literal["block", "drop"]
"""A full queue makes decoding wait, or costs the prompts that are being decoded."""


@dataclass
class Losses:
    """What was dropped.

    Attributes:
        num_rounds: rounds of dropped prompts, one a request in a round, as in `rounds`.
        num_prompts: not committed.
    """

    num_rounds: int = 0
    num_prompts: int = 0

    def __add__(self, other: Losses) -> Losses:
        return Losses(self.num_rounds + other.num_rounds, self.num_prompts + other.num_prompts)


class Waiting(NamedTuple):
    """A round in the queue.

    Attributes:
        mark: where the decoding stream has written all of it.
        dropped: prompts among its requests whose rows go nowhere.
    """

    record: RoundRecord
    mark: Event
    dropped: frozenset[str]


class Finished(NamedTuple):
    """All rounds of a prompt were seen."""

    prompt_id: str


class Dropped(NamedTuple):
    """The rows that these prompts have in the queue and behind it go nowhere."""

    prompt_ids: frozenset[str]


Queued = Waiting | Finished | Dropped
"""What the queue holds, in the order in which it happened."""


@dataclass
class Admission:
    """Puts rounds into the queue under a policy. Used by the decoding thread alone.

    Attributes:
        losses: so far, without the rounds that a dropped prompt already had in the queue.
    """

    backlog: Backlog[Queued]
    when_full: WhenFull
    losses: Losses = field(default_factory=Losses)
    _begun: set[str] = field(default_factory=set)  # prompts with rounds in the queue
    _dropped: set[str] = field(default_factory=set)  # and not finished yet

    def offer(self, record: RoundRecord, lane: Lane) -> None:
        """Enqueues a round, waits with it, or drops its prompts."""
        prompts = [request.prompt_id for request in record.requests]
        dropped = frozenset(self._dropped.intersection(prompts))
        if len(dropped) < len(set(prompts)):
            waiting = Waiting(record, lane.mark(), dropped)
            if self.backlog.put(waiting, logits_bytes(record), wait=self.when_full == "block"):
                self._begun.update(prompts)
                self._begun -= dropped
            else:
                dropped = self._drop(prompts)
        self.losses.num_rounds += sum(prompt in dropped for prompt in prompts)

    def finish(self, prompt_id: str) -> None:
        """Lets a prompt be committed, unless it was dropped."""
        if prompt_id in self._dropped:
            self._dropped.remove(prompt_id)
        elif self.when_full == "drop" and prompt_id in self._begun:
            # As many prompts as the queue holds rounds of, so there is a bound without asking.
            self.backlog.tell(Finished(prompt_id))
        elif not self.backlog.put(Finished(prompt_id), wait=self.when_full == "block"):
            self.losses.num_prompts += 1
        self._begun.discard(prompt_id)

    def _drop(self, prompt_ids: Collection[str]) -> frozenset[str]:
        """All of them, those that were dropped before included."""
        self.losses.num_prompts += len(set(prompt_ids) - self._dropped)
        self._dropped.update(prompt_ids)
        begun = frozenset(self._begun.intersection(prompt_ids))
        if begun:
            self.backlog.tell(Dropped(begun))
        self._begun -= begun
        return frozenset(prompt_ids)


def logits_bytes(record: RoundRecord) -> int:
    """Of the device's memory that a waiting round keeps: its logits, all else being small."""
    size = record.target_logits.nbytes
    if record.target_logp_source is not record.target_logits:
        size += record.target_logp_source.nbytes
    return size
