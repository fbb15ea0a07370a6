"""llama.cpp's server on the embedded pair: its counts are those of replay, to the last token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("xllamacpp", reason="no xllamacpp here; make engines has it")
pytest.importorskip("gguf", reason="no gguf here; make engines has it")

from specctl.collect.dense.collection import collect_dense
from specctl.embedded import embedded_path
from specctl.engines.engine import EngineDrafter, Serving
from specctl.engines.gguf_files import write_eagle3, write_llama
from specctl.engines.llamacpp_flags import FILE, LLAMACPP, LlamaServer, read_file
from specctl.engines.llamacpp_server import Answer, Client, OwnServer
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import FullTree
from specctl.replay.llamacpp import log_of_engine
from specctl.replay.rounds import Rounds, replay
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import load_pair
from specctl.runtime.words import resolve_policy
from tests.engines.vllm_engine import ids_of, packaged

NUM_PROMPTS, NEW_TOKENS = 60, 48
METHODS = {"eagle3": "eagle3", "small": "draft_model"}
CHAINS = tuple(f"chain:num_draft_tokens={length}" for length in (1, 3, 5, 8))
STOPS = tuple(f"p_min:threshold={p}:window=5" for p in (0.3, 0.5, 0.7))
LEAST = ("p_min:window=3:min_draft_tokens=2", "p_min:threshold=0.5:window=5:min_draft_tokens=2")
AT_NIGHT = [
    pytest.param(words, marks=pytest.mark.nightly)
    for words in (CHAINS[0], CHAINS[2], STOPS[0], STOPS[2])
]
Counts = dict[str, list[int]]


@dataclass
class Ground:
    """A drafter's files and its log."""

    method: str
    target: Path
    drafter: Path
    log: DenseLog

    def settings(self, words: str, slots: int) -> LlamaServer:
        """As exported."""
        drafter = EngineDrafter(model=str(self.drafter), method=METHODS[self.method])
        serving = Serving(drafter=drafter, max_batch_size=slots, target=str(self.target))
        return read_file(LLAMACPP.write(resolve_policy(words).policy, serving).files[FILE])

    def server(self, words: str | None, slots: int = 1) -> Client:
        settings = None if words is None else self.settings(words, slots)
        sizes = {"slots": slots, "context_tokens": 512, "num_threads": 1}
        return Client(OwnServer(self.target, settings, exact=True, **sizes))

    def replayed(self, words: str) -> tuple[Rounds, Counts]:
        """Rounds, and of each request in order: rounds, drafted, accepted, tokens."""
        [run] = replay(self.log, [resolve_policy(words).policy], with_bounds=False)
        names = np.array(run.positions.prompt_ids)[run.positions.prompt]
        order = np.argsort(names)
        columns = {
            "rounds": np.ones(len(run.emitted)),
            "drafted": run.outcomes.verified - 1,
            "accepted": run.outcomes.accepted,
            "tokens": run.emitted,
        }
        return run, {
            name: np.bincount(run.request, of)[order].astype(int).tolist()
            for name, of in columns.items()
        }


@pytest.fixture(scope="module", params=["eagle3", "small"])
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    folder, name = tmp_path_factory.mktemp("llamacpp"), request.param
    target, drafter = folder / "target.gguf", folder / "drafter.gguf"
    write_llama(embedded_path("target"), target, "float32")
    write = write_eagle3 if name == "eagle3" else write_llama
    write(embedded_path(name), drafter, "float32", target=target)
    pair = load_pair("embedded", f"embedded:{name}", device="cpu", dtype="float32")
    shape = FullTree(depth=8, top_k=10, width=1, nested=False)
    settings, place = DecodeSettings(NEW_TOKENS), str(folder / "traces")
    collect_dense(pair, packaged(NUM_PROMPTS), settings, place, shape, batch_size=8)
    traces = TraceSet.open(place)
    return Ground(name, target, drafter, log_of_engine(DenseLog.open(traces), traces, "llamacpp"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return ids_of(packaged(NUM_PROMPTS))


@pytest.fixture(scope="module")
def plain(ground: Ground, prompts: list[list[int]]) -> list[str]:
    """The texts of plain decoding in llama.cpp."""
    answers = ground.server(None).complete_all(prompts, NEW_TOKENS)
    return [answer.text for answer in answers]


def counted(answers: list[Answer]) -> Counts:
    timings = [answer.timings for answer in answers]
    return {
        "drafted": [one.draft_n for one in timings],
        "accepted": [one.draft_n_accepted for one in timings],
        "tokens": [one.predicted_n - 1 for one in timings],
    }


@pytest.mark.parametrize("words", [CHAINS[1], CHAINS[3], STOPS[1], *LEAST, *AT_NIGHT])
def test_counts_are_as_predicted(
    words: str, ground: Ground, prompts: list[list[int]], plain: list[str]
) -> None:
    """One slot: each request's rounds, drafted and accepted tokens; texts of plain decoding."""
    run, expected = ground.replayed(words)
    client, rounds, answers, before = ground.server(words), [], [], 0.0
    for prompt in prompts:
        answers.append(client.complete(prompt, NEW_TOKENS))
        passes = client.counters()["n_decode_total"]
        rounds.append(int(passes - before) - 1)  # less that of the prompt
        before = passes
    assert [answer.text for answer in answers] == plain
    assert {"rounds": rounds, **counted(answers)} == expected
    drafts = client.counters()["spec_decode_num_drafts_total"]
    assert drafts == (run.outcomes.verified > 1).sum()


@pytest.mark.parametrize("words", [LEAST[1], *AT_NIGHT])
def test_four_slots_change_no_request(
    words: str, ground: Ground, prompts: list[list[int]], plain: list[str]
) -> None:
    """Also the number of rounds that draft, over all."""
    run, expected = ground.replayed(words)
    client = ground.server(words, slots=4)
    answers = client.complete_all(prompts, NEW_TOKENS, together=4)
    assert [answer.text for answer in answers] == plain
    assert counted(answers) == {name: of for name, of in expected.items() if name != "rounds"}
    drafts = client.counters()["spec_decode_num_drafts_total"]
    assert drafts == (run.outcomes.verified > 1).sum()
