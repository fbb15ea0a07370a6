"""Captured rounds against the ordinary loop: the same text, and the same decisions.

On the tape (`tape.py`), so that lengths, offsets and parameters that Python baked in would show: a
replay sees only what stands in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.errors import ModelError
from specctl.kernels.bookkeeping import Laid, lay_out
from specctl.kernels.policy_eval import Bins
from specctl.kernels.policy_eval.layout import B2
from specctl.kernels.tree_build import BuiltTree, link_tree
from specctl.policy import (
    Chain,
    DynamicDepth,
    ElasticBudget,
    EntropyStop,
    JensenShannon,
    JointThreshold,
    MarginalBudget,
    Mars,
    Policy,
    Ratio,
    RootOnly,
    Shape,
    SignalStop,
    StaticTree,
    StepCost,
    SurvivalBudget,
)
from specctl.policy.budgets import Calibration
from specctl.runtime import deciders
from specctl.runtime.cached_model import CachedModel, ForwardResult
from specctl.runtime.capture import GraphSettings, TierChoice
from specctl.runtime.requests import Sampling
from specctl.runtime.state import Rows
from specctl.tree import DraftPool
from tests.kernels.rounds import SHAPES
from tests.runtime.captured import (
    HostReadError,
    TapeCapture,
    assert_same_rounds,
    check_captured,
    decode,
    drive,
    make_loop,
    ordinary,
    requests,
    run,
    same_as_ordinary,
    small_pair,
    tape,
)
from tests.runtime.toy import Kept, join_at_random, texts_of

TREE = StaticTree(depth=4, top_k=4, num_tokens=20)
COSTS = StepCost(token_counts=(1, 8, 16, 48, 96), step_us=(100.0, 110.0, 140.0, 330.0, 700.0))
DOUBT = Calibration(slopes=(0.7, 1.2), intercepts=(0.3, -0.2))
BUDGETS = {
    "survival": SurvivalBudget(max_tokens=30),
    "survival by cost": SurvivalBudget(costs=COSTS),
    "survival calibrated": SurvivalBudget(max_tokens=30, calibration=DOUBT),
    "marginal": MarginalBudget(tokens_per_s=20_000.0, costs=COSTS),
    "marginal calibrated": MarginalBudget(tokens_per_s=20_000.0, costs=COSTS, calibration=DOUBT),
    "elastic": ElasticBudget(max_tokens=30, default_width=2, max_width=4),
}
POLICIES = {
    "ar": Policy(shape=RootOnly()),
    "chain": Policy(shape=Chain(num_draft_tokens=4)),
    **{name: Policy(shape=shape) for name, shape in SHAPES.items()},
    **{
        name: Policy(shape=SHAPES["echo" if name == "elastic" else "eagle2"], budget=budget)
        for name, budget in BUDGETS.items()
    },
}
DRAWN = (Sampling(), Sampling(0.8), Sampling(1.0, top_k=20), Sampling(1.1, top_p=0.8))


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_decides_as_in_the_ordinary_loop(name: str) -> None:
    check_captured(same_as_ordinary(POLICIES[name], requests(3), tape(stop_waits="always")))


@pytest.mark.parametrize("name", ["hetero", "echo", "threshold uncapped", "c2t joint"])
def test_without_waiting_rows_that_stopped_are_dropped_on_the_device(name: str) -> None:
    found = same_as_ordinary(POLICIES[name], requests(3), tape(stop_waits="never"), batch_size=1)
    rounds = sum(calls for calls, *_ in found.counts.values())
    assert found.loop.graph_counters.planned_waits == rounds  # one copy a round


def test_small_model_drafts_on_the_device() -> None:
    given, policy = requests(3), Policy(shape=SHAPES["threshold"])
    found = decode(policy, given, tape(stop_waits="always"), of=small_pair())
    plain = decode(policy, given, None, of=small_pair())
    assert (found.texts, found.counts) == (plain.texts, plain.counts)
    check_captured(found)


@pytest.mark.parametrize("form", ["ratio", "margin", "prob_ratio"])
def test_relaxed_texts_are_the_ordinary_loops(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the runner-up of the kernel's walk, as on a GPU, and by MARS's own rule; and with all
    tokens of those texts denied."""
    theta = {"ratio": 0.5, "margin": 3.0, "prob_ratio": 0.05}[form]
    policy = Policy(shape=TREE, acceptance=Mars(form=form, theta=theta))
    given = requests(4, (*DRAWN[:3], Sampling(1.0, top_k=1)))
    strict, plain = (ordinary(one, given).texts for one in (Policy(shape=TREE), policy))
    emitted = tuple({token for text in plain.values() for token in text})
    denied = policy.acceptance.model_copy(update={"deny_token_ids": emitted})
    refusing = Policy(shape=TREE, acceptance=denied)
    without = ordinary(refusing, given).texts
    assert plain not in (strict, without)
    monkeypatch.setattr("specctl.runtime.verifying.runs_fused", lambda *_: True)
    for wanted, one in ((plain, policy), (without, refusing)):
        found = decode(one, given, tape())
        assert found.texts == wanted
        check_captured(found)


