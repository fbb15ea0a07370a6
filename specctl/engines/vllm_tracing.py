"""Reads steps of vLLM's V1 model runner for traces; `recording` makes rows of them."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specctl.artifacts.manifest import Domain, PairFingerprint
from specctl.collect.trace_writer import TraceWriter, pair_header
from specctl.collect.transfer import lane_for
from specctl.embedded import name_of
from specctl.engines.recording import DenseSteps, LiveSteps, StepRecorder
from specctl.engines.settings import TraceSettings
from specctl.engines.steps import Answered, Drafted, Step, TextEnd, read_steps
from specctl.policy import Policy
from specctl.runtime.identity import (
    load_tokenizer,
    model_folder,
    tokenizer_digest,
    weights_digest,
)
from specctl.runtime.load import domain_at
from specctl.runtime.requests import Sampling

log = logging.getLogger("specctl.engines")
GREEDY_BELOW = 1e-5
"""vLLM decodes greedily below this temperature."""
PLAIN = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "bad_words": None,
    "allowed_token_ids": None,
    "structured_outputs": None,
    "min_tokens": 0,
    "thinking_token_budget": None,
    "trace_decode_token_ids": None,
}
"""Sampling parameters that the trace format lacks, at their neutral values."""


def pair_of(config: Any, device: torch.device) -> tuple[PairFingerprint, Domain]:
    """The identity of the models of a vLLM configuration, and their domain.

    Raises:
        ModelError: a folder without weights, or a tokenizer that transformers cannot load.
    """
    model, draft = config.model_config, config.speculative_config.draft_model_config

    def folder(name: str, revision: str | None) -> Path:
        cache = config.load_config.download_dir
        return model_folder(name, embedded_default="", revision=revision, cache=cache)

    target, drafter = (folder(one.model, one.revision) for one in (model, draft))
    tokenizer = load_tokenizer(folder(model.tokenizer, model.tokenizer_revision))
    fingerprint = PairFingerprint(
        target_digest=weights_digest(target),
        drafter_digest=weights_digest(drafter),
        tokenizer_digest=tokenizer_digest(tokenizer),
        target=name_of(model.model),
        drafter=name_of(draft.model),
    )
    return fingerprint, domain_at(target, drafter, model.dtype, (device,))


def end_of_text(runner: Any, row: int) -> TextEnd:
    """The end of the text of a row of the batch, before this step's tokens are booked."""
    batch = runner.input_batch
    params = runner.requests[batch.req_ids[row]].sampling_params
    context = int(batch.num_tokens_no_spec[row])
    emitted = context - int(batch.num_prompt_tokens[row])
    room = min(params.max_tokens - emitted, runner.max_model_len - context)
    return TextEnd(room, {params.eos_token_id, *(params.stop_token_ids or ())})


