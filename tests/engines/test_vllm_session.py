"""The plugin's part of a model runner, on a runner that is made up: what vLLM does rarely."""

from __future__ import annotations

import atexit
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specctl.artifacts.manifest import Domain, PairFingerprint
from specctl.embedded import embedded_path
from specctl.engines import vllm_plugin, vllm_session, vllm_tracing
from specctl.engines.chains import ChainPolicy, DraftedTokens
from specctl.engines.settings import PluginSettings, TraceSettings
from specctl.engines.steps import Step
from specctl.engines.vllm_session import Session
from tests.engines.made_up import VOCAB_SIZE, K, Runner, request

DIGEST = "sha256:" + 64 * "a"
PAIR = PairFingerprint(
    target_digest=DIGEST, drafter_digest=DIGEST, tokenizer_digest=DIGEST, target="t", drafter="d"
)


class Kept:
    """In a recorder's place: keeps what it is given, and writes nothing."""

    def __init__(self, *_: object) -> None:
        self.steps: list[Step] = []
        self.is_on = True

    def hand_over(self, step: Step) -> None:
        self.steps.append(step)

    def end(self, reason: str) -> None:
        raise AssertionError(reason)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(vllm_session, "pair_of", lambda *_: (PAIR, Domain()))
    monkeypatch.setattr(vllm_tracing, "StepRecorder", Kept)

    def session(runner: Runner, **settings: Any) -> Session:
        found = Session(PluginSettings(**settings), runner, "0.32.0")
        atexit.unregister(found.close)
        return found

    return session


def take_step(
    session: Session, runner: Runner, *, num_drafted: int = 0, drafts: bool = True
) -> None:
    """A step in which every request is given one token, after which the drafter runs or not."""
    size = runner.input_batch.num_reqs
    counts = dict.fromkeys(runner.input_batch.req_ids, 1 + num_drafted)
    session.begin_step(SimpleNamespace(finished_req_ids=set(), num_scheduled_tokens=counts))
    metadata = SimpleNamespace(num_draft_tokens=[num_drafted] * size)
    session.before_verdict(torch.rand(size * (1 + num_drafted), VOCAB_SIZE), metadata)
    session.after_verdict(torch.full((size, 1), 3), metadata)
    if drafts:
        session.begin_draft(K, torch.full((size,), 3))
        for _ in range(K):
            session._logits = torch.rand(size, VOCAB_SIZE)
            session.take_level(session._logits.argmax(1))
        session.end_draft()
    runner.input_batch.num_tokens_no_spec += 1
    session.end_step()


def to_verify(session: Session, *names: str) -> list[list[int]]:
    """Of drafts that vLLM hands to its scheduler, those that the plugin leaves there."""
    given = SimpleNamespace(req_ids=list(names), draft_token_ids=[[0] * K for _ in names])
    taken = vllm_plugin._take_draft_token_ids(session, lambda _: given, None)
    return list(taken.draft_token_ids)


TRACE = TraceSettings(out="set")


def test_models_are_told_apart_by_the_revisions_that_vllm_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of hub ids, from vLLM's own folder of downloads."""
    asked = []

    def download(name: str, *, revision: str | None, cache_dir: str | None, **_: Any) -> str:
        asked.append((name, revision, cache_dir))
        return str(embedded_path(name.removeprefix("org/")))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    target, draft = (SimpleNamespace(model=f"org/{n}") for n in ("target", "eagle3"))
    vars(target).update(tokenizer="org/target", tokenizer_revision="r2", dtype=torch.float32)
    target.revision, draft.revision = "r1", "r3"
    config = SimpleNamespace(
        model_config=target,
        speculative_config=SimpleNamespace(draft_model_config=draft),
        load_config=SimpleNamespace(download_dir="downloads"),
    )
    pair, _ = vllm_tracing.pair_of(config, torch.device("cpu"))
    assert (pair.target, pair.drafter) == ("org/target", "org/eagle3")
    revisions = {("org/target", "r1"), ("org/eagle3", "r3"), ("org/target", "r2")}
    assert set(asked) == {(*one, "downloads") for one in revisions}


def test_tokens_that_no_drafter_made_are_not_verified(start: Any) -> None:
    """vLLM hands out zeros where the drafter could not run, to every request of the batch."""
    runner = Runner(a=request(), b=request())
    session = start(runner, trace=TRACE)
    take_step(session, runner)
    assert to_verify(session, "a", "b") == [[0] * K] * 2
    take_step(session, runner, num_drafted=K, drafts=False)
    assert to_verify(session, "a", "b") == [[], []]
    take_step(session, runner)
    assert to_verify(session, "a", "b") == [[0] * K] * 2
    assert not session.tracers[0].skipped


def test_a_dense_log_that_ended_leaves_drafts_to_be_verified(start: Any) -> None:
    runner = Runner(a=request())
    session = start(runner, trace=TraceSettings(out="set", dense=True))
    take_step(session, runner)
    assert to_verify(session, "a") == [[]]
    session.tracers[0].recorder.is_on = False
    take_step(session, runner)
    assert to_verify(session, "a") == [[0] * K]


def test_a_dense_log_of_some_requests_leaves_the_others_their_drafts(start: Any) -> None:
    runner = Runner(a=request(), b=request(), c=request(temperature=1.0))
    session = start(runner, trace=TraceSettings(out="set", dense=True, every=2))
    take_step(session, runner)
    assert to_verify(session, "a", "b", "c") == [[], [0] * K, [0] * K]


