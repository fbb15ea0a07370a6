"""Features of the text: what a live round knows of it, a dense log knows too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specctl.collect.dense import collect_dense
from specctl.collect.live import collect_live
from specctl.collect.prompts import Prompt
from specctl.errors import TraceError
from specctl.features import NO_TEXT, node_features
from specctl.logs.logged_draft import logged_draft, recent_text
from specctl.logs.node_sample import logged_nodes
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import ENTROPIES, TEXT_COLUMNS, DenseLog
from specctl.policy import FullTree, Policy, StaticTree, build_shape
from specctl.policy.rules import BaseShape
from specctl.replay.outcomes import text_columns
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import Pair
from specctl.runtime.requests import RoundRecord
from tests.replay.equality import SETTINGS, single_turns
from tests.replay.text_policies import POLICY, TEXT

Prompts = list[Prompt]
WHOLE = FullTree(depth=4, top_k=3, width=27, nested=False)
"""Every node of four levels, so that no score asks for more."""


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return single_turns()[:200:12]


@pytest.fixture(scope="module")
def folder(pair: Pair, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("text") / "traces"
    collect_dense(pair, prompts, SETTINGS, out, WHOLE, batch_size=8)
    return out


@pytest.fixture(scope="module")
def log(folder: Path) -> DenseLog:
    return DenseLog.open(TraceSet.open(folder))


class Seen:
    """The text features of every round."""

    def __init__(self) -> None:
        self.rounds: dict[tuple[str, int], torch.Tensor] = {}

    def on_round(self, record: RoundRecord) -> None:
        values = node_features(record.pool, TEXT)
        for row, request in enumerate(record.requests):
            there = record.pool.valid[row]
            key = request.prompt_id, int(record.position[row])
            self.rounds[key] = values[row, there]


def test_the_log_gives_the_features_of_live_rounds(
    pair: Pair, prompts: Prompts, log: DenseLog
) -> None:
    live, num_seen, largest = Seen(), 0, torch.zeros(len(TEXT))
    list(Decoder(pair, POLICY, batch_size=3, observer=live).converse(prompts, SETTINGS))
    rule = build_shape(POLICY.shape)
    for chunk in log.chunks(extra=text_columns([POLICY]) + ENTROPIES):
        start = torch.from_numpy(chunk.positions.start)
        for request, prompt in enumerate(chunk.positions.prompt):
            rows = torch.arange(int(start[request]), int(start[request + 1]))
            draft = logged_draft(rule, chunk, rows)
            values = node_features(draft.pool, TEXT)
            for place in range(len(rows)):
                key = chunk.positions.prompt_ids[prompt], place + 1
                if key in live.rounds:
                    expected = live.rounds.pop(key)
                    found = values[place, draft.pool.valid[place]]
                    torch.testing.assert_close(found, expected, rtol=0, atol=0)
                    num_seen += 1
                    largest = torch.maximum(largest, expected.amax(0))
    assert not live.rounds
    assert num_seen > 50
    assert largest.tolist() == [3.0], "too tame to tell"


def test_some_prompts_of_a_log_keep_their_text(log: DenseLog) -> None:
    for chunk in log.chunks(extra=text_columns([POLICY]) + ENTROPIES):
        first, last = (int(edge) for edge in chunk.positions.start[-2:])
        [part] = log.only(chunk.positions.prompt_ids[-1:]).chunks(extra=TEXT_COLUMNS + ENTROPIES)
        assert torch.equal(recent_text(part, slice(None)), recent_text(chunk, slice(first, last)))
        assert (recent_text(part, slice(None)) != NO_TEXT).sum(1).tolist()[:3] == [1, 2, 3]


def test_a_log_read_without_tokens_and_live_traces_are_refused(
    pair: Pair, prompts: Prompts, folder: Path, log: DenseLog, tmp_path: Path
) -> None:
    assert text_columns([Policy(shape=StaticTree(depth=2, top_k=2, num_tokens=4))]) == ()
    with pytest.raises(TraceError, match=r"dense traces, which hold every token"):
        recent_text(next(log.chunks()), slice(0, 1))
    collect_live(pair, prompts[:2], POLICY, DecodeSettings(6), tmp_path / "live")
    asking = BaseShape(2, 2, 2, max_tokens=1, needs_text=True)
    batch = next(logged_nodes(TraceSet.open(folder)).batches(asking, [prompts[0].prompt_id]))
    assert node_features(batch.pool, TEXT).shape[2] == len(TEXT)
    with pytest.raises(TraceError, match=r"these are live.*collect with --dense"):
        next(logged_nodes(TraceSet.open(tmp_path / "live")).batches(asking))