def test_requests_join_and_leave_at_any_time() -> None:
    given, policy = requests(9, DRAWN), Policy(shape=SHAPES["echo"])
    loop = make_loop(policy, given, tape(), batch_size=4)
    done = join_at_random(loop, given, Random(4))
    assert texts_of(done) == ordinary(policy, given, batch_size=1).texts


class ChoiceOf(TierChoice):
    """Always the smallest tier, whatever is needed."""

    def choose(self, tiers: tuple[int, ...], num_rows: int, known: int | None = None) -> int:
        return tiers[0]


def test_tree_beyond_its_tier_is_cut_to_its_likeliest_nodes() -> None:
    """Then rounds are shorter, and the text is the same."""
    given = requests(4)
    policy = Policy(shape=JointThreshold(depth=4, top_k=4, min_prob=1e-6, num_tokens=20))
    loop = make_loop(policy, given, tape(flat_tokens=8))
    loop.round.choice = ChoiceOf()
    found, plain = run(loop, given), ordinary(policy, given)
    assert found.texts == plain.texts
    calls, verified, _ = (sum(c) for c in zip(*found.counts.values(), strict=True))
    assert verified <= 8 * calls
    assert calls > sum(c for c, *_ in plain.counts.values())


@pytest.mark.parametrize("name", ["eagle2", "echo"])
def test_observers_see_the_same_rounds(name: str) -> None:
    """Read at the end: records outlive their round, whose memory the next ones use again."""
    given, policy, seen, wanted = requests(2), Policy(shape=SHAPES[name]), Kept(), Kept()
    decode(policy, given, tape(), batch_size=2, observer=seen)
    decode(policy, given, None, batch_size=2, observer=wanted)
    assert_same_rounds(seen, wanted, at_least=3)


# faults


def broken(*_: object, **__: object) -> None:
    raise ValueError("no such bin")


