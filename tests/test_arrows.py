"""The runtime on a serving box: it must load and decode without the libraries of fitting.

`lint-imports` proves it for written imports; this shows it for the ones that run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hidden import HIDE, python

DECODE = """
import specctl
assert "torch" not in sys.modules, "importing specctl alone must not cost torch"
import specctl.runtime.api
import torch
from specctl.policy import EntropyBins, Policy, RootOnly, StaticTree
from specctl.policy import ElasticBudget, FfnScorer, ScoredTree, SparseGates
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.capture import GraphSettings
from specctl.runtime.load import load_pair
from specctl.runtime.requests import Request
torch.set_num_threads(1)
pair = load_pair("embedded", "embedded", device="cpu")
decoder = specctl.Decoder(pair, Policy(shape=StaticTree()))
[answer] = decoder.generate("def add(a, b):", max_new_tokens=8)
prompts = [pair.target.tokenizer(text).input_ids for text in ("def add(a, b):", "Tom has 3 ap")]
network = FfnScorer(
    features=("joint_prob", "parent_entropy"), mean=(0.0, 0.0), scale=(1.0, 1.0),
    w1=((4.0, 0.0), (0.0, 1.0)), b1=(0.0, 0.0), w2=(1.0, -0.2), b2=(-0.3,),
)
base = StaticTree(depth=3, top_k=4, num_tokens=12)
policies = {
    "ar": Policy(shape=RootOnly()),
    "eagle2": Policy(shape=base),
    "hetero": Policy(shape=EntropyBins(base=base, edges=(2.0, 4.0))),
    "c2t": Policy(shape=ScoredTree(scorer=network, beta=0.5, depth=3, num_tokens=12)),
    "echo": Policy(
        shape=SparseGates(depth=3, gate_levels=(1, 2), thresholds=(0.5, 0.2), num_tokens=12),
        budget=ElasticBudget(max_tokens=16),
    ),
}
class Eager:
    # Static rounds, by the references of the kernels, that are never captured.
    def record(self, function):
        raise torch.OutOfMemoryError("no room for a graph")

    def forget(self):
        pass

found = {}
for name, policy in policies.items():
    for capture in ("none", Eager()):
        loop = DecodeLoop(
            pair.target.model, pair.drafter, policy,
            batch_size=2, max_text_tokens=40, eos_ids=(), graphs=GraphSettings(capture=capture),
        )
        texts = loop.run([Request(str(i), tuple(ids), 8) for i, ids in enumerate(prompts)])
        key = f"{name}, {'by kernels' if loop.round.kernels else 'by rules'}"
        found[key] = sorted((done.request.request_id, done.token_ids) for done in texts)
loaded = sorted(set(HIDDEN) & {name.partition(".")[0] for name in sys.modules})
print(json.dumps({"tokens": len(answer.token_ids), "texts": found, "loaded": loaded}))
"""

# Behind DECODE in one process: each would import torch anew.
BENCHES = """
import runpy
out = sys.argv[1]
sys.path.insert(0, "benchmarks")
for words in (
    ["bench_cuda_decode", "--small", "--policies", "echo", "--out", out],
    ["bench_cuda_profile", "--small", "--out", out],
):
    sys.argv = [words[0], *words[1:], "--device", "cpu"]
    runpy.run_path(f"benchmarks/{words[0]}.py", run_name="__main__")
loaded = sorted(set(HIDDEN) & {name.partition(".")[0] for name in sys.modules})
print(json.dumps({"loaded": loaded}))
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmarks")


@pytest.fixture(scope="module")
def lines(out: Path) -> list[str]:
    """What the process printed, the runtime's document first."""
    return python(HIDE + DECODE + BENCHES, str(out)).splitlines()


def test_runtime_decodes_where_the_libraries_of_fitting_are_not_installed(lines: list[str]) -> None:
    """Every family, by rules and by the kernels that graphs are made of: one text."""
    shown = json.loads(lines[0])
    assert shown["loaded"] == []
    assert 1 <= shown["tokens"] <= 8
    assert len(shown["texts"]) == 10
    plain = shown["texts"]["ar, by rules"]
    assert [len(tokens) for _, tokens in plain] == [8, 8]
    assert all(texts == plain for texts in shown["texts"].values())


def test_the_gpu_benchmarks_run_where_the_libraries_of_fitting_are_not_installed(
    lines: list[str], out: Path
) -> None:
    assert json.loads(lines[-1]) == {"loaded": []}
    rows = json.loads((out / "cuda_decode-cpu.json").read_text())["rows"]
    assert [(row["batch"], row["mode"]) for row in rows] == [
        (batch, mode) for batch in (1, 2) for mode in ("eager", "graphs")
    ]
    times = ("round_us", "drafting_us", "policy_us")  # of rounds of their own: not to be compared
    assert all(row[name] > 0 for row in rows for name in times)
    assert json.loads((out / "cost_model-tiny-cpu.json").read_text())["machine"]
