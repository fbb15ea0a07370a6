"""The decode loop over slots: admit, round, emit, release.

Requests join an open slot and leave it between rounds; the text of a request depends on its
prompt, its seed and the target alone.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

import torch

from specctl.features import recent_tokens
from specctl.policy import Policy
from specctl.runtime.active import Active, Completion, OnTokens, check_room, completion, new_active
from specctl.runtime.booking import book, counts_of, record_of
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.decisions import Decisions, check_decisions
from specctl.runtime.device_rounds import Seat, device_rounds_of
from specctl.runtime.drafter import Drafter
from specctl.runtime.graphs import GraphCounters, GraphSettings, on_device
from specctl.runtime.guard import PolicyFault, guarded
from specctl.runtime.hardware import current
from specctl.runtime.memory import fresh_memories, memory_taken
from specctl.runtime.metrics import Stopwatch
from specctl.runtime.observe import Observer, Request
from specctl.runtime.reload import check_fits, check_law, rehearse, tree_room
from specctl.runtime.round import BatchState, Round, Verdict
from specctl.runtime.runnable import Runnable, runnable
from specctl.runtime.sampling import Draw, race


class DecodeLoop:
    """Decodes requests under one policy.

    Args:
        target: the model whose text is emitted.
        drafter: required unless the policy drafts nothing.
        policy: what to draft, verify and accept.
        batch_size: slots, requests decoded together at most.
        max_text_tokens: longest text, prompt and new tokens together.
        eos_ids: tokens that end a text.
        observer: sees every round.
        draw_by: how sampled requests draw the target's tokens.
        deadline_us: wall time that the policy's decisions of one round may take before a static
            plan takes the round over; None for any. The policy then decides on the host.
        graphs: keeps rounds on the device, where the policy allows it (`runtime.graphs`); `auto`
            on CUDA devices.
        decisions: what computes what the policy learned (`runtime.decisions`).

    Attributes:
        graph_counters: what became of the rounds' graphs.
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
        draw_by: Draw = race,
        deadline_us: float | None = None,
        graphs: GraphSettings | Literal["auto"] | None = "auto",
        decisions: Decisions = "auto",
    ) -> None:
        self.decisions = check_decisions(decisions)
        self.graphs = on_device(target.device) if graphs == "auto" else graphs
        self.target, self.given_drafter, self.observer = target, drafter, observer
        self.batch_size, self.eos_ids = batch_size, frozenset(eos_ids)
        self.max_text_tokens, self.deadline_us = max_text_tokens, deadline_us
        self._active: list[Active] = []
        self._waiting: deque[Request] = deque()
        self._finished: list[Completion] = []
        self.policy, rules = policy, self._rules(policy)
        self.drafter = rules.drafter
        self._room = tree_room(rules.shape)
        self._allocate(batch_size, max_text_tokens)
        self.round = Round(target, rules, draw_by)
        self._memories = fresh_memories(rules, self.batch_size, self.target.device)
        self.graph_counters = GraphCounters()
        self._seat = self._new_seat()
        self.device_rounds = device_rounds_of(self._seat, policy, rules)

    @property
    def rules(self) -> Runnable:
        """What decides; `reload` replaces it."""
        return self.round.rules

    def _rules(self, policy: Policy) -> Runnable:
        device, drafter = self.target.device, self.given_drafter
        size = self.batch_size
        rules = runnable(policy, drafter, device, size, self.eos_ids, self.decisions)
        return guarded(policy, rules, size, self.deadline_us)

    def _new_seat(self) -> Seat:
        return Seat(
            target=self.target,
            drafter=self.drafter,
            graphs=self.graphs,
            num_slots=self.batch_size,
            eos_ids=self.eos_ids,
            observer=self.observer,
            draw_by=self.round.draw_by,
            decisions=self.decisions,
            is_timed=self.deadline_us is not None,
            faults=self.round.faults,
            counters=self.graph_counters,
        )

    def _allocate(self, num_slots: int, max_text_tokens: int) -> None:
        self.target.capture(self.drafter.aux_layers if self.drafter else ())
        spare = int(self.graphs is not None)  # what is no token of a captured pass is written there
        self.target.allocate(num_slots, max_text_tokens + self._room.submitted + spare)
        assert self.target.cache is not None
        self._memory = weakref.ref(self.target.cache)
        if self.drafter is not None:
            self.drafter.allocate(num_slots, max_text_tokens + self._room.drafted)

    @property
    def owns_memory(self) -> bool:
        """Whether the models still hold what was allocated for this loop."""
        return self._memory() is self.target.cache

    def serves(self, max_text_tokens: int) -> bool:
        """Whether the loop is free for texts of that length, its graphs still good."""
        return self.owns_memory and not self.busy and max_text_tokens <= self.max_text_tokens

    def reload(self, policy: Policy) -> None:
        """Decides by another policy from the next round on; requests go on where they are.

        Between rounds only. Everything is built and rehearsed beside the old policy first, so a
        refusal leaves the loop as it was. What the old rules remembered of requests is gone.

        Raises:
            UsageError: a policy that cannot run here, trees beyond the memory that was
                allocated, or a rehearsal that failed.
            LossyPolicyError: a lossy policy in a loop that began lossless.
        """
        check_law(self.policy, policy)
        rules = self._rules(policy)
        check_fits(rules, self.drafter, self._room)
        rehearse(rules)
        memories = fresh_memories(rules, self.batch_size, self.target.device)
        rounds = self.device_rounds
        if rounds is None or not rounds.reload(policy, rules):
            rounds = device_rounds_of(self._seat, policy, rules)
            self.graph_counters.graph_bytes = 0  # the old graphs go
        # From here on nothing can fail: all of the new policy is in place, or none of it.
        self.policy, self.round.rules = policy, rules
        self._memories, self.device_rounds = memories, rounds

    @property
    def busy(self) -> bool:
        """Whether a request waits, is being decoded, or is finished and not given yet."""
        return bool(self._waiting or self._active or self._finished)

    def submit(self, request: Request, *, first: bool = False) -> None:
        """Queues a request, behind the waiting ones or before them.

        Raises:
            PromptTooLongError: no room for one new token.
        """
        check_room(request, self.max_text_tokens)
        if first:
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)

    def step(self, on_tokens: OnTokens | None = None) -> list[Completion]:
        """Fills free slots, then decodes one round; the requests that finished.

        Args:
            on_tokens: called with each request's new tokens. What it raises, or an observer, ends
                the step; no text suffers, and what finished is given by the next step.

        Raises:
            InvariantError: another loop took the models.
        """
        if not self.owns_memory:
            raise memory_taken()
        emit = on_tokens or (lambda *_: None)
        with torch.inference_mode(), current(self.target.device):
            self._release()  # what was left by a step that ended early
            while self._waiting and len(self._active) < self.batch_size:
                request = self._waiting.popleft()
                emit(request, self._admit(request))
                self._release()
            if self._active:
                for active, tokens in self._round():
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
        """Reads the prompt into the next slot; the first token."""
        watch, slot = Stopwatch(), len(self._active)
        active = new_active(request, self.max_text_tokens)
        prompt = torch.tensor([request.prompt_ids], device=self.target.device)
        result = self.target.extend(slot, 0, prompt)
        first = torch.zeros_like(prompt[:, :1])
        _, root = self.round.draw_target(result.logits, [request.sampling], first)
        if self.drafter is not None:
            self.drafter.prefill(slot, torch.cat([prompt, root], 1), result.features)
        for memory in self._memories:
            memory.join(slot)
        self._active.append(active)
        if self.device_rounds is not None:
            self.device_rounds.changed = True
        active.emit(root[0].tolist(), self.eos_ids)
        watch.lap("other")
        active.metrics.prefill_us = watch.times().other_us
        active.metrics.num_tokens = len(active.output)
        return active.output[:]

    def _round(self) -> list[tuple[Active, list[int]]]:
        """One round of all active requests; what each of them emitted."""
        if self.device_rounds is not None:
            return self.device_rounds.play(self._active)
        self.graph_counters.eager_rounds += self.graphs is not None
        watch, state = Stopwatch(), self._state()
        verdict = self.round.verify(state, watch)
        tokens, counts = self.round.commit(state, verdict)
        emitted = [
            (active, active.emit(row[:count], self.eos_ids))
            for active, row, count in zip(self._active, tokens.tolist(), counts, strict=True)
        ]
        watch.lap("other")
        if not all(active.reason for active in self._active):
            self.round.extend_drafter(verdict, tokens, counts)
        watch.lap("draft")
        self._observe(verdict)
        sizes, times = [len(tokens) for _, tokens in emitted], watch.times()
        if self.observer is not None:
            self.observer.on_round(record_of(self._active, state, verdict, sizes, times))
        is_fallback = verdict.rules is not self.rules
        book(self._active, counts_of(verdict, sizes, is_fallback=is_fallback), times)
        return emitted

    def _observe(self, verdict: Verdict) -> None:
        """Lets the rules note what they want to know of these requests in the next round."""
        num_rows = len(self._active)
        rules = (self.rules.shape, self.rules.acceptance)
        for rule, memory in zip(rules, self._memories, strict=True):
            if rule.memory_size:
                try:
                    memory.write(rule.observe(memory.read(num_rows), verdict.outcome))
                except PolicyFault as fault:  # then it knows what it knew
                    self.round.faults.note(fault)

    def _state(self) -> BatchState:
        device, actives = self.target.device, self._active
        shape_memory, acceptance_memory = (m.read(len(actives)) for m in self._memories)
        return BatchState(
            root_ids=torch.tensor([a.output[-1] for a in actives], device=device),
            offsets=[a.text_tokens for a in actives],
            positions=torch.tensor([len(a.output) for a in actives], device=device),
            samplings=[a.request.sampling for a in actives],
            shape_memory=shape_memory,
            acceptance_memory=acceptance_memory,
            recent=recent_tokens([a.output for a in actives], device)
            if self.rules.shape.needs_text
            else None,
        )

    def _release(self) -> None:
        """Frees the slots of finished requests; the last active one moves into each hole."""
        for row in reversed(range(len(self._active))):
            active = self._active[row]
            if active.reason:
                last = len(self._active) - 1
                self._move(last, row)
                if self.device_rounds is not None:
                    self.device_rounds.changed = True
                self._active[row] = self._active[last]
                self._active.pop()
                self._finished.append(completion(active))

    def _move(self, source: int, target: int) -> None:
        assert self.target.cache is not None
        self.target.cache.move(source, target)
        if self.drafter is not None and source != target:
            self.drafter.move(source, target)
        for memory in self._memories:
            memory.move(source, target)