@pytest.mark.policy_faults
@pytest.mark.parametrize(
    ("name", "decision"),
    [
        ("hetero", "runtime.deciders.choose_bins"),
        ("survival", "policy.budgets.CostedRule.share"),
    ],
)
def test_decision_that_fails_costs_its_round_a_static_plan(
    name: str, decision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, policy = requests(2), POLICIES[name]
    plain = ordinary(policy, given)
    monkeypatch.setattr(f"specctl.{decision}", broken)
    found = decode(policy, given, tape())
    faults = found.loop.faults
    assert found.texts == plain.texts
    assert faults.total > 0
    assert faults.last == "ValueError: no such bin"
    assert found.loop.graph_counters.failed_captures == 0


@pytest.mark.policy_faults
def test_score_that_is_no_number_costs_its_request_the_policys_choice() -> None:
    """The network's last bias becomes NaN in the buffer, in the middle of a text."""
    given, policy = requests(3), Policy(shape=SHAPES["c2t joint"])
    plain, loop = ordinary(policy, given), make_loop(policy, given, tape())

    def spoil() -> None:
        kernels = loop.round.kernels
        assert kernels is not None
        assert kernels.decider.params is not None
        with torch.inference_mode():
            kernels.decider.params.storage[B2] = torch.nan

    done = drive(loop, given, {2: spoil})
    assert texts_of(done.values()) == plain.texts
    assert loop.faults.total > 0
    assert str(loop.faults.last).startswith("a score is not a number in ")
    assert sum(one.metrics.fallback_calls for one in done.values()) > 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("graphs", [tape(), None], ids=["captured", "ordinary"])
def test_logits_that_are_no_numbers_are_an_error_never_a_token(
    graphs: GraphSettings | None, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, policy = requests(1), Policy(shape=TREE)
    loop = make_loop(policy, given, graphs)
    loop.submit(given[0])
    loop.step()
    forward = loop.target.forward

    def poisoned(*args: object, **named: object) -> object:
        result = forward(*args, **named)  # type: ignore[arg-type]
        result.logits[1, 5].fill_(bad)
        return result

    monkeypatch.setattr(loop.target, "forward", poisoned)
    with pytest.raises(ModelError, match="NaN or infinity"):
        loop.step()


# reload


def altered(name: str, **fields: object) -> Shape:
    return SHAPES[name].model_copy(update=fields)


WIDE = StaticTree(depth=6, top_k=6, num_tokens=40)
ON_HOST = DynamicDepth(depth=4, top_k=4, num_tokens=20, check_levels=(2,))
RELOADS = {
    "other edges": (SHAPES["hetero"], altered("hetero", edges=(2.0, 5.0))),
    "another threshold": (altered("threshold", min_prob=0.02), SHAPES["threshold"]),
    "a threshold that fewer nodes can reach": (
        SHAPES["threshold"],
        altered("threshold", min_prob=0.4),
    ),
    "a smaller tree": (WIDE, SHAPES["eagle2"]),
    "gates": (WIDE, SHAPES["echo"]),
    "decisions on the host": (WIDE, ON_HOST),
}


@pytest.mark.parametrize("name", RELOADS)
def test_reloaded_policy_is_the_one_that_decides(name: str) -> None:
    """From its first round on as in a loop that began with it; other edges and thresholds are
    written into the buffer of the graphs that are there."""
    given, (old, new) = requests(4), (Policy(shape=shape) for shape in RELOADS[name])
    plain, loop = ordinary(old, given[:2]), make_loop(old, given, tape())
    before, captures = loop.round, list[int]()

    def reload() -> None:
        captures.append(loop.graph_counters.captures)
        loop.reload(new)

    done = drive(loop, given[:2], {2: reload})
    assert texts_of(done.values()) == plain.texts
    assert captures[0] > 0
    assert (loop.round is before) == (name in ("other edges", "another threshold"))
    found, fresh = run(loop, given[2:]), ordinary(new, given[2:])
    assert (found.texts, found.counts) == (fresh.texts, fresh.counts)
    assert loop.graph_counters.captures > 0


def test_drafter_reads_on_while_plain_decoding_takes_over() -> None:
    given, tree, plain = requests(2, new_tokens=40), Policy(shape=TREE), Policy(shape=RootOnly())

    def changing(graphs: GraphSettings | None) -> dict[str, tuple[int, ...]]:
        loop = make_loop(tree, given, graphs, batch_size=2)
        turns = {2: lambda: loop.reload(plain), 8: lambda: loop.reload(tree)}
        done = drive(loop, given, turns)
        return {name: tuple(one.metrics.accepted_lengths) for name, one in done.items()}

    assert changing(tape()) == changing(None)


# what cannot be captured


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB."),
        RuntimeError("operation not permitted when stream is capturing"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_decision_that_cannot_be_captured_is_no_fault_of_the_policy(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, policy, tapes = requests(2), Policy(shape=SHAPES["hetero"]), TapeCapture()
    plain, choose = ordinary(policy, given), deciders.choose_bins

    def failing(*args: Any) -> Bins:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:  # recorded
            raise error
        return choose(*args)

    monkeypatch.setattr(deciders, "choose_bins", failing)
    found = decode(policy, given, GraphSettings(capture=tapes, stop_waits="always"))
    assert (found.texts, found.counts) == (plain.texts, plain.counts)
    assert found.loop.faults.total == 0
    assert tapes.num_forgotten == found.loop.graph_counters.failed_captures > 0
    assert found.loop.graph_counters.captures > 0


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (Policy(shape=DynamicDepth()), "shape ddd has torch rules only"),
        (Policy(shape=DynamicDepth(), budget=SurvivalBudget(max_tokens=60)), "torch rules only"),
        (Policy(shape=StaticTree(depth=6, top_k=32, num_tokens=60)), "5153 slots of a pool"),
        (Policy(shape=EntropyStop(window=3)), "torch rules only"),
    ],
)
def test_rules_without_kernels_draft_between_graphs(
    policy: Policy, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "specctl.graphs"):
        found = same_as_ordinary(policy, requests(3), tape())
    assert reason in caplog.text
    assert found.loop.round.kernels is None
    assert found.loop.graph_counters.replays > 0
    assert found.loop.graph_counters.failed_captures == 0


DRAWN_STOP = SignalStop(signal="sqrt_entropy", threshold=1.2, window=4, keep_last=False)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(shape=TREE, acceptance=JensenShannon()),
        Policy(shape=DRAWN_STOP, acceptance=Ratio()),
    ],
    ids=lambda policy: policy.acceptance.kind,
)
def test_acceptances_without_kernels_judge_between_graphs(policy: Policy) -> None:
    given = requests(3, DRAWN if policy.acceptance == Ratio() else (Sampling(),))
    found = same_as_ordinary(policy, given, tape())
    assert found.loop.round.kernels is None
    assert found.loop.graph_counters.replays > found.loop.graph_counters.captures > 0


