"""An engine's steps as rows: requests that run, that end, and writers that fail."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from specctl.collect.trace_writer import TraceWriter, make_header
from specctl.collect.transfer import Lane, Ready
from specctl.console import prepare_output
from specctl.engines import recording
from specctl.engines.recording import DenseSteps, LiveSteps, StepRecorder
from specctl.engines.steps import Answered, Drafted, ReadStep, Step, TextEnd, read_steps
from specctl.engines.vllm_plugin import log_beside_vllm
from specctl.errors import OutputError
from specctl.logs.trace_set import TraceSet
from specctl.policy import Chain, Policy, as_chain, policy_digest
from specctl.runtime.requests import Sampling
from specctl.runtime.words import resolve_policy
from specctl.watch.signals import read_prompts
from tests.cli.command import passes

DIGEST = "sha256:" + 64 * "a"
POLICY = Policy(shape=Chain(num_draft_tokens=2))
END = 9
TIMES = dict.fromkeys(("draft_us", "verify_us", "policy_us", "other_us"), 1.0)


def header(policy: Policy = POLICY) -> Any:
    collect = {"max_new_tokens": 64, "engine": {"name": "vllm", "version": "0.32.0"}}
    digests = dict.fromkeys(("target_digest", "drafter_digest", "tokenizer_digest"), DIGEST)
    return make_header(policy, Sampling(), collect=collect, **digests)


def drafted(names: list[str], tokens: list[list[int]], policy: Policy = POLICY) -> Drafted:
    """Chains, with logits of which each token is the best."""
    ids = torch.tensor(tokens).view(len(names), -1)
    logits = [one.float() for one in torch.nn.functional.one_hot(ids, 12).unbind(1)]
    offered = torch.full((len(names),), len(logits))
    return Drafted(names, ids, logits, offered, policy, policy_digest(policy))


NOTHING = Drafted.nothing(POLICY, "")


def step(
    given: dict[str, tuple[int, list[int]]],
    chains: Drafted,
    ended: tuple[str, ...] = (),
    *,
    num_verified: int = 2,
    tie: bool = False,
    **more: Any,
) -> Step:
    """A step in which requests were given tokens; the target likes each draft best.

    Args:
        given: by name, tokens emitted before and the new ones.
        num_verified: draft tokens of each request; 0 in a dense log.
        tie: it likes another token as much.
    """
    depth = min(chains.token_ids.shape[1], num_verified)
    answers = [
        Answered(
            name,
            root_id=5,
            position=position,
            context=position + 10,
            end=TextEnd(8 - position, {END}),
            draft_row=chains.request_ids.index(name) if name in chains.request_ids else -1,
            num_drafted=depth * (name in chains.request_ids),
            **more,
        )
        for name, (position, _) in given.items()
    ]
    sampled = [tokens + [-1] * (3 - len(tokens)) for _, tokens in given.values()]
    rows = []
    for one in answers:
        liked = [] if one.draft_row < 0 else chains.token_ids[one.draft_row].tolist()
        for slot in range(one.num_drafted + 1):
            row = torch.zeros(12)
            row[liked[slot : slot + 1] + [0] * tie] = 1.0
            rows.append(row)
    awaited = torch.full((len(answers), 2), -1) if num_verified == 0 else None
    columns = {**TIMES, "batch_size": len(answers), "step_idx": 1}
    own = (Ready(), awaited, columns, list(ended))
    return Step(answers, torch.tensor(sampled), chains, torch.stack(rows) if rows else None, *own)


def read_all(steps: Sequence[Step]) -> list[ReadStep]:
    return read_steps(steps, Sampling(), Lane())


def live(*, greedy: bool = True) -> LiveSteps:
    return LiveSteps(read_all, greedy=greedy)


def published(log: LiveSteps) -> list[tuple[Any, list[int]]]:
    """Requests of each segment, and the number of each of its rounds."""
    return [
        (one.prompt_ids, one.tables()["rounds"]["round_idx"].to_pylist()) for one in log.publish()
    ]


@pytest.mark.parametrize("steps_together", [1, recording.STEPS_TOGETHER])
def test_rows_are_held_until_their_request_ends(
    monkeypatch: pytest.MonkeyPatch, steps_together: int
) -> None:
    """By its limit, by a token that ends the text, or because the engine says so."""
    monkeypatch.setattr(recording, "STEPS_TOGETHER", steps_together)
    log = live()
    both = drafted(["a", "b"], [[1, 2], [3, 4]])
    log.take([step({"a": (1, [1, 7]), "b": (1, [3, 4, 6])}, both)])
    assert published(log) == []
    assert (len(log.unfinished()), log.held_bytes > 0) == (2, True)
    log.take([step({"a": (3, [1, END, 6]), "b": (4, [5])}, both)])
    assert published(log) == [({"a"}, [0, 1])]
    log.take([step({}, both, ended=("b", "unseen"))])
    assert log.unfinished() == []
    assert published(log) == [({"b"}, [0, 1])]
    assert (published(log), log.held_bytes) == ([], 0)


def test_rounds_are_cut_where_the_text_ends() -> None:
    log = live()
    both = drafted(["a", "b"], [[1, 9], [3, 4]])
    log.take([step({"a": (1, [1, END, 6]), "b": (6, [3, 4, 6])}, both)])
    [one] = log.publish()
    rounds = pl.from_arrow(one.tables()["rounds"])
    assert isinstance(rounds, pl.DataFrame)
    assert rounds["num_emitted"].to_list() == [2, 2]
    assert rounds["num_accepted"].to_list() == [2, 2]
    assert one.prompt_ids == {"a", "b"}


def test_a_segment_has_one_policy() -> None:
    """A request belongs to the one that decided its last round."""
    other = Policy(shape=Chain(num_draft_tokens=1))
    log = live()
    log.take([step({"a": (1, [1]), "b": (1, [END])}, drafted(["a", "b"], [[1, 2], [3, 4]]))])
    log.take([step({"a": (2, [END])}, drafted(["a"], [[1]], other))])
    found = {next(iter(one.prompt_ids)): one for one in log.publish()}
    assert {name: one.policy for name, one in found.items()} == {"a": other, "b": POLICY}
    digests = found["a"].tables()["rounds"]["policy_digest"].to_pylist()
    assert digests == [policy_digest(POLICY), policy_digest(other)]


def matches(taken: Step, *, greedy: bool) -> list[bool | None]:
    """`node_match` of the rows of one step."""
    log = live(greedy=greedy)
    log.take([taken])
    log.take([step({}, NOTHING, ended=("a",))])
    [one] = log.publish()
    return list(one.tables()["nodes"]["node_match"].to_pylist())


def test_a_sampled_round_says_only_what_was_drawn() -> None:
    """Behind a refused token nobody knows what the target would have drawn."""
    for greedy, known in ((True, [None, False, True]), (False, [None, False, None])):
        taken = step({"a": (1, [7])}, drafted(["a"], [[1, 2]]))
        assert matches(taken, greedy=greedy) == known


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(("bonus", "match"), [(2, True), (7, False)])
def test_a_draft_that_was_cut_is_judged_by_the_bonus_token(
    *, bonus: int, match: bool, greedy: bool
) -> None:
    """The first token that is not verified stands where the bonus token was drawn."""
    taken = step({"a": (1, [1, bonus])}, drafted(["a"], [[1, 2]]), num_verified=1)
    assert matches(taken, greedy=greedy) == [None, True, match]


def test_of_equal_logits_only_the_text_tells_which_was_chosen() -> None:
    """As in bfloat16, where the likeliest tokens often tie."""
    taken = step({"a": (1, [7])}, drafted(["a"], [[1, 2]]), tie=True)
    assert matches(taken, greedy=True) == [None, False, None]


def test_a_dense_log_lacks_no_position(caplog: pytest.LogCaptureFixture) -> None:
    """A text with a position behind which nothing was drafted is left out, counted, and named."""
    log = DenseSteps(read_all, 2)
    prompt = {"prompt": (4, 5)}

    def text(name: str, *, whole: bool) -> None:
        log.take([dense_step(name, 0, 1, NOTHING, **prompt)])
        log.take([dense_step(name, 1, 2, drafted([name], [[2, 3]]))])
        log.take([dense_step(name, 2, END, drafted([name], [[3, 1]]) if whole else NOTHING)])

    text("a", whole=True)
    text("b", whole=False)
    [one] = log.publish()
    assert one.prompt_ids == {"a"}
    assert log.lost == {recording.UNDRAFTED: 1}
    assert "the log leaves out requests with an undrafted position" in caplog.text
    assert one.tables()["rounds"]["num_accepted"].to_pylist() == [1, 0]
    assert one.tables()["nodes"]["token_id"].to_pylist() == [1, 2, 3, 2, 3, 1]
    assert log.held_bytes == 0


def dense_step(name: str, position: int, token: int, chains: Drafted, **more: Any) -> Step:
    return step({name: (position, [token])}, chains, num_verified=0, **more)


def publish(log: LiveSteps, writer: TraceWriter) -> None:
    for one in log.publish():
        assert one.policy is not None
        writer.commit(one.prompt_ids, one.tables(), policy=one.policy.model_dump(mode="json"))


def test_a_prompt_during_which_an_alias_was_moved_is_the_old_policys(tmp_path: Path) -> None:
    """In `drift`. Its first rounds would else look as if the new policy had failed."""
    other, log = Policy(shape=Chain(num_draft_tokens=1)), live()
    writer = TraceWriter.open(str(tmp_path), header(), own_prompts=True)
    steps = [
        step({"old": (1, [1])}, drafted(["old"], [[1]], other)),
        step({"old": (2, [1]), "a": (1, [3])}, drafted(["old", "a"], [[1, 2], [3, 4]])),
        step({"b": (1, [END]), "a": (2, [3, END])}, drafted(["b", "a"], [[1, 2], [3, 4]])),
        step({"old": (3, [END])}, drafted(["old"], [[1, 2]])),
    ]
    for one in steps:
        log.take([one])
        publish(log, writer)
    writer.close()
    found = read_prompts(TraceSet.open(str(tmp_path)), POLICY)
    assert sorted(found.ids) == ["a", "b"]
    assert found.column("calls")[found.ids.tolist().index("a")] == 2
    assert not found.column("other_policy").any()


def test_an_alarm_reads_a_tree_that_was_served_as_a_chain(tmp_path: Path) -> None:
    """The rows state the policy as the engine ran it, on the drafter's likeliest path."""
    words, log = "threshold:depth=2:top_k=4", live()
    policy = as_chain(resolve_policy(words).policy)
    writer = TraceWriter.open(str(tmp_path), header(), own_prompts=True)
    for name in "abcdefghij":
        log.take([step({name: (1, [1, END])}, drafted([name], [[1, 2]], policy))])
    publish(log, writer)
    writer.close()
    said = passes("drift", tmp_path, "--policy", words, "--reference-prompts", 8)
    assert said.out.startswith("No alarm: 2 prompts against 8 of the reference")


