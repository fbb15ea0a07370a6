"""The plugin's session in a model runner: runs a policy while vLLM drafts, and records steps.

    step t    begin_step        another policy takes over, if its source has a new one
              before_verdict    the target's logits are there: traces read them
              after_verdict     tokens are drawn: rules learn
              begin_draft, take_level ..., end_draft    rules end drafting and choose what to verify

Failures are caught here: serving goes on as vLLM was set up.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specctl.artifacts.compatibility import Expectation
from specctl.engines.chains import ChainDraft, ChainPolicy, DraftedTokens
from specctl.engines.settings import PluginSettings
from specctl.engines.vllm_tracing import Tracer, end_of_text, pair_of
from specctl.features import recent_tokens
from specctl.policy import Chain, Policy, policy_digest
from specctl.runtime.follow import Follower, source_of
from specctl.runtime.references import is_artifact, is_meant_as_artifact
from specctl.runtime.runnable import Faults
from specctl.runtime.words import resolve_policy

log = logging.getLogger("specctl.engines")


class Session:
    """The plugin's session in one model runner."""

    def __init__(self, settings: PluginSettings, runner: Any, version: str) -> None:
        config = runner.vllm_config
        self._runner, self._device = runner, runner.device
        self._most_levels: int = config.speculative_config.num_speculative_tokens
        own = Policy(shape=Chain(num_draft_tokens=self._most_levels))
        self._own = own, policy_digest(own)
        self.policy: Policy | None = None  # as it was given
        self.rules: ChainPolicy | None = None  # of the policy; None: the engine drafts as set up
        self.tracers: list[Tracer] = []  # of the log and of its dense sample
        self.faults, self.num_steps = Faults(), 0  # faults of rules, each handed to the engine
        self.kept: dict[str, int] = {}  # draft tokens to verify, by vLLM's request id; absent: all
        self.levels: list[Tensor] = []  # of the current drafting, `[B]` tokens each
        self.wants_more = True  # the rules want another level for some request
        self._logits = torch.empty(0)
        self._level_logits: list[Tensor] = []  # of each level, if a trace needs them
        self.follower: Follower | None = None  # of the policy's source; None for words
        self._draft: ChainDraft | None = None  # under rules, until it is verified
        self._drafting: list[str] = []  # request ids
        self._unverified: list[int] = []  # rows of `_drafting` that a dense log records
        self._sampled = torch.empty(0)
        self._in_step: list[str] = []  # request ids
        self._num_scheduled: dict[str, int] = {}
        self._closed = False
        self._began = self._draft_began = self._ended = time.perf_counter()
        self._verify_us = self._draft_us = 0.0
        pair, domain = pair_of(config, self._device)
        if settings.policy is not None:
            expect = Expectation(pair, domain, settings.allow_mismatch)
            self._begin_policy(settings.policy, expect)
        trace = settings.trace
        for one in (trace, trace and trace.sample):
            if one is not None:
                self.tracers.append(Tracer(one, runner, pair, domain, self._own, version))
                what = "every position, without verification" if one.dense else "rounds"
                log.info("specctl: log of %s, into %s", what, one.out)
        atexit.register(self.close)

    def _begin_policy(self, spec: str, expect: Expectation) -> None:
        """Loads the policy; follows an artifact. Raises if the policy cannot work here."""
        if not (is_artifact(spec) or is_meant_as_artifact(spec)):
            self.reload(resolve_policy(spec, expect, allow_lossy=True).policy)  # checks acceptance
            return
        follower = Follower(source_of(spec, expect), self)
        follower.look()
        follower.poll()
        if follower.last_error is not None:
            raise follower.last_error
        self.follower = follower.__enter__()

    def reload(self, policy: Policy) -> None:
        """Puts another policy in charge from the next drafting on; called between steps.

        Raises:
            SpecctlError: a policy that cannot work here; the old one stays.
        """
        batch_size = self._runner.scheduler_config.max_num_seqs
        self.rules = ChainPolicy(
            policy, max_levels=self._most_levels, batch_size=batch_size, device=self._device
        )
        self.policy, self._draft = policy, None
        log.info("specctl: policy %s %s", self.rules.policy.name, self.rules.digest)

    @contextmanager
    def _failing_open(self) -> Iterator[None]:
        """Catches and counts a failure of the policy; this drafting goes on as the engine was set
        up."""
        before = self.faults.total
        with self.faults.caught():
            yield
        if self.faults.total > before:
            self._draft, self.wants_more = None, True
            self.kept.clear()

    def _tracing(self, act: Callable[[Tracer], None]) -> None:
        """Calls each tracer; a failure ends its tracing and nothing else."""
        for tracer in self.tracers:
            try:
                act(tracer)
            except Exception as error:
                tracer.recorder.end(f"{type(error).__name__}: {error}")

    # ----------------------------------------------------------------- steps

    def begin_step(self, scheduler_output: Any) -> None:
        """Starts a step: completes the previous one, and lets another policy take over."""
        now, finished = time.perf_counter(), scheduler_output.finished_req_ids
        goes_on = any(one in scheduler_output.num_scheduled_tokens for one in self._in_step)
        self._end_trace(now if goes_on else self._ended, finished)
        if self.rules is not None:
            self.rules.forget(list(finished))
        if self.follower is not None:
            self.follower.poll()
        if self.rules is not None:
            self.rules.spent_us = 0.0
        self._began, self._draft_us, self._in_step, self.levels = now, 0.0, [], []
        self._num_scheduled = scheduler_output.num_scheduled_tokens
        # Until the drafter runs: near the longest text that it can read it does not, and vLLM takes
        # zeros as the drafts of all requests.
        self.kept = dict.fromkeys(self._num_scheduled, 0)
        self.num_steps += 1

    def before_verdict(self, logits: Tensor, metadata: Any) -> None:
        """Takes the target's logits, before vLLM changes them."""
        self._in_step = list(self._runner.input_batch.req_ids)
        self._tracing(lambda one: one.before_verdict(logits, metadata, self._num_scheduled))

    def after_verdict(self, sampled: Tensor, metadata: Any) -> None:
        """Takes the tokens of verification, `[B, S]`; rules learn from them."""
        self._verify_us = 1e6 * (time.perf_counter() - self._began)
        self._sampled = sampled
        self._tracing(lambda one: one.after_verdict(sampled))
        draft, self._draft = self._draft, None
        if self.rules is None or not self.rules.learns or draft is None or metadata is None:
            return
        with self._failing_open():
            accepted = ((sampled >= 0).sum(1) - 1).tolist()
            at = {name: row for row, name in enumerate(draft.request_ids)}
            rows = zip(self._in_step, metadata.num_draft_tokens, accepted, strict=True)
            learnt = [(at[name], count) for name, num, count in rows if num and name in at]
            self.rules.observe(draft, [row for row, _ in learnt], [count for _, count in learnt])

    def end_step(self) -> None:
        """Marks the end of the runner's work; the rest of the step is the scheduler's."""
        self._ended = time.perf_counter()

    def close(self) -> None:
        """Writes the last rows and ends the threads."""
        atexit.unregister(self.close)
        if self._closed:
            return
        self._closed = True
        if self.follower is not None:
            self.follower.__exit__()
        notes = [f"{self.num_steps} steps", f"{self.faults.total} policy faults"]
        self._end_trace(self._ended, set())
        for tracer in self.tracers:
            tracer.recorder.close()
            counts = {**tracer.skipped, **tracer.recorder.lost}
            notes += [f"{count} {what}" for what, count in counts.items() if count]
        log.info("specctl: %s", ", ".join(notes))

    def _end_trace(self, end: float, finished: set[str]) -> None:
        policy_us = 0.0 if self.rules is None else self.rules.spent_us
        total_us = 1e6 * (end - self._began)
        times = {
            "draft_us": self._draft_us,
            "verify_us": self._verify_us,
            "policy_us": policy_us,
            "other_us": max(0.0, total_us - self._draft_us - self._verify_us - policy_us),
            "step_idx": self.num_steps,
            "step_levels": len(self.levels),
        }
        self._tracing(lambda one: one.end_step(times, finished))

    # ----------------------------------------------------------------- drafting

    def keep_logits(self, model: Any) -> None:
        """Wraps the drafter to keep the logits that it computes."""
        if getattr(model, "_specctl_kept", False):
            return
        compute = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Tensor:
            self._logits = compute(*args, **kwargs)
            return self._logits

        model.compute_logits, model._specctl_kept = compute_logits, True

    def begin_draft(self, num_levels: int, root_ids: Tensor) -> None:
        """Starts a drafting after `root_ids` `[B]` int64, the last emitted tokens."""
        self._draft_began = time.perf_counter()
        self._drafting = list(self._runner.input_batch.req_ids)
        self.levels, self._level_logits = [], []
        self._draft, self.wants_more = None, True
        self.kept.clear()
        dense = [one for one in self.tracers if one.is_dense]
        self._unverified = [row for one in dense for row in one.recorded(self._drafting)]
        if self.rules is None or num_levels == 0:
            return
        with self._failing_open():
            recent = None
            if self.rules.shape.needs_text:
                recent = recent_tokens(self._texts(), self._device)
            self._draft = self.rules.begin(self._drafting, root_ids, recent)
            self.wants_more = self._draft.wants_more

    def take_level(self, token_ids: Tensor) -> None:
        """Takes a drafted level."""
        self.levels.append(token_ids)
        if self._draft is not None and self.rules is not None and self.wants_more:
            with self._failing_open():
                level = DraftedTokens.of(token_ids, self._logits, self.rules.reads)
                self.rules.grow(self._draft, level)
                self.wants_more = self._draft.wants_more
        if self.tracers:
            self._level_logits.append(self._logits)

    @property
    def drafts_on(self) -> bool:
        """Whether to draft another level: a dense log takes all of them."""
        return self.wants_more or bool(self._unverified)

    def end_draft(self) -> None:
        """Ends a drafting, and sets how many draft tokens of each request to verify."""
        decider, offered = self._own, None
        if self._draft is not None and self.rules is not None:
            with self._failing_open():
                counts = self.rules.kept(self._draft, self._ended_rows())
                self.kept.update(zip(self._drafting, counts.tolist(), strict=True))
                decider, offered = (self.rules.policy, self.rules.digest), self._draft.offered
        self.kept.update((self._drafting[row], 0) for row in self._unverified)
        given = (self._drafting, self.levels, self._level_logits, offered, *decider)
        self._tracing(lambda one: one.after_draft(*given))
        self._level_logits = []
        spent_us = 0.0 if self.rules is None else self.rules.spent_us
        self._draft_us = 1e6 * (time.perf_counter() - self._draft_began) - spent_us

    def _ended_rows(self) -> list[int]:
        """Rows that get nothing of a shared budget: their texts end with this step's tokens, are
        not read yet, or are logged densely."""
        if self.rules is None or not self.rules.shares:
            return []
        is_read = ~self._runner.discard_request_mask.np
        return [
            row
            for row, given in enumerate(self._sampled.tolist())
            if not is_read[row]
            or row in self._unverified
            or end_of_text(self._runner, row).kept(given)[1]
        ]

    def _texts(self) -> list[list[int]]:
        """The emitted text of each request, with the tokens of this step."""
        batch = self._runner.input_batch
        texts = []
        for row, given in enumerate(self._sampled.tolist()):
            start, end = int(batch.num_prompt_tokens[row]), int(batch.num_tokens_no_spec[row])
            before = batch.token_ids_cpu[row, start:end].tolist()
            texts.append([*before, *(one for one in given if one >= 0)])
        return texts