def test_a_warm_up_captures_every_tier_and_level() -> None:
    """No capture of 50 to 200 ms falls into a round that a user waits for."""
    given, policy = requests(5), Policy(shape=SHAPES["echo"])
    loop = make_loop(policy, given, tape(flat_tokens=1), batch_size=3)
    loop.warm_up()
    captures, keys = loop.graph_counters.captures, loop.round.graphs.keys
    assert len({key[2] for key in keys if key[:2] == ("ask", 2)}) > 2
    found = run(loop, given)
    assert found.texts == ordinary(policy, given).texts
    assert loop.graph_counters.captures == captures


def test_the_number_of_graphs_is_bounded() -> None:
    """Five batch buckets of up to 16 requests, and at most five sizes of verification in each."""
    given = requests(1)
    loop = make_loop(Policy(shape=SHAPES["hetero"]), given, tape(), batch_size=16)
    most = loop.rules.shape.max_tokens
    sizes = [loop.round._tiers_of(bucket) for bucket in (1, 2, 4, 8, 16)]
    assert [len(each) for each in sizes] == [
        max(1, (b * most - 1).bit_length() - 5) for b in (1, 2, 4, 8, 16)
    ]
    loop.warm_up()
    waiting = 3 * (loop.rules.shape.max_depth + 1)  # a graph a level and one to select
    assert len(loop.round.graphs.keys) == sum(map(len, sizes)) + waiting + 2 + 5


def test_logits_of_all_graphs_share_one_memory() -> None:
    loop = make_loop(Policy(shape=TREE), requests(4), tape(), batch_size=4, observer=Kept())
    loop.warm_up()
    graphs = loop.round.graphs
    logits = [graphs._graphs[key].found.logits for key in graphs.keys if key[0] == "ask"]
    assert len(logits) > 1
    assert len({each.untyped_storage().data_ptr() for each in logits}) == 1


def test_model_that_cannot_be_captured_ends_the_captures_of_its_loop_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """E.g. experts that are counted on the host."""
    given, policy, forward = requests(2), Policy(shape=TREE), CachedModel.forward

    def asking(self: CachedModel, reads: Any) -> ForwardResult:
        result = forward(self, reads)
        assert int(result.logits.argmax()) >= 0
        return result

    plain = ordinary(policy, given)
    with monkeypatch.context() as patch:
        patch.setattr(CachedModel, "forward", asking)
        found = decode(policy, given, tape(capture=TapeCapture(lenient=True)))
    assert found.texts == plain.texts
    assert found.loop.graph_counters.failed_captures == 1
    assert "item; this loop captures nothing from now on" in caplog.text
    check_captured(decode(policy, given, tape()))


# mutants: what the tape must notice


def bakes_in_positions(patch: pytest.MonkeyPatch) -> None:
    first: list[Tensor] = []

    def stale(
        pool: DraftPool, submitted: Tensor, max_depth: int, *, positions: Tensor
    ) -> BuiltTree:
        first.append(positions.clone())
        return link_tree(pool, submitted, max_depth, first[0])

    patch.setattr("specctl.runtime.verifying.link_tree", stale)


def leaves_the_prefix_where_it_was(patch: pytest.MonkeyPatch) -> None:
    def advance(self: Rows, root_ids: Tensor, counts: Tensor) -> None:
        self.root_ids.copy_(root_ids)
        self.stable.add_(counts)

    patch.setattr(Rows, "advance", advance)


def commits_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("specctl.runtime.cached_model.commit_kv", lambda *_: None)


@pytest.mark.parametrize(
    "mutant", [bakes_in_positions, leaves_the_prefix_where_it_was, commits_nothing]
)
def test_mutant_is_killed(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, policy = requests(2), Policy(shape=TREE)
    plain = ordinary(policy, given)
    mutant(monkeypatch)
    assert decode(policy, given, tape(), batch_size=1).texts != plain.texts


def test_mutant_that_asks_the_device_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def asking(tree: BuiltTree, *args: Tensor, **sizes: int) -> Laid:
        assert int(tree.num_nodes.max()) > 0
        return lay_out(tree, *args, **sizes)

    monkeypatch.setattr("specctl.runtime.verifying.lay_out", asking)
    with pytest.raises(HostReadError):
        decode(Policy(shape=TREE), requests(1), tape(), batch_size=1)
