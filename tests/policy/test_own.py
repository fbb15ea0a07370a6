"""A rule of one's own decides in replay and in the loop as a family of the same rule does, and what
is no tree is refused in both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl import Decoder
from specctl.artifacts import Origin, save_artifact
from specctl.errors import ArtifactError, RecordError, SpecctlError, UsageError
from specctl.logs.trace_set import TraceSet
from specctl.policy import Chain, OwnShape, Policy, Ratio, StaticTree, parse_policy, policy_json
from specctl.policy.rules import BaseShape, Frontier, Level, Plan, stop_rows
from specctl.replay.cost.files import save_cost_model
from specctl.replay.run import compare_policies
from specctl.tree import DraftPool
from tests.replay.costs import table_model
from tests.replay.logs import random_traces


@dataclass(kw_only=True)
class StopBelow(BaseShape):
    least_prob: float

    def grow(self, plan: Plan, level: Level) -> Frontier:
        stop_rows(plan, level, level.joint_logp.amax(1) < math.log(self.least_prob))
        return super().grow(plan, level)


class FromTheRoot(BaseShape):
    def grow(self, plan: Plan, level: Level) -> Frontier:
        found = super().grow(plan, level)
        return Frontier(torch.zeros_like(found.index), found.keep)


class TooWide(BaseShape):
    def grow(self, plan: Plan, level: Level) -> Frontier:
        found = super().grow(plan, level)
        return Frontier(*(part.repeat(1, 2) for part in (found.index, found.keep)))


class Orphans(BaseShape):
    def select(self, plan: Plan, pool: DraftPool) -> torch.Tensor:
        last = torch.full((plan.num_rows, 1), pool.num_slots - 1)
        return torch.cat([torch.zeros_like(last), last], 1)


class TooMany(BaseShape):
    def select(self, plan: Plan, pool: DraftPool) -> torch.Tensor:
        return torch.arange(pool.num_slots).expand(plan.num_rows, -1)


SIZES = {"max_depth": 3, "top_k": 2, "width": 2, "max_tokens": 6}
TREE = StaticTree(depth=3, top_k=2, num_tokens=6)


def own(rule: Any, name: str = "mine") -> Policy:
    return Policy(shape=OwnShape(name=name, rule=rule))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    folder = tmp_path_factory.mktemp("dense") / "traces"
    return random_traces(folder, num_prompts=8, depth=3, top_k=2)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder.from_pretrained("embedded", "embedded", policy="ar", device="cpu")


def test_it_is_scored_as_a_family_of_the_same_rule(traces: TraceSet) -> None:
    policies: dict[str, Policy | str] = {
        "eagle2:3x2/6": "eagle2:3x2/6",
        "tree": own(BaseShape(**SIZES)),
        "stop": own(StopBelow(**SIZES, least_prob=0.5)),
        "never": own(StopBelow(**SIZES, least_prob=1e-9)),
    }
    for options in ({}, {"in_order": True}):
        rows = [
            getattr(one, "pooled", one)
            for one in compare_policies(traces, policies, **options).scores.policies
        ]
        assert [one.policy for one in rows] == [*policies]
        counts = [(one.calls, one.num_accepted) for one in rows]
        assert counts[0] == counts[1] == counts[3] != counts[2]
    load = compare_policies(traces, policies, batch_size=2, cost_model="line")
    assert [one.policy for one in load.scores.policies] == [*policies]


def test_it_decodes_as_a_family_of_the_same_rule(decoder: Decoder) -> None:
    texts = []
    for policy in (Policy(shape=TREE), own(BaseShape(**SIZES))):
        [found] = Decoder(decoder.pair, policy).generate("def add(a, b):", max_new_tokens=12)
        texts.append((found.token_ids, found.metrics.accepted_lengths))
    assert texts[0] == texts[1]
    stopping = Decoder(decoder.pair, own(StopBelow(**SIZES, least_prob=0.9)))
    [found] = stopping.generate("def add(a, b):", max_new_tokens=12)
    assert found.token_ids == texts[0][0]
    assert found.metrics.drafted_levels < 3 * found.metrics.calls
    assert repr(stopping).endswith("policy='mine', batch_size=1)")
    loop = decoder.loop_for(64)
    with pytest.raises(UsageError, match="began without a drafter"):
        loop.reload(own(BaseShape(**SIZES)))


@pytest.mark.parametrize("kind", [FromTheRoot, TooWide, Orphans, TooMany])
def test_what_is_no_tree_is_refused(
    kind: type[BaseShape], decoder: Decoder, traces: TraceSet
) -> None:
    policy = own(kind(**SIZES))
    grows = kind in (FromTheRoot, TooWide)
    words = "grows from other places" if grows else "the rule mine submits what is no tree"
    with pytest.raises(UsageError, match=words):
        Decoder(decoder.pair, policy).generate("def add(a, b):", max_new_tokens=12)
    with pytest.raises(UsageError, match=words):
        compare_policies(traces, {"mine": policy})


def test_what_holds_parameters_refuses_it(
    traces: TraceSet, decoder: Decoder, tmp_path: Path
) -> None:
    policy, chain = own(BaseShape(**SIZES)), own(BaseShape(3, 1, 1, 4))
    with pytest.raises(
        RecordError, match=r"the rule x lacks max_depth, top_k, .*observe of ShapeRu"
    ):
        OwnShape(name="x", rule=lambda level: level)
    with pytest.raises(ArtifactError, match=r"the rule mine is Python's, .*; make it a family"):
        save_artifact(tmp_path / "a", policy, Origin(pair=decoder.pair.fingerprint), card="# -\n")
    with pytest.raises(UsageError, match=r"shape\.own\.rule: it is missing"):
        parse_policy(policy_json(policy))
    with pytest.raises(SpecctlError, match=r"ratio needs a chain .* own may withhold tokens"):
        Policy(shape=chain.shape, acceptance=Ratio())
    in_vllm: dict[str, Any] = {"engine": "vllm", "in_order": True}
    with pytest.raises(UsageError, match="drafts trees, and engines draft chains"):
        compare_policies(traces, {"mine": policy}, **in_vllm)
    calls = [
        one.calls
        for one in compare_policies(
            traces, {"mine": chain, "chain": Policy(shape=Chain(num_draft_tokens=3))}, **in_vllm
        ).scores.policies
    ]
    assert calls[0] == calls[1]


def test_a_clock_that_cannot_time_it_says_so(traces: TraceSet, tmp_path: Path) -> None:
    save_cost_model(table_model(), tmp_path / "clock.json")
    policies: dict[str, Policy | str] = {"ar": "ar", "mine": own(BaseShape(**SIZES))}
    told = " ".join(
        map(str, compare_policies(traces, policies, cost_model=tmp_path / "clock.json").lines)
    )
    assert "so it cannot win; decode under it to see what they take" in told
