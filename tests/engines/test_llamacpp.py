"""llama.cpp's server on the embedded pair: its counts are those of replay, to the last token."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("xllamacpp", reason="no xllamacpp here; make engines has it")
pytest.importorskip("gguf", reason="no gguf here; make engines has it")

from specctl.collect.dense.collection import collect_dense
from specctl.embedded import embedded_path
from specctl.engines.engine import EngineDrafter, Serving
from specctl.engines.gguf_files import write_model
from specctl.engines.llamacpp_flags import FILE, LLAMACPP, LlamaServer, read_file
from specctl.engines.llamacpp_server import Answer, OwnServer
from specctl.errors import EngineError
from specctl.logs.importing import import_files
from specctl.logs.sources import Source
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import FullTree
from specctl.replay.cost.files import load_cost_model
from specctl.replay.cost.rates import EngineCost
from specctl.replay.llamacpp import log_of_engine
from specctl.replay.rounds import Rounds, replay
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import load_pair
from specctl.runtime.words import resolve_policy
from tests.cli.command import passes
from tests.engines.exports import AS_IT_IS, exported
from tests.engines.vllm_engine import METHODS, ids_of, packaged

NUM_PROMPTS, NEW_TOKENS = 24, 48
FORMATS = ("prometheus", "log", "answers")
CHAINS = tuple(f"chain:{length}" for length in (1, 3, 5, 8))
STOPS = tuple(f"p_min:threshold={p}:window=5" for p in (0.3, 0.5, 0.7))
LEAST = ("p_min:window=3:min_draft_tokens=2", "p_min:threshold=0.5:window=5:min_draft_tokens=2")
AT_NIGHT = [
    pytest.param(words, marks=pytest.mark.nightly) for words in (*CHAINS[:3], *STOPS, LEAST[0])
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

    def server(self, words: str | None, slots: int = 1) -> OwnServer:
        settings = None if words is None else self.settings(words, slots)
        sizes = {"slots": slots, "context_tokens": 512, "num_threads": 1}
        return OwnServer(self.target, settings, exact=True, **sizes)

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
    write_model(embedded_path("target"), target, "float32")
    write_model(embedded_path(name), drafter, "float32", target=target)
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
    answers = complete_all(ground.server(None), prompts)
    return [answer.text for answer in answers]


def complete_all(client: OwnServer, prompts: list[list[int]], together: int = 1) -> list[Answer]:
    with ThreadPoolExecutor(together) as pool:
        return list(pool.map(lambda one: client.complete(one, NEW_TOKENS), prompts))


def counters(client: OwnServer) -> dict[str, float]:
    found = re.findall(r"^llamacpp:(\w+) ([-+.\deE]+)$", client.metrics(), re.M)
    return {name: float(value) for name, value in found}


def counted(answers: list[Answer]) -> Counts:
    timings = [answer.timings for answer in answers]
    return {
        "drafted": [one.draft_n for one in timings],
        "accepted": [one.draft_n_accepted for one in timings],
        "tokens": [one.predicted_n - 1 for one in timings],
    }


@pytest.mark.parametrize("words", [CHAINS[3], LEAST[1], *AT_NIGHT])
def test_counts_are_as_predicted(
    words: str, ground: Ground, prompts: list[list[int]], plain: list[str]
) -> None:
    """One slot: each request's rounds, drafted and accepted tokens; texts of plain decoding."""
    run, expected = ground.replayed(words)
    client, rounds, answers, before = ground.server(words), [], [], 0.0
    for prompt in prompts:
        answers.append(client.complete(prompt, NEW_TOKENS))
        passes = counters(client)["n_decode_total"]
        rounds.append(int(passes - before) - 1)  # less that of the prompt
        before = passes
    assert [answer.text for answer in answers] == plain
    assert {"rounds": rounds, **counted(answers)} == expected
    drafts = counters(client)["spec_decode_num_drafts_total"]
    assert drafts == (run.outcomes.verified > 1).sum()


@pytest.mark.parametrize("words", [LEAST[1], *AT_NIGHT])
def test_four_slots_change_no_request(
    words: str, ground: Ground, prompts: list[list[int]], plain: list[str]
) -> None:
    """Also the number of rounds that draft, over all."""
    run, expected = ground.replayed(words)
    client = ground.server(words, slots=4)
    answers = complete_all(client, prompts, together=4)
    assert [answer.text for answer in answers] == plain
    assert counted(answers) == {name: of for name, of in expected.items() if name != "rounds"}
    drafts = counters(client)["spec_decode_num_drafts_total"]
    assert drafts == (run.outcomes.verified > 1).sum()


