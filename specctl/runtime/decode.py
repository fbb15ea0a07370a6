"""The decode loop over slots: admit, round, emit, release.

Requests join and leave slots between rounds. In float32 a request's text depends on its prompt,
its seed and the target alone. In bfloat16 the shape of a batch selects the matrix kernels and with
them the rounding of logits, so a text may change at a near tie.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import torch

from specctl.errors import DeviceMemoryError, InvariantError
from specctl.kernels.dispatch import current
from specctl.policy import Policy
from specctl.runtime.cached_model import CachedModel, SlotCache
from specctl.runtime.capture import GraphCounters, GraphSettings
from specctl.runtime.config import Decisions
from specctl.runtime.drafter import Drafter
from specctl.runtime.requests import (
    Active,
    Completion,
    Observer,
    OnTokens,
    Request,
    RoundTimes,
    Stopwatch,
)
from specctl.runtime.round import Round, RoundSetting
from specctl.runtime.runnable import (
    Faults,
    Runnable,
    TreeRoom,
    check_fits,
    check_lossless,
    rehearse,
    runnable,
    tree_room,
    with_fallback,
)
from specctl.runtime.sampling import Draw, gumbel_draw
from specctl.runtime.state import SlotFacts

Found = TypeVar("Found")


@dataclass
class SharedMemory:
    """Memory of a pair's models that loops use in turns."""

    room: TreeRoom
    cache: weakref.ref[SlotCache] | None = None  # of the target, to identify this memory
    user: weakref.ref[DecodeLoop] | None = None  # the loop that used it last


