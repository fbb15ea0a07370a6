"""llama.cpp's rule for drafts and its rules at the end of a text, without llama.cpp.

`tests/engines/test_llamacpp.py` holds them to its server.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specctl.errors import UsageError
from specctl.policy import FullTree
from specctl.replay.llamacpp import TextEnd, as_llamacpp
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


def test_policies_that_it_cannot_have() -> None:
    tree = resolve_policy("eagle2").policy
    assert as_llamacpp(tree) == resolve_policy("chain:6").policy
    for words in ("adasd_stop", "schedule:from_batch=1/5:num_draft_tokens=5/2"):
        with pytest.raises(UsageError, match="one setting"):
            as_llamacpp(resolve_policy(words).policy)