# --------------------------------------------------------------------------- the writing thread


def recorder(
    log: LiveSteps | DenseSteps,
    open_writer: Callable[[], Any],
    published_bytes: int | None = None,
    **limits: Any,
) -> StepRecorder:
    config = replace(recording.LIMITS, **{"wake_s": 0.01, **limits})
    return StepRecorder(log, open_writer, published_bytes, config)


def whole(name: str) -> Step:
    return step({name: (1, [END])}, drafted([name], [[1, 2]]))


@pytest.mark.parametrize("max_bytes", [recording.LIMITS.max_bytes, -1], ids=["thread", "engine"])
def test_rows_are_there_after_a_close(tmp_path: Path, max_bytes: int) -> None:
    """Also where the engine's thread reads the logits, as too many wait."""
    readers = set()

    def read_by(steps: Sequence[Step]) -> list[ReadStep]:
        readers.add(threading.current_thread() is threading.main_thread())
        return read_all(steps)

    log, path = LiveSteps(read_by, greedy=True), tmp_path / "set"
    found = recorder(log, lambda: TraceWriter.open(path, header()), max_bytes=max_bytes)
    for i in range(20):
        found.hand_over(whole(f"run-{i:03d}"))
    found.close()
    assert TraceSet.open(str(path)).num_rows("rounds") == 20
    assert (True in readers) == (max_bytes < 0)
    assert not found.lost