class Tracer:
    """Records requests of a model runner.

    Args:
        own: the policy that the engine was set up with, and its digest.

    Attributes:
        skipped: requests that are not recorded, by reason.
        is_dense: no draft of a recorded request may be verified.
    """

    def __init__(
        self,
        settings: TraceSettings,
        runner: Any,
        pair: PairFingerprint,
        domain: Domain,
        own: tuple[Policy, str],
        version: str,
    ) -> None:
        self._settings, self._runner = settings, runner
        self._sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
        self._lane = lane_for(runner.device)
        self._run, self._num_requests = f"run-{secrets.token_hex(6)}", 0
        self._names: dict[str, str | None] = {}  # of vLLM's request ids; None: not recorded
        self.skipped: Counter[str] = Counter()
        self._rows: list[int] = []
        self._step: Step | None = None
        self._nothing = self._drafted = Drafted.nothing(*own)  # the latter in the last step
        self._chains: dict[str, list[list[int]]] = {}  # dense: drafts that the text still follows
        depth = runner.vllm_config.speculative_config.num_speculative_tokens
        read = partial(read_steps, sampling=self._sampling, lane=self._lane)
        source: DenseSteps | LiveSteps = LiveSteps(read, greedy=self._sampling.greedy)
        policy, _ = own
        if settings.dense:
            source = DenseSteps(read, depth)
            policy = source.policy
        self._dense_depth, self.is_dense = depth if settings.dense else 0, settings.dense

        def open_writer() -> TraceWriter:
            vocab_size = runner.model_config.get_vocab_size()
            draft_config = runner.vllm_config.speculative_config.draft_model_config.hf_config
            dense = {"top_k": 1, "width": 1, "depth": depth, "nested": True}
            header = pair_header(
                policy,
                self._sampling,
                pair,
                domain.model_copy(update={"workload": settings.workload}),
                settings.tokens,
                max_new_tokens=runner.max_model_len,
                draft_vocab_size=getattr(draft_config, "draft_vocab_size", vocab_size),
                engine={"name": "vllm", "version": version},
                **({"dense": dense, "responses_digest": None} if settings.dense else {}),
            )
            return TraceWriter.open(settings.out, header, resume=True, own_prompts=True)

        self.recorder = StepRecorder(source, open_writer, settings.max_bytes)

    # ----------------------------------------------------------------- a step

    def recorded(self, request_ids: list[str]) -> list[int]:
        """The places of requests whose drafts are recorded; none after tracing has ended.

        Excludes requests whose prompt vLLM is still reading: it drafts after each part of the
        prompt, and verifies none of that.
        """
        names, is_read = self._names, ~self._runner.discard_request_mask.np
        if not self.recorder.is_on:
            return []
        pairs = enumerate(request_ids)
        return [row for row, one in pairs if names.get(one) is not None and is_read[row]]

    def before_verdict(
        self, logits: Tensor, metadata: Any, num_scheduled: Mapping[str, int]
    ) -> None:
        """Takes the target's logits, before vLLM changes them.

        Args:
            logits: a row per verified token, request by request from the root.
            metadata: vLLM's, of the drafts among them; None for none.
            num_scheduled: tokens of each request in this step.
        """
        self._step, drafted, self._drafted = None, self._drafted, self._nothing
        if not self.recorder.is_on:
            return
        counts = [0] * self._runner.input_batch.num_reqs
        counts = counts if metadata is None else metadata.num_draft_tokens
        found = self._answered(counts, drafted)
        if not found:
            return
        self._rows, answered = [row for row, _ in found], [one for _, one in found]
        ends = list(accumulate(n + 1 for n in counts))
        at = [i for row in self._rows for i in range(ends[row] - counts[row] - 1, ends[row])]
        is_every = len(at) == len(logits)
        logits = logits.clone() if is_every else logits[torch.tensor(at, device=logits.device)]
        awaited = self._awaited(answered) if self._dense_depth else None
        columns = {**self._columns(num_scheduled), "batch_size": len(counts)}
        mark = self._lane.mark()
        self._step = Step(answered, torch.empty(0), drafted, logits, mark, awaited, columns)

    def after_verdict(self, sampled: Tensor) -> None:
        """Takes the tokens that verification gave, `[B, S]`, -1 padded."""
        if self._step is None:
            return
        self._step.sampled = sampled[self._rows]
        if self._dense_depth:
            tokens = self._step.sampled[:, 0].tolist()
            for one, token in zip(self._step.answered, tokens, strict=True):
                chains = self._chains.get(one.request_id, [])
                follow = [chain[1:] for chain in chains if chain[0] == token and len(chain) > 1]
                self._chains[one.request_id] = follow

    def after_draft(
        self,
        request_ids: list[str],
        levels: list[Tensor],
        logits: list[Tensor],
        offered: Tensor | None,
        policy: Policy,
        digest: str,
    ) -> None:
        """Takes new drafts of B requests; a dense log compares each chain with the text to its end.

        Args:
            levels: `[B]` tokens each. logits: the drafter's, of each level.
            offered: `[B]`, levels that count; None for all, as in a dense log.
            policy, digest: of the rules that decided.
        """
        rows = self.recorded(request_ids)
        self._drafted = Drafted.nothing(policy, digest)
        if not rows or not levels:
            return
        token_ids = torch.stack(levels, 1).long()
        if offered is None or self.is_dense:
            offered = torch.full((len(token_ids),), len(logits), device=token_ids.device)
        if len(rows) < len(request_ids):
            at = torch.tensor(rows, device=token_ids.device)
            token_ids, offered, logits = token_ids[at], offered[at], [one[at] for one in logits]
        names = [request_ids[row] for row in rows]
        self._drafted = Drafted(names, token_ids, logits, offered, policy, digest)
        if self.is_dense:
            for request_id, chain in zip(names, token_ids.tolist(), strict=True):
                self._chains.setdefault(str(self._names[request_id]), []).append(chain)

    def end_step(self, times: dict[str, Any], finished: set[str]) -> None:
        """Hands the complete step to the recorder.

        Args:
            times: columns of its rows.
            finished: vLLM's ids of requests that have ended.
        """
        ended = [name for one in finished if (name := self._names.pop(one, None)) is not None]
        step, self._step = self._step, None
        for name in ended:
            self._chains.pop(name, None)
        if step is None and ended:
            step = Step([], torch.empty(0, 1), self._nothing, None, self._lane.mark())
        if step is not None:
            step.columns |= times
            step.ended, step.mark = ended, self._lane.mark()
            self.recorder.hand_over(step)

    # ----------------------------------------------------------------- read from vLLM

    def _answered(self, counts: list[int], drafted: Drafted) -> list[tuple[int, Answered]]:
        """The recorded rows of the batch, with their requests."""
        batch, runner = self._runner.input_batch, self._runner
        draft_rows = {name: row for row, name in enumerate(drafted.request_ids)}
        found = []
        for row, request_id in enumerate(batch.req_ids):
            if request_id not in self._names:
                self._names[request_id] = self._new_name(runner.requests[request_id])
            name = self._names[request_id]
            if name is None or runner.discard_request_mask.np[row]:  # its prompt is not read yet
                continue
            context = int(batch.num_tokens_no_spec[row])
            num_prompt = int(batch.num_prompt_tokens[row])
            position, draft_row = context - num_prompt, draft_rows.get(request_id, -1)
            if counts[row] and draft_row < 0:  # not scheduled in the step after its drafts
                self._names[request_id] = None
                self._leave_out("requests that waited with drafts")
                continue
            text = batch.token_ids_cpu[row]
            answer = Answered(
                name,
                root_id=int(text[context - 1]),
                position=position,
                context=context,
                end=end_of_text(runner, row),
                draft_row=draft_row,
                num_drafted=counts[row],
                prompt=tuple(text[:num_prompt].tolist()) if position == 0 else None,
            )
            found.append((row, answer))
        return found

    def _new_name(self, request: Any) -> str | None:
        """The name of a new request in the set; None if it is not recorded."""
        number = self._num_requests
        self._num_requests += 1
        dense_every = self._settings.dense_every
        is_sampled = dense_every is not None and number % dense_every == 0
        if number % self._settings.every or is_sampled:
            return None
        if kind := self._unsupported(request):
            self._leave_out(kind)
            return None
        return f"{self._run}-{number:06d}"

    def _unsupported(self, request: Any) -> str | None:
        """The kind of a request that does not fit into the set; None if it does."""
        wanted, params = self._sampling, request.sampling_params
        if request.lora_request is not None:  # the set is of one pair
            return "requests of a LoRA adapter"
        if request.prompt_embeds is not None:
            return "requests without token ids"
        temperature = 0.0 if params.temperature < GREEDY_BELOW else params.temperature
        same = wanted.greedy and temperature == 0.0
        given = (temperature, max(params.top_k, 0), params.top_p)
        same = same or given == (wanted.temperature, wanted.top_k, wanted.top_p)
        if not same or any(
            getattr(params, name) not in (value, []) for name, value in PLAIN.items()
        ):
            return "requests of another sampling"
        return None

    def _leave_out(self, what: str) -> None:
        """Counts a request, and logs the first of each kind: it explains an empty set."""
        self.skipped[what] += 1
        if self.skipped[what] == 1:
            log.warning("specctl: the log leaves out %s, and counts them", what)

    def _awaited(self, answered: list[Answered]) -> Tensor:
        """`[R, K]` int64, -1 padded: the tokens of chains that reach this position, by depth."""
        waiting = torch.full((len(answered), self._dense_depth), -1)
        for row, one in enumerate(answered):
            for chain in self._chains.get(one.request_id, []):
                waiting[row, self._dense_depth - len(chain)] = chain[0]
        return waiting

    def _columns(self, num_scheduled: Mapping[str, int]) -> dict[str, int]:
        """Sizes of the step, over all its requests, recorded or not."""
        batch = self._runner.input_batch
        counts = np.array([num_scheduled[one] for one in batch.req_ids])
        before = batch.num_computed_tokens_cpu[: len(counts)]
        # A text with more than the root unread was preempted, and is read like a prompt.
        unread = batch.num_tokens_no_spec[: len(counts)] - before
        of_prompt = batch.num_prompt_tokens[: len(counts)] - before
        unread = np.where(unread > 1, unread, of_prompt)
        return {
            "step_tokens": int(counts.sum()),
            "step_prompt_tokens": int(np.minimum(counts, unread).clip(0).sum()),
            "step_context_tokens": int((before + counts).sum()),
        }