@pytest.mark.parametrize("budget", ["", "+survival:max_tokens=6"])
def test_a_policy_serves_beside_a_dense_sample(start: Any, budget: str) -> None:
    """One request in two is drafted to the end and not verified; the rule stops the other, of which
    alone the rounds are logged."""
    runner = Runner(a=request(), b=request())
    trace = TraceSettings(out="set", dense_every=2)
    session = start(runner, policy=f"confidence:window={K}:threshold=0.99{budget}", trace=trace)
    take_step(session, runner)
    assert len(session.levels) == K
    kept = to_verify(session, "a", "b")
    assert kept[0] == []
    assert len(kept[1]) < K
    take_step(session, runner)
    session.begin_step(SimpleNamespace(finished_req_ids=set(), num_scheduled_tokens={}))
    live, dense = (tracer.recorder.steps[1] for tracer in session.tracers)
    assert [one.request_id[-1] for one in live.answered] == ["1"]
    assert [one.request_id[-1] for one in dense.answered] == ["0"]
    assert live.drafted.policy == session.rules.policy
    assert live.drafted.offered.tolist() == [1]
    assert dense.drafted.offered.tolist() == [K]
    assert [tracer.is_dense for tracer in session.tracers] == [False, True]


@pytest.mark.parametrize("dense", [False, True])
def test_what_is_drafted_behind_a_part_of_a_text_is_not_recorded(
    start: Any, *, dense: bool
) -> None:
    """As of a request that was preempted, whose text is read again in parts."""
    runner = Runner(a=request(), b=request())
    session = start(runner, trace=TraceSettings(out="set", dense=dense))
    take_step(session, runner)
    runner.discard_request_mask.np[0] = True  # a is read
    take_step(session, runner)
    runner.discard_request_mask.np[0] = False
    take_step(session, runner)
    session.begin_step(SimpleNamespace(finished_req_ids=set(), num_scheduled_tokens={}))
    steps = session.tracers[0].recorder.steps
    assert [one.request_id[-1] for one in steps[2].answered] == ["0", "1"]
    assert [one.draft_row >= 0 for one in steps[2].answered] == [False, True]


@pytest.mark.parametrize(("num_read", "counted"), [(0, 5), (2, 3), (4, 0)])
def test_a_text_that_is_read_again_counts_as_a_prompt(
    start: Any, num_read: int, counted: int
) -> None:
    """Of two tokens of prompt and three of text, the last of which is the root."""
    runner = Runner(a=request())
    session = start(runner, trace=TRACE)
    runner.input_batch.num_tokens_no_spec[0] = 5
    runner.input_batch.num_computed_tokens_cpu[0] = num_read
    columns = session.tracers[0]._columns({"a": 5 - num_read})
    assert columns["step_prompt_tokens"] == counted


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"structured_outputs": object()}, "requests of another sampling"),
        ({"allowed_token_ids": [1]}, "requests of another sampling"),
        ({"min_tokens": 4}, "requests of another sampling"),
        ({"lora_request": object()}, "requests of a LoRA adapter"),
        ({"prompt_embeds": torch.zeros(2, 4)}, "requests without token ids"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_requests_that_rows_could_not_describe_are_counted_and_said(
    start: Any, caplog: pytest.LogCaptureFixture, other: dict[str, Any], reason: str
) -> None:
    """Not only at the end: a server is killed before it could say so."""
    one = request()
    for name, value in other.items():
        setattr(one if hasattr(one, name) else one.sampling_params, name, value)
    runner = Runner(a=one, b=request(), c=one)
    session = start(runner, trace=TRACE)
    take_step(session, runner)
    take_step(session, runner)
    session.begin_step(SimpleNamespace(finished_req_ids=set(), num_scheduled_tokens={}))
    steps = session.tracers[0].recorder.steps
    assert [len(step.answered) for step in steps] == [1, 1]
    assert session.tracers[0].skipped == {reason: 2}
    assert caplog.text.count(f"the log leaves out {reason}") == 1


@pytest.mark.policy_faults
@pytest.mark.parametrize("fails", ["begin", "grow", "kept"])
def test_a_policy_that_runs_out_of_memory_costs_a_drafting_its_rules(
    start: Any, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner = Runner(a=request())
    session = start(runner, policy=f"confidence:window={K}:threshold=0.99", trace=TRACE)
    monkeypatch.setattr(ChainPolicy, fails, no_memory)
    take_step(session, runner)
    assert to_verify(session, "a") == [[0] * K]
    assert session.faults.total == 1
    assert session.tracers[0]._drafted.token_ids.shape == (1, K)


@pytest.mark.policy_faults
def test_a_level_that_no_rule_could_read_is_recorded_in_its_place(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading its logits failed; behind it nothing decides, and the log is read at the end."""
    runner, read = Runner(a=request()), DraftedTokens.of
    session = start(runner, policy=f"confidence:window={K}:threshold=0", trace=TRACE)
    failures = iter([torch.OutOfMemoryError("CUDA out of memory")])

    def of(*given: Any) -> Any:
        for error in failures:
            raise error
        return read(*given)

    monkeypatch.setattr(DraftedTokens, "of", of)
    take_step(session, runner)
    assert session.faults.total == 1
    assert session.tracers[0]._drafted.token_ids.shape == (1, K)