class DecodeLoop:
    """Decodes requests under one policy.

    Args:
        drafter: None only for plain decoding.
        batch_size: slots, requests decoded together at most.
        max_text_tokens: longest text, prompt and new tokens together.
        eos_ids: tokens that end a text.
        observer: called with every round.
        draw: draws the target's tokens of sampled requests.
        graphs: settings of CUDA graphs; `auto` is `GraphSettings()`, None captures nothing.
        decisions: backend of the policy's learned part, see `specctl.runtime.config.Decisions`.
        memory: shared by loops of equal models, batch size and lengths that take turns; None
            allocates its own.

    Attributes:
        setting: the parts of its rounds that stay when the policy changes.
        new_watch: makes each round's stopwatch; a profile replaces it.
        now: clock of the host, seconds; None is wall time.

    Raises:
        UsageError: this pair or this machine cannot run the policy.
        DeviceMemoryError: the slots do not fit the device.
    """

    def __init__(
        self,
        target: CachedModel,
        drafter: Drafter | None,
        policy: Policy,
        *,
        batch_size: int,
        max_text_tokens: int,
        eos_ids: Collection[int],
        observer: Observer | None = None,
        draw: Draw = gumbel_draw,
        graphs: GraphSettings | Literal["auto"] | None = "auto",
        decisions: Decisions = "auto",
        memory: SharedMemory | None = None,
    ) -> None:
        self.target, self.given_drafter, self.observer = target, drafter, observer
        self.batch_size, self.eos_ids = batch_size, frozenset(eos_ids)
        self.max_text_tokens = max_text_tokens
        self.decisions, self.policy = decisions, policy
        rules = self._rules(policy)
        self.drafter, self.graph_counters = rules.drafter, GraphCounters()
        self._memory = memory or SharedMemory(tree_room(rules.shape))
        check_fits(rules, self.drafter, self._memory.room)
        if graphs == "auto":
            graphs = GraphSettings()
        self.setting = RoundSetting(
            target=target,
            drafter=self.drafter,
            graphs=graphs or GraphSettings(capture="none"),
            num_slots=batch_size,
            eos_ids=self.eos_ids,
            decisions=self.decisions,
            faults=Faults(),
            counters=self.graph_counters,
            draw=draw,
            observed=observer is not None,
        )
        self.round = self._guarded(lambda: self._allocate(rules))
        self.now: Callable[[], float] | None = None
        self.new_watch: Callable[[], Stopwatch] = lambda: Stopwatch(target.device, self.now)
        self._active: list[Active] = []
        self._waiting: deque[Request] = deque()
        self._finished: list[Completion] = []
        self._changed = True  # a request joined, left or moved since the last upload
        self._last_watch: tuple[Stopwatch, list[Active]] | None = None  # times not booked yet

    @property
    def rules(self) -> Runnable:
        """The rules that decide now; a reload replaces them."""
        return self.round.rules

    @property
    def faults(self) -> Faults:
        """Failures of policies, each replaced by a static plan."""
        return self.setting.faults

    def _rules(self, policy: Policy) -> Runnable:
        device, drafter, size = self.target.device, self.given_drafter, self.batch_size
        rules = runnable(policy, drafter, device, size, self.eos_ids, self.decisions)
        return with_fallback(policy, rules, size)

    def _allocate(self, rules: Runnable) -> Round:
        room = self._memory.room
        if not self.owns_memory:
            # One entry more, for the padding of captured passes.
            self.target.allocate(self.batch_size, self.max_text_tokens + room.submitted + 1)
            assert self.target.cache is not None
            self._memory.cache = weakref.ref(self.target.cache)
            if self.given_drafter is not None and room.drafted > 1:
                capacity = self.max_text_tokens + room.drafted
                self.given_drafter.allocate(self.batch_size, capacity, room.width)
        self._take_turn()
        return Round(self.setting, self.policy, rules)

    def _take_turn(self) -> None:
        """Claims the shared memory for this loop."""
        user = None if self._memory.user is None else self._memory.user()
        is_taken = user is not None and user is not self and bool(user._active)
        if not self.owns_memory or is_taken:
            raise InvariantError(
                "the models' memory is used by another decode loop",
                hint="use one loop at a time, or load the pair twice",
            )
        if user is not self:
            self._memory.user = weakref.ref(self)
            self.target.capture(self.drafter.aux_layers if self.drafter else ())

    def _guarded(self, work: Callable[[], Found]) -> Found:
        """Runs work on the device. If memory runs out, it is retried once without graphs."""
        with torch.inference_mode(), current(self.target.device):
            try:
                try:
                    return work()
                except torch.OutOfMemoryError:
                    if not hasattr(self, "round") or not self.round.graphs.keys:
                        raise
                self.round.graphs.clear()
                torch.cuda.empty_cache()
                return work()
            except torch.OutOfMemoryError as error:
                reason = str(error).partition("\n")[0]
                raise DeviceMemoryError(
                    f"{self.target.device} has no memory for {self.batch_size} texts of "
                    f"{self.max_text_tokens} tokens: {reason}",
                    hint="lower the batch size or max_new_tokens, shorten prompts, or give graphs "
                    "less (GraphSettings.limit_bytes); no request was lost",
                ) from error

    @property
    def owns_memory(self) -> bool:
        """Whether the models still hold the memory that was allocated for this loop."""
        cache = self._memory.cache
        return cache is not None and cache() is not None and cache() is self.target.cache

    def serves(self, max_text_tokens: int) -> bool:
        """Whether the idle loop has its memory and room for texts of this length."""
        return self.owns_memory and not self.busy and max_text_tokens <= self.max_text_tokens

    def warm_up(self) -> None:
        """Compiles kernels and captures graphs now instead of while serving."""
        self._guarded(self.round.warm_up)
        self._changed = True

    def reload(self, policy: Policy) -> None:
        """Changes the policy between two rounds; requests continue.

        The new rules are built and rehearsed first, so an error leaves the loop unchanged. The
        memory of the old rules is dropped.

        Raises:
            UsageError: the policy cannot run here, needs more memory than was allocated, or
                failed in its rehearsal.
            LossyPolicyError: the policy is lossy and the loop began lossless.
        """
        check_lossless(self.policy, policy)
        rules = self._rules(policy)
        check_fits(rules, self.drafter, self._memory.room)
        rehearse(rules)
        if not self.round.rewrite(policy, rules):
            with torch.inference_mode(), current(self.target.device):
                self.round = Round(self.setting, policy, rules)
            self.graph_counters.graph_bytes = 0  # of the old graphs
        self.policy, self._changed = policy, True

    @property
    def busy(self) -> bool:
        """Whether a request is waiting, active, or finished but not returned yet."""
        return bool(self._waiting or self._active or self._finished)

    def submit(self, request: Request, *, first: bool = False) -> None:
        """Queues a request, last or first; `PromptTooLongError` without room for a new token."""
        request.check_room(self.max_text_tokens)
        if first:
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)

    def step(self, on_tokens: OnTokens | None = None) -> list[Completion]:
        """Fills free slots, decodes one round and returns the requests that finished.

        Args:
            on_tokens: called with each request's new tokens. If it or an observer raises, the step
                ends; texts stay whole, and the next step returns the finished requests.

        Raises:
            InvariantError: another loop took the models.
            DeviceMemoryError: memory ran out; requests stay queued or active.
        """
        self._take_turn()
        emit = on_tokens or (lambda *_: None)
        self._release()  # requests of a step that ended early
        while self._waiting and len(self._active) < self.batch_size:
            request = self._waiting[0]
            emitted = self._guarded(partial(self._admit, request))
            self._waiting.popleft()
            emit(request, emitted)
            self._release()
        if self._active:
            for active, tokens in self._guarded(self._round):
                emit(active.request, tokens)
            self._release()
        finished, self._finished = self._finished, []
        return finished

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Decodes all requests, yielding each as it finishes."""
        for request in requests:
            self.submit(request)
        while self.busy:
            yield from self.step()

    def _admit(self, request: Request) -> list[int]:
        """Reads the prompt into the next slot and returns the first token."""
        watch, slot = Stopwatch(now=self.now), len(self._active)
        prompt = torch.tensor([request.prompt_ids], device=self.target.device)
        result = self.target.extend(slot, 0, prompt)
        root = self.round.first_token(result.logits, request.sampling)
        if self.drafter is not None:
            self.drafter.prefill(slot, torch.cat([prompt, root[None]], 1), result.features)
        first = root.tolist()
        self.round.join(slot)
        room = self.max_text_tokens - len(request.prompt_ids)
        active = Active(request, min(request.max_new_tokens, room))
        self._active.append(active)
        self._changed = True
        active.emit(first, self.eos_ids)
        watch.lap("other")
        active.metrics.prefill_us = watch.times().other_us
        active.metrics.num_tokens = len(active.output)
        return active.output[:]

    def _round(self) -> list[tuple[Active, list[int]]]:
        """Decodes one round of all active requests and returns the tokens each emitted."""
        watch, actives = self.new_watch(), self._active[:]
        if self._changed:
            lead = 0 if self.drafter is None else self.drafter.lead
            facts = [
                SlotFacts(
                    root_id=active.output[-1],
                    prefix=active.text_tokens,
                    stable=active.text_tokens + lead,
                    position=len(active.output),
                    sampling=active.request.sampling,
                )
                for active in actives
            ]
            self.round.upload(facts, [active.output for active in actives])
            self._changed = False
        found = self.round.run(watch)
        self._book_times()  # of the last round, whose events are over by now
        emitted = [
            (active, active.emit(row.tokens, self.eos_ids))
            for active, row in zip(actives, found.rows, strict=True)
        ]
        watch.lap("other")
        if not all(active.reason for active in actives):
            try:
                self.round.finish(watch)
            except torch.OutOfMemoryError:  # nothing was committed: the round is retried
                for active, tokens in emitted:
                    del active.output[len(active.output) - len(tokens) :]
                    active.reason = ""
                raise
        calls = [active.metrics.calls for active in actives]
        for (active, tokens), row in zip(emitted, found.rows, strict=True):
            active.metrics.add_round(
                verified=row.num_verified,
                accepted=min(row.num_tokens - 1, len(tokens)),
                emitted=len(tokens),
                levels=row.num_levels,
                is_fallback=found.is_static_plan or bool(row.faulty),
            )
        self._last_watch = watch, actives
        if self.observer is not None and found.record is not None:
            numbers = torch.tensor([calls, [len(tokens) for _, tokens in emitted]])
            round_idx, num_emitted = numbers.to(self.target.device, non_blocking=True)
            record = found.record(
                requests=[active.request for active in actives],
                round_idx=round_idx,
                num_emitted=num_emitted,
                times=self._book_times(),
            )
            self.observer.on_round(record)
        return emitted

    def _book_times(self) -> RoundTimes | None:
        """Books the last round's time, once and late: on CUDA it waits for the device's clock."""
        if self._last_watch is None:
            return None
        (watch, actives), self._last_watch = self._last_watch, None
        times = watch.times()
        for active in actives:
            active.metrics.add_times(times, len(actives))
        return times

    def _release(self) -> None:
        """Frees the slots of finished requests; the last active one moves into each gap."""
        for row in reversed(range(len(self._active))):
            active = self._active[row]
            if active.reason:
                self._book_times()
                last = len(self._active) - 1
                if row != last:
                    assert self.target.cache is not None
                    with torch.inference_mode(), current(self.target.device):
                        self.target.cache.move(last, row)
                        if self.drafter is not None:
                            self.drafter.move(last, row)
                        self.round.move(last, row)
                self._changed = True
                self._active[row] = self._active[last]
                self._active.pop()
                text = tuple(active.output)
                done = Completion(active.request, text, active.reason, active.metrics)
                self._finished.append(done)