def test_it_counts_as_import_reads(
    ground: Ground, prompts: list[list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    """Metrics and log of one server: the rounds that draft, and the tokens by position."""
    words = STOPS[1]
    settings = ground.settings(words, 1)
    client = OwnServer(ground.target, settings, exact=True, num_threads=1, verbosity=4)
    answers = complete_all(client, prompts[:12])
    page, log = client.metrics(), capfd.readouterr().err
    counts, timings = counters(client), [answer.timings for answer in answers]
    lines = "\n".join(json.dumps({"timings": one.model_dump()}) for one in timings)
    found = [import_files([Source("llama.cpp", text.encode())]) for text in (page, log, lines)]
    assert [one["format"] for one in found] == [f"llamacpp-{n}" for n in FORMATS]
    [of_page] = found[0]["models"].values()
    names = ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "marginal_prob")
    assert {n: of_page[n] for n in names} == {n: found[1][n] for n in names}
    assert of_page["num_rounds"] == counts["spec_decode_num_drafts_total"]
    assert found[2]["num_draft_tokens"] == of_page["num_draft_tokens"]


ONE_DRAFTER = pytest.mark.parametrize("ground", ["eagle3"], indirect=True)


@ONE_DRAFTER
def test_synthetic_rates_are_followed(ground: Ground, prompts: list[list[int]]) -> None:
    """Accepted tokens by position are binomial; chances of 1 in 100,000 each are left."""
    words = CHAINS[1]
    policy, drafter = resolve_policy(words).policy, str(ground.drafter)
    rates = (0.8, 0.5, 0.3)
    serving = Serving(
        drafter=EngineDrafter(model=drafter, method=METHODS[ground.method]),
        target=str(ground.target),
        synthetic_rates=rates,
    )
    settings = read_file(LLAMACPP.write(policy, serving).files[FILE])
    sizes = {"context_tokens": 512, "num_threads": 1}
    client = OwnServer(ground.target, settings, exact=True, **sizes)
    for prompt in prompts[:12]:
        client.complete(prompt, NEW_TOKENS, ignore_eos=True)
    [found] = import_files([Source("m", client.metrics().encode())])["models"].values()
    num_rounds = found["num_rounds"]
    # The last rounds of a text draft less: at most two of each.
    spare = 2 * 12 / num_rounds
    for rate, marginal in zip(rates, found["marginal_prob"], strict=True):
        off = 4.5 * (rate * (1 - rate) / num_rounds) ** 0.5
        assert rate - off - spare < marginal < rate + off


@ONE_DRAFTER
@pytest.mark.parametrize("weights", ["float16", "q8_0"])
def test_smaller_weights_load(weights: str, ground: Ground, tmp_path: Path) -> None:
    """Texts may differ from float32's; drafts are accepted."""
    write_model(embedded_path("target"), tmp_path / "t.gguf", weights)
    write_model(
        embedded_path(ground.method), tmp_path / "d.gguf", weights, target=tmp_path / "t.gguf"
    )
    small = replace(ground, target=tmp_path / "t.gguf", drafter=tmp_path / "d.gguf")
    [answer] = complete_all(small.server(CHAINS[1]), ids_of(packaged(1)))
    assert answer.timings.draft_n_accepted > 0


PARSE = """
import ctypes, json, sys, xllamacpp
library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
parse = library._Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E
for words in json.load(sys.stdin):
    params, words = xllamacpp.CommonParams(), [b"llama-server", *map(str.encode, words)]
    place = ctypes.c_void_p(id(params) + object.__basicsize__)
    taken = parse(len(words), (ctypes.c_char_p * (len(words) + 1))(*words), place, 12, None)
    speculative, draft = params.speculative, params.speculative.draft
    found = {"n_max": draft.n_max, "n_min": draft.n_min, "p_min": draft.p_min}
    found |= {"backend_sampling": draft.backend_sampling, "model": draft.mparams.path}
    found |= {"parallel": params.n_parallel, "synth_rates": list(speculative.synth_rates)}
    print(json.dumps(found if taken & 255 else None))
"""
"""Reads command lines with the parser of llama-server, which the wheel exports without a name in
Python; 12 is its `LLAMA_EXAMPLE_SERVER`."""
RATES = (0.9, 0.6, 0.123457)


def test_llama_server_s_parser_takes_the_flags() -> None:
    """Values come out as exported; flags under removed names are refused, and their names since
    are taken."""
    cases = [(words, None) for words in AS_IT_IS["llamacpp"]]
    cases += [("chain:3", RATES), ("p_min:threshold=0.123456789", None)]
    lines, expected = [], list[dict[str, object] | None]()
    for words, rates in cases:
        written = exported("llamacpp", words, max_batch_size=4, synthetic_rates=rates)
        lines.append(["--model", "t.gguf", *written.flags])
        of = read_file(written.files[FILE])
        expected.append(
            {
                "n_max": 3 if of.spec_draft_n_max is None else of.spec_draft_n_max,  # its default
                "n_min": of.spec_draft_n_min,
                "p_min": float(np.float32(of.spec_draft_p_min)),
                "backend_sampling": of.spec_draft_backend_sampling is not False,
                "model": of.spec_draft_model or "",
                "parallel": 4,
                "synth_rates": list(of.spec_synth_rates or ()),
            }
        )
    child = [sys.executable, "-c", PARSE]
    run = subprocess.run(child, input=json.dumps(lines).encode(), capture_output=True, check=True)
    found = [json.loads(line) for line in run.stdout.splitlines() if line[:1] in b"{n"]
    assert found == expected


@ONE_DRAFTER
def test_a_file_that_llamacpp_does_not_load(ground: Ground, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(ground.target.read_bytes()[:5000])
    with pytest.raises(EngineError, match="does not start"):
        OwnServer(cut, None)


@ONE_DRAFTER
@pytest.mark.usefixtures("busy_machine")
def test_a_server_is_timed(ground: Ground, tmp_path: Path) -> None:
    options = ("--batch-sizes", "1,4", "--contexts", "16,48", "--verified-tokens", "1,2,4")
    pair = ("--target", ground.target, "--drafter", ground.drafter, "--threads", 1)
    out = tmp_path / "clock.json"
    passes("profile", "--engine", "llamacpp", *pair, "--quick", *options, "-o", out)
    model = load_cost_model(out)
    assert isinstance(model, EngineCost)
    assert model.engine_version == "build 11549"
    assert (model.support.batch_size.high, model.support.levels.high) == (4, 3)