class Failing:
    """A writer whose disk is full, or that hangs until it is let go."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate = gate

    def commit(self, *_: object, **__: object) -> Any:
        if self.gate is not None:
            self.gate.wait()
        raise OutputError("disk: expected space, found none", hint="free some")

    def close(self) -> None:
        return None


def refused() -> Any:
    raise OutputError("folder: expected one to write to, found none", hint="choose another")


@pytest.mark.parametrize("open_writer", [Failing, refused], ids=["disk full", "unwritable"])
def test_tracing_ends_once_and_serving_goes_on(
    open_writer: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "specctl.engines"):
        found = recorder(live(), open_writer, flush_s=0.01)
        found.hand_over(whole("a"))
        found._thread.join()
        for name in "bcd":
            found.hand_over(whole(name))
        found.close()
    assert not found.is_on
    assert found.lost["steps after tracing ended"] >= 3
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "serving goes on" in caplog.text


def test_a_slow_disk_ends_tracing(caplog: pytest.LogCaptureFixture) -> None:
    """The rows that wait for it are bounded, and so is the queue behind them."""
    gate = threading.Event()
    limits = {"flush_s": 0.0, "max_items": 4, "held_bytes": 20_000}
    found = recorder(live(), lambda: Failing(gate), **limits)
    for i in range(1000):
        found.hand_over(whole(f"run-{i}"))
        if not found.is_on:
            break
    assert not found.is_on
    assert "slow disk" in caplog.text
    assert sum(found.lost.values()) >= 1
    gate.set()
    found.close()


def test_a_bound_on_bytes_ends_tracing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "set"
    found = recorder(live(), lambda: TraceWriter.open(path, header()), 1, flush_s=0.01)
    found.hand_over(whole("a"))
    found._thread.join()
    assert "of at most 1" in caplog.text
    assert TraceSet.open(str(path)).num_rows("rounds") == 1


def test_running_requests_are_not_in_the_log_and_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "set"
    found = recorder(live(), lambda: TraceWriter.open(path, header()))
    found.hand_over(whole("a"))
    found.hand_over(step({"b": (1, [1])}, drafted(["b"], [[1, 2]])))
    found.close()
    assert TraceSet.open(str(path)).prompt_ids == ("a",)
    assert found.lost == {"requests that had not ended": 1}


def test_a_segment_is_published_early_where_rows_take_much_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "STEPS_TOGETHER", 1)
    path = tmp_path / "set"
    found = recorder(live(), lambda: TraceWriter.open(path, header()), flush_bytes=1)
    found.hand_over(whole("a"))
    while not found.num_bytes:
        threading.Event().wait(0.01)
    assert TraceSet.open(str(path)).prompt_ids == ("a",)
    found.close()


def test_notes_stand_in_vllms_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without handlers of its own a logger of Python's drops them."""
    ours, theirs = logging.getLogger("specctl"), logging.getLogger("vllm")
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", seen.append)
    wanted = {"handlers": [handler], "level": logging.INFO, "propagate": False}
    for name, value in wanted.items():
        monkeypatch.setattr(ours, name, getattr(ours, name))
        monkeypatch.setattr(theirs, name, value)
    log_beside_vllm()
    logging.getLogger("specctl.engines").info("a policy was loaded")
    assert [record.getMessage() for record in seen] == ["a policy was loaded"]
    assert not ours.propagate, "a root logger with a handler would say it again"
    prepare_output()
    assert theirs.handlers == [handler], "vLLM's warnings are no lines of our commands"
