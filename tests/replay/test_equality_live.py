"""Replay equals life: the log of one collection against live runs of every policy.

Embedded pair, fp32, greedy: 200 held-out prompts, every round's accepted and verified tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specctl.collect.dense import collect_dense
from specctl.collect.formats import Prompt
from specctl.collect.prompts import load_prompts
from specctl.collect.reader import TraceSet
from specctl.policy import Chain, EntropyBins, FullTree, Policy, RootOnly, StaticTree, build_shape
from specctl.replay.log import DenseLog
from specctl.replay.rounds import Rounds, replay
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import DecodeSettings, converse
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.observe import RoundRecord
from specctl.runtime.policy_spec import resolve_policy

NUM_PROMPTS, SETTINGS = 200, DecodeSettings(16)
SHAPE = FullTree(depth=8, top_k=8)
BASE = StaticTree(depth=5, top_k=8, num_tokens=24)
POLICIES = {
    "ar": Policy(shape=RootOnly()),
    "chain 2": Policy(shape=Chain(num_draft_tokens=2)),
    "chain 6": Policy(shape=Chain(num_draft_tokens=6)),
    "eagle2 3-4-8": Policy(shape=StaticTree(depth=3, top_k=4, num_tokens=8)),
    "eagle2 6-8-48": Policy(shape=StaticTree(depth=6, top_k=8, num_tokens=48)),
    "eagle2 8-5-24": Policy(shape=StaticTree(depth=8, top_k=5, num_tokens=24)),
    # Edges inside the range of Φ at depth 5, so that bins and depths differ between rounds.
    "hetero": Policy(shape=EntropyBins(base=BASE, edges=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0))),
}
ADAPTIVE = {
    spec: resolve_policy(spec).policy
    for spec in (
        "confidence:threshold=0.5:window=7",
        "svip:window=7",
        "adaedl:threshold=0.5:window=7",
        "stop:signal=survival:threshold=0.2:window=7",
        "ddd:depth=8:top_k=6:num_tokens=24:check_levels=3/5:min_beam_logp=-1.0",
        "opt_tree:depth=6:top_k=8:num_tokens=24",
    )
}
"""On a fifth of the prompts; the small drafter too."""
Round = tuple[int, int, int]
"""Accepted draft tokens, verified nodes, drafted levels."""


class RoundLog:
    """Keeps what each round of each request did."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[Round]] = {}

    def on_round(self, record: RoundRecord) -> None:
        accepted, levels = record.num_accepted.tolist(), record.offered_depth.tolist()
        verified = (record.submitted >= 0).sum(1).tolist()
        for request, *done in zip(record.requests, accepted, verified, levels, strict=True):
            self.rounds.setdefault(request.prompt_id, []).append(tuple(done))


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Single turns: a later turn would be answered on its own text."""
    found = [p for p in load_prompts("embedded") if len(p.turns) == 1][:NUM_PROMPTS]
    assert len(found) == NUM_PROMPTS
    return found


@pytest.fixture(scope="module", params=["embedded", "embedded:small"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return load_pair("embedded", request.param, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def log(pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> DenseLog:
    folder = tmp_path_factory.mktemp("dense") / "traces"
    collect_dense(pair, share(pair, prompts), SETTINGS, folder, SHAPE, batch_size=8)
    return DenseLog.open(TraceSet.open(folder))


def share(pair: Pair, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """What the drafter of a pair is tried on; the small one on a fifth, for time."""
    return prompts if pair.drafter_name == "embedded" else prompts[::5]


@pytest.mark.parametrize("name", POLICIES)
def test_every_round_is_the_live_one(
    name: str, pair: Pair, prompts: list[Prompt], log: DenseLog
) -> None:
    check_equal(POLICIES[name], pair, share(pair, prompts), log)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_so_is_every_round_of_an_adaptive_policy(
    name: str, pair: Pair, prompts: list[Prompt], log: DenseLog
) -> None:
    check_equal(ADAPTIVE[name], pair, prompts[::5], log)


def check_equal(policy: Policy, pair: Pair, prompts: Sequence[Prompt], log: DenseLog) -> None:
    """Every round of these prompts, live and from the log."""
    live = RoundLog()
    decoder = Decoder(pair, policy, batch_size=8, observer=live)
    list(converse(decoder, prompts, SETTINGS))
    [replayed] = replay(log, [policy])
    assert not replayed.outcomes.missing.any()
    found = {p: rounds for p, rounds in rounds_of(replayed).items() if p in live.rounds}
    assert len(found) == len(prompts) == len(live.rounds)
    assert {p: (found[p], live.rounds[p]) for p in found if found[p] != live.rounds[p]} == {}
    lengths = {accepted for rounds in found.values() for accepted, *_ in rounds}
    deepest = build_shape(policy.shape).max_depth
    assert len(lengths) > min(3, deepest), "too tame to tell"


def rounds_of(rounds: Rounds) -> dict[str, list[Round]]:
    """The same from a replay."""
    o, found = rounds.outcomes, {}
    for row, request in enumerate(rounds.request.tolist()):
        prompt = rounds.prompt_ids[rounds.prompt[request]]
        done = int(o.accepted[row]), int(o.verified[row]), int(o.levels[row])
        found.setdefault(prompt, []).append(done)
    return found
