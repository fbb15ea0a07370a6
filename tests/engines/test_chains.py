"""Policies on chains that someone else drafts: what they keep is what replay of the log says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specctl.collect.dense import collect_dense
from specctl.collect.prompts import load_prompts
from specctl.collect.recorder import RecorderConfig
from specctl.engines.chains import ChainPolicy, DraftedTokens
from specctl.errors import EngineError, LossyPolicyError, UsageError
from specctl.logs.logged_draft import recent_text
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import ENTROPIES, DenseLog, LogChunk
from specctl.policy import EntropyBins, FullTree, Policy, ScoredTree, StaticTree, as_chain
from specctl.replay.rounds import replay
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import load_pair
from specctl.runtime.words import resolve_policy
from tests.policy.scorers import random_network

K = 6
WORDS = (
    "chain:4",
    "schedule:from_batch=1/:num_draft_tokens=5/",
    "confidence:window=6:threshold=0.5",
    "svip:window=5:threshold=0.8",
    "adaedl:window=6:threshold=0.6",
    "stop:signal=survival:threshold=0.3:window=6",
    "adasd_stop:window=6:min_samples=1",
    "threshold:depth=6:min_prob=0.1",
    "opt_tree:depth=6:top_k=4:num_tokens=12:min_gain=0.3",
    "ddd:depth=6:top_k=4:num_tokens=12:check_levels=2/4:min_beam_logp=-0.7",
    "eagle2:5x4/16",
)
BINS = EntropyBins(base=StaticTree(depth=3, top_k=4, num_tokens=12), edges=(0.5, 1.5, 3.0), alpha=3)
FITTED = {
    "HeteroSpec": Policy(shape=BINS),
    "C2T's network": Policy(shape=ScoredTree(scorer=random_network(1), beta=0.3, depth=K)),
}
POLICIES = {words: resolve_policy(words).policy for words in WORDS} | FITTED


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> DenseLog:
    """Dense chains of a few prompts, in one segment however busy the machine is."""
    folder = tmp_path_factory.mktemp("chains") / "dense"
    pair, prompts = load_pair("embedded", "embedded", device="cpu"), load_prompts("embedded")[::30]
    with pytest.MonkeyPatch.context() as patch:
        one_segment = partial(RecorderConfig, flush_s=math.inf)
        patch.setattr("specctl.collect.dense.collection.RecorderConfig", one_segment)
        collect_dense(pair, prompts, DecodeSettings(24), folder, FullTree(depth=K, top_k=1))
    return DenseLog.open(TraceSet.open(str(folder)))


def as_an_engine(rules: ChainPolicy, chunk: LogChunk) -> tuple[Counter[int], Counter[int]]:
    """Decodes all requests of a log together, as an engine does that drafts chains of K: calls and
    verified draft tokens of each request."""
    positions, calls, drafted = chunk.positions, Counter[int](), Counter[int]()
    here = dict(enumerate(positions.start[:-1].tolist()))
    while here:
        requests, rows = list(here), torch.tensor(list(here.values()))
        recent = recent_text(chunk, rows) if rules.shape.needs_text else None
        draft = rules.begin([str(one) for one in requests], torch.zeros_like(rows), recent)
        nodes = chunk.root[rows]
        path = [nodes]
        while draft.wants_more:
            nodes = chunk.first_child[nodes]
            path.append(nodes)
            rules.grow(draft, level_of(chunk, nodes, rules))
        kept = rules.kept(draft).tolist()
        on_path = torch.stack([chunk.on_path[one] for one in path], 1).long().cumprod(1).bool()
        accepted = [int(on_path[row, 1 : n + 1].sum()) for row, n in enumerate(kept)]
        rules.observe(draft, range(len(kept)), accepted)
        for request, count, good in zip(requests, kept, accepted, strict=True):
            calls[request] += 1
            drafted[request] += count
            here[request] += good + 1
            if here[request] >= positions.start[request + 1]:
                del here[request]
                rules.forget([str(request)])
    return calls, drafted


def level_of(chunk: LogChunk, nodes: Tensor, rules: ChainPolicy) -> DraftedTokens:
    """Without what the rules say that they do not read."""
    assert chunk.token_ids is not None
    ids = chunk.token_ids[nodes].long()
    columns = [one[nodes] for one in (chunk.draft_logp, chunk.entropy, chunk.topk_entropy)]
    num_read = {"nothing": 0, "probability and entropy": 2, "everything": 3}[rules.reads]
    columns[num_read:] = [torch.full_like(one, torch.nan) for one in columns[num_read:]]
    return DraftedTokens(ids, *columns)


def rules_of(policy: Policy, **given: Any) -> ChainPolicy:
    sizes = {"max_levels": K, "batch_size": 16, "device": torch.device("cpu")}
    return ChainPolicy(policy, **(sizes | given))


@pytest.mark.parametrize("name", POLICIES)
@torch.inference_mode()
def test_an_engine_decides_as_replay_does(log: DenseLog, name: str) -> None:
    """Every family, of every request of a batch; memories too."""
    policy = POLICIES[name]
    [found] = replay(log, [as_chain(policy)])
    [chunk] = log.chunks(extra=("token_id", *ENTROPIES))
    calls, drafted = as_an_engine(rules_of(policy), chunk)
    size = found.positions.num_requests
    assert [calls[i] for i in range(size)] == np.bincount(found.request).tolist()
    verified = np.bincount(found.request, found.outcomes.verified - 1).astype(int)
    assert [drafted[i] for i in range(size)] == verified.tolist()


@torch.inference_mode()
def test_a_rule_that_is_asked_too_late_differs(log: DenseLog) -> None:
    """The comparison notices a level that is missed, and a memory that is lost."""
    [chunk] = log.chunks(extra=("token_id", *ENTROPIES))

    def shifted(rules: ChainPolicy) -> ChainPolicy:
        kept = rules.kept
        rules.kept = lambda draft: (kept(draft) + 1).clamp(max=draft.depth)  # type: ignore[method-assign]
        return rules

    def forgetful(rules: ChainPolicy) -> ChainPolicy:
        rules.observe = lambda *given: None  # type: ignore[method-assign]
        return rules

    mutants: dict[str, Callable[[ChainPolicy], ChainPolicy]] = {
        WORDS[3]: shifted,
        WORDS[6]: forgetful,
    }
    for words, mutate in mutants.items():
        policy = POLICIES[words]
        [found] = replay(log, [policy])
        calls, drafted = as_an_engine(mutate(rules_of(policy)), chunk)
        wanted = int(found.outcomes.verified.sum()) - len(found.request)
        assert (sum(calls.values()), sum(drafted.values())) != (len(found.request), wanted)


@torch.inference_mode()
def test_a_batch_shares_a_budget(log: DenseLog) -> None:
    """Three requests verify eight tokens, roots counted: the five likeliest of their drafts."""
    [chunk] = log.chunks(extra=("token_id", *ENTROPIES))
    rules = rules_of(resolve_policy("chain:4+survival:max_tokens=8").policy, batch_size=3)
    rows = torch.from_numpy(chunk.positions.start[:3])
    draft = rules.begin(["a", "b", "c"], torch.zeros_like(rows))
    nodes, joint = chunk.root[rows], torch.zeros(3)
    scores = []
    for _ in range(4):
        nodes = chunk.first_child[nodes]
        rules.grow(draft, level_of(chunk, nodes, rules))
        joint = joint + chunk.draft_logp[nodes]
        scores.append(joint)
    best = torch.stack(scores, 1).flatten().topk(5).values.min()
    assert rules.kept(draft).tolist() == (torch.stack(scores, 1) >= best).sum(1).tolist()


def test_a_level_is_what_the_drafter_says() -> None:
    """The token that the engine took, also where another is as likely."""
    logits = torch.tensor([[0.0, 2.0, 2.0, -torch.inf], [1.0, 0.0, -1.0, 3.0]])
    level = DraftedTokens.of(torch.tensor([2, 3]), logits)
    logp = logits.log_softmax(-1)
    assert level.token_ids.tolist() == [2, 3]
    assert torch.allclose(level.logp, torch.stack([logp[0, 2], logp[1, 3]]))
    assert torch.allclose(level.entropy, torch.special.entr(logp.exp()).sum(-1))


def test_what_cannot_run_is_refused() -> None:
    lossy = resolve_policy("chain+mars:theta=0.9", allow_lossy=True).policy
    with pytest.raises(LossyPolicyError, match="engine's own rule accepts"):
        rules_of(lossy)
    with pytest.raises(EngineError, match="num_speculative_tokens 20"):
        rules_of(resolve_policy("confidence").policy)
    with pytest.raises(UsageError, match="batch size"):
        rules_of(resolve_policy("chain:4+survival:max_tokens=8").policy)
    with pytest.raises(UsageError, match="cost"):
        rules_of(resolve_policy("chain:4+marginal:tokens_per_s=100", step_cost=None).policy)


@torch.inference_mode()
def test_failures_are_the_policys(log: DenseLog) -> None:
    """An exception of a rule, and a score that is not a number."""
    [chunk] = log.chunks(extra=("token_id", *ENTROPIES))
    nodes = chunk.first_child[chunk.root[:2]]

    def drafted(rules: ChainPolicy) -> None:
        draft = rules.begin(["a", "b"], torch.zeros(2).long())
        rules.grow(draft, level_of(chunk, nodes, rules))
        rules.kept(draft)

    broken = rules_of(POLICIES[WORDS[2]])
    broken.shape.grow = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        drafted(broken)
    unsound = rules_of(FITTED["C2T's network"])
    unsound.shape.unsound = lambda plan: torch.tensor([False, True])
    with pytest.raises(ArithmeticError, match="not a number in 1 requests"):
        drafted(unsound)
