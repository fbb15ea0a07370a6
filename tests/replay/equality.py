"""Live runs against one log, round for round: what the equality tests share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specctl.collect.dense import collect_dense
from specctl.collect.prompts import Prompt, load_prompts
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import Chain, EntropyBins, FullTree, Policy, RootOnly, StaticTree, build_shape
from specctl.replay.rounds import Rounds, replay
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import Pair
from specctl.runtime.requests import RoundRecord
from specctl.runtime.words import resolve_policy
from tests.runtime.captured import NUM_PROMPTS

SETTINGS = DecodeSettings(16)
SHAPE = FullTree(depth=8, top_k=8)
BASE = StaticTree(depth=5, top_k=8, num_tokens=24)
POLICIES = {
    "ar": Policy(shape=RootOnly()),
    "chain 6": Policy(shape=Chain(num_draft_tokens=6)),
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
        "threshold:depth=8:top_k=8:min_prob=0.03:min_level_prob=0.4",
        "threshold:depth=6:top_k=5:min_prob=0.01:num_tokens=16",
        "echo:depth=7:gate_levels=1/3:thresholds=0.5/0.2:max_width=8",
        "echo:depth=8:width=1:max_width=6:gate_levels=2/4:thresholds=0.4/0.1:num_tokens=7",
        # With memory: what a round learns decides the next, so one slip would move all the rest.
        "adasd_stop:window=7:between=rejected:min_samples=1:keep_last=false",
        "adasd_stop:window=6:top_k=4:num_tokens=20:min_samples=1",
    )
}
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


def single_turns() -> list[Prompt]:
    """Held-out prompts; a later turn would be answered on its own text."""
    return [prompt for prompt in load_prompts("embedded") if len(prompt.turns) == 1]


def few_prompts() -> list[Prompt]:
    """16 of them at most, on which no policy here wants more than their log holds."""
    return single_turns()[: 192 : 192 // min(NUM_PROMPTS, 16)]


def dense_log(
    pair: Pair,
    prompts: Sequence[Prompt],
    folder: Path,
    settings: DecodeSettings = SETTINGS,
    shape: FullTree = SHAPE,
) -> DenseLog:
    """The prompts' dense traces, opened for replay."""
    collect_dense(pair, prompts, settings, folder, shape, batch_size=8)
    return DenseLog.open(TraceSet.open(folder))


def check_equal(
    policy: Policy, pair: Pair, prompts: Sequence[Prompt], log: DenseLog, *, batch_size: int = 8
) -> None:
    """Every round of these prompts, live and from the log."""
    live = RoundLog()
    decoder = Decoder(pair, policy, batch_size=batch_size, observer=live)
    list(decoder.converse(prompts, SETTINGS))
    [replayed] = replay(log, [policy])
    assert not replayed.outcomes.missing.any()
    bounds = replayed.bounds
    assert (bounds.calls_low == bounds.calls_high).all()
    assert (bounds.verified_low == bounds.verified_high).all()
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
        prompt = rounds.positions.prompt_ids[rounds.positions.prompt[request]]
        done = int(o.accepted[row]), int(o.verified[row]), int(o.levels[row])
        found.setdefault(prompt, []).append(done)
    return found
