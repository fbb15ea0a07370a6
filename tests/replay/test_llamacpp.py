"""llama.cpp's rule for drafts and its rules at the end of a text, without llama.cpp.

`tests/engines/test_llamacpp.py` holds them to its server.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specctl.errors import TraceError, UsageError
from specctl.policy import FullTree
from specctl.replay.llamacpp import TextEnd, as_llamacpp
from specctl.replay.outcomes import Outcomes
from specctl.replay.rounds import replay
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.words import resolve_policy
from tests.engines.vllm_engine import packaged
from tests.replay.equality import check_equal, dense_log, few_prompts, rounds_of

SHAPE = FullTree(depth=6, top_k=10, width=1, nested=False)
LIMIT = 48
RECORDED = {
    ("eagle3", "chain:3"): [(38, 34), (27, 24), (21, 16), (42, 25), (45, 31)],
    ("eagle3", "p_min:threshold=0.5:window=5:min_draft_tokens=2"): [
        *((37, 37), (33, 24), (19, 13), (38, 25), (38, 32)),
    ],
    ("small", "p_min:window=3:min_draft_tokens=2"): [
        *((54, 27), (36, 22), (45, 7), (57, 20), (56, 28)),
    ],
    ("small", "p_min:threshold=0.5:window=5"): [
        *((27, 25), (25, 20), (26, 7), (27, 16), (30, 24)),
    ],
}
"""`draft_n` and `draft_n_accepted` of five prompts in llama.cpp, build 11549: float32, greedy."""


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {
        name: load_pair("embedded", f"embedded:{name}", device="cpu", dtype="float32")
        for name in ("eagle3", "small")
    }


@pytest.mark.parametrize(
    "words", ["p_min:threshold=0.5:window=5", "p_min:threshold=0.9:window=6:min_draft_tokens=3"]
)
def test_our_loop_drafts_by_its_rule(words: str, pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair, prompts = pairs["eagle3"], few_prompts()
    log = dense_log(pair, prompts, tmp_path, shape=SHAPE)
    check_equal(resolve_policy(words).policy, pair, prompts, log)


@pytest.mark.parametrize("name", ["eagle3", "small"])
def test_recorded_counts(name: str, pairs: dict[str, Pair], tmp_path: Path) -> None:
    """Texts end at the limit and at stop tokens, within a draft and behind it."""
    prompts = packaged(60)[:50:10]
    log = dense_log(pairs[name], prompts, tmp_path, DecodeSettings(LIMIT), SHAPE)
    log = replace(log, text_end=TextEnd(LIMIT, is_small=name == "small"))
    for (drafter, words), recorded in RECORDED.items():
        if drafter != name:
            continue
        [run] = replay(log, [resolve_policy(words).policy])
        assert run.bounds is not None
        assert (run.bounds.calls_low == run.bounds.calls_high).all()
        rounds = rounds_of(run)
        found = [
            (sum(verified - 1 for _, verified, _ in of), sum(accepted for accepted, *_ in of))
            for of in (rounds[prompt.prompt_id] for prompt in prompts)
        ]
        assert found == recorded


@pytest.mark.parametrize(
    ("is_small", "words", "verified", "levels"),
    [
        (False, "chain:num_draft_tokens=3", [4, 2, 1], [3, 3, 0]),
        (True, "chain:num_draft_tokens=3", [4, 2, 1], [3, 1, 0]),
        (False, "p_min:window=3:min_draft_tokens=2", [4, 2, 1], [3, 3, 0]),
        (True, "p_min:window=3:min_draft_tokens=2", [4, 1, 1], [3, 1, 0]),
    ],
)
def test_the_end_of_a_text_by_hand(
    words: str, verified: list[int], levels: list[int], *, is_small: bool
) -> None:
    """Ten tokens, the most there may be: 5, 2 and 1 are left, so 4, 1 and 0 may be drafted."""
    left: Any = SimpleNamespace(num_tokens=np.array([9]), remaining=np.array([5, 2, 1]))
    left.request = np.zeros(3, int)
    drafted = Outcomes.of(np.array([3, 0, 0]), verified=4, levels=3)
    found = TextEnd(10, is_small).applied(resolve_policy(words).policy, left, drafted)
    assert (found.verified.tolist(), found.levels.tolist()) == (verified, levels)
    assert found.accepted.tolist() == [3, 0, 0]


def test_rules_that_are_not_known() -> None:
    """Of a drafter that is not here, and of traces of two limits or none."""
    policy, nothing = resolve_policy("p_min:min_draft_tokens=2").policy, np.array([1])
    left: Any = SimpleNamespace(num_tokens=nothing, remaining=nothing, request=0 * nothing)
    with pytest.raises(UsageError, match="kind of the drafter"):
        TextEnd(9, None).applied(policy, left, Outcomes.of(nothing))
    for limits in ((8, 9), (None,)):
        sets: Any = [SimpleNamespace(collect={"max_new_tokens": one}) for one in limits]
        with pytest.raises(TraceError, match="do not state one limit"):
            TextEnd.of(SimpleNamespace(headers=sets))  # type: ignore[arg-type]


def test_policies_that_it_cannot_have() -> None:
    tree = resolve_policy("eagle2").policy
    assert as_llamacpp(tree) == resolve_policy("chain:6").policy
    for words in ("adasd_stop", "schedule:from_batch=1/5:num_draft_tokens=5/2"):
        with pytest.raises(UsageError, match="one setting"):
            as_llamacpp(resolve_policy(words).policy)
