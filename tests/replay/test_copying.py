"""Copies live and from a log: texts of plain decoding, and the same rounds, for both drafters."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from specctl.collect.dense import collect_dense
from specctl.collect.prompts import load_prompts
from specctl.errors import UsageError
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import FullTree, Policy, RootOnly
from specctl.replay.batch_simulation import Load, simulate
from specctl.replay.cost.model import Steps, steps_of
from specctl.replay.outcomes import check_replayable
from specctl.replay.rounds import Rounds, replay
from specctl.replay.submissions import submissions_of
from specctl.replay.tune.candidates import parse_families
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import DecodeSettings, converse
from specctl.runtime.load import Pair
from specctl.runtime.policy_spec import resolve_policy
from specctl.runtime.requests import Completion
from tests.replay.costs import table_model
from tests.replay.serving import linear
from tests.runtime import captured

PAIRS = {"small": captured.small_pair, "eagle3": captured.pair}
SPECS = (
    "ar+copy:min_length=1:max_draft_tokens=3:window=20",
    "threshold:depth=3:top_k=3:min_prob=0.1:min_level_prob=0.5+copy:min_length=1",
    "eagle2:depth=3:top_k=3:num_tokens=8+copy:min_length=1:max_draft_tokens=20:window=12",
)
CASES = (*SPECS[:2], pytest.param(SPECS[2], marks=pytest.mark.nightly))
SETTINGS = DecodeSettings(20)
PROMPTS = [prompt for prompt in load_prompts("embedded") if len(prompt.turns) == 1][7::47]


@pytest.fixture(scope="module", params=PAIRS)
def logged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Pair, DenseLog]:
    pair, folder = PAIRS[request.param](), tmp_path_factory.mktemp("dense") / "traces"
    collect_dense(pair, PROMPTS, SETTINGS, folder, FullTree(depth=3, top_k=3), batch_size=8)
    return pair, DenseLog.open(TraceSet.open(folder))


def decoded(pair: Pair, policy: Policy, batch_size: int) -> dict[str, Completion]:
    talks = converse(Decoder(pair, policy, batch_size=batch_size), PROMPTS, SETTINGS)
    return {talk.prompt.prompt_id: talk.completions[0] for talk in talks}


@cache
def plain_texts() -> dict[str, tuple[int, ...]]:
    done = decoded(captured.pair(), Policy(shape=RootOnly()), 8)
    return {prompt: one.token_ids for prompt, one in done.items()}


def live_counts(done: Completion) -> tuple[int, int, int, int, list[int]]:
    of = done.metrics
    return of.calls, of.verified_tokens, of.drafted_levels, of.copied_calls, of.accepted_lengths


def replayed_counts(run: Rounds) -> dict[str, tuple[int, int, int, int, list[int]]]:
    counts, found = run.counts(), {}
    for request, prompt in enumerate(run.positions.prompt):
        here = {name: values[run.request == request] for name, values in counts.items()}
        sums = (int(here[name].sum()) for name in ("calls", "verified", "levels", "copied"))
        name = run.positions.prompt_ids[prompt]
        found[name] = (*sums, here["accepted"].tolist())
    return found


@pytest.mark.parametrize("spec", CASES)
def test_text_is_plain_decodings_and_rounds_are_those_of_the_log(
    spec: str, logged: tuple[Pair, DenseLog]
) -> None:
    pair, log = logged
    policy = resolve_policy(spec).policy
    [run] = replay(log, [policy])
    assert run.bounds is not None
    assert (run.bounds.calls_low == run.bounds.calls_high).all()
    wanted, plain = replayed_counts(run), plain_texts()
    for batch_size in (1, 4) if policy.copies.window == 1024 else (3,):
        done = decoded(pair, policy, batch_size)
        assert {prompt: one.token_ids for prompt, one in done.items()} == plain
        assert {prompt: live_counts(one) for prompt, one in done.items()} == wanted
    copied, calls = (sum(of[place] for of in wanted.values()) for place in (3, 0))
    assert 5 < copied < calls


@pytest.mark.parametrize("spec", SPECS)
def test_a_simulated_batch_runs_the_same_rounds(spec: str, logged: tuple[Pair, DenseLog]) -> None:
    policy = resolve_policy(spec).policy
    [made] = submissions_of(logged[1], [policy])
    run = simulate(made, Load(3, num_requests=len(PROMPTS)), linear(), seed=1)
    [alone] = replay(logged[1], [policy], with_bounds=False)
    by_request = np.bincount(run.rounds.serial, run.rounds.verified)
    wanted = np.bincount(alone.request, alone.outcomes.verified)
    assert by_request.tolist() == wanted[run.logged].tolist()
    # A step drafts where one of its requests has nothing to copy.
    deepest = np.zeros(len(run.rounds.first))
    np.maximum.at(deepest, run.rounds.step, run.outcomes.levels)
    assert (run.steps.levels == deepest).all()


def test_a_copy_pays_for_its_nodes_and_for_what_the_drafter_reads(
    logged: tuple[Pair, DenseLog],
) -> None:
    beside, alone = replay(logged[1], [resolve_policy(SPECS[n]).policy for n in (1, 0)])
    for run, reads in ((beside, True), (alone, False)):
        steps = steps_of(run)
        copies = np.asarray(run.counts()["copied"])
        assert (np.asarray(steps.levels)[copies] == 0).all()
        assert (
            np.asarray(steps.num_tokens)[copies] == 1 + run.policy.copies.max_draft_tokens
        ).all()
        goes_on = copies & ~run.is_last
        assert goes_on.any()
        assert (np.asarray(steps.num_emitted)[goes_on] > 0).all() == reads


def test_times_of_a_copy_are_verification_reading_and_the_loop() -> None:
    model = table_model()
    copy = Steps(1, 13, 64, 0, 0.0, 4, copies=True)
    assert model.draft_us(copy) == model.part_us("draft.extend", 4, 1, 64)
    assert model.loop_us(copy) == model.part_us("draft.loop", 1, 1, 1)
    parts = (model.verify_us(13, 1, 64), model.draft_us(copy), model.loop_us(copy))
    assert model.round_us(copy) == pytest.approx(sum(parts))
    plain = Steps(1, 1, 64, 0, 0.0, 0, copies=True)
    assert model.draft_us(plain) == 0
    assert model.loop_us(plain) == model.part_us("loop", 1, 1, 1)


def test_what_a_log_cannot_tell_is_refused() -> None:
    with pytest.raises(UsageError, match="traces hold no prompts"):
        check_replayable(resolve_policy("eagle2+copy:prompt=true").policy)


def test_rounds_with_copies_are_not_recorded() -> None:
    pair = captured.pair()
    decoder = Decoder(pair, resolve_policy("eagle2+copy").policy, observer=captured.Kept())
    with pytest.raises(UsageError, match="copies of the text, which have none"):
        list(converse(decoder, load_prompts("embedded")[:1], SETTINGS))


def test_tuning_searches_copies_with_the_shape_of_one_request() -> None:
    [family] = parse_families(["chain+copy:min_length=2"], [])
    assert (family.is_shared, family.is_static) == (False, False)
    assert {*family.grid} == {"num_draft_tokens", "max_draft_tokens"}
