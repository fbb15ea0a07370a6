"""SpecDecode-Bench's speed-ups against a loop that steps through each request as its simulator;
imports in one call, by the labels of tables, and without torch."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.command import INPUT, USAGE, passes, refuses, specctl
from tests.logs.import_cases import request, write_rows

CLOCK = "h100-llama-3.1-8b-eagle"
DEPTH = 6


def rows(off: int = 3) -> list[dict[str, Any]]:
    """More requests than the simulator draws, in the published form: entry 0 is 1, and EAGLE's
    lists end up to `off` entries before or behind their texts. Rates differ, so that means of
    rates are not rates of sums."""
    rng, found = np.random.default_rng(7), []
    for name in range(330):
        size = int(rng.integers(40, 120))
        length = max(size + int(rng.integers(-off, off + 1)), 4)
        accepted = rng.binomial(DEPTH, 0.1 + 0.7 * rng.random(), length)
        entries = 1 + np.minimum(accepted, np.maximum(length - 1 - np.arange(length), 0))
        entries[0] = 1
        prompt = int(rng.integers(5, 900))
        found.append(request(str(name), size, prompt, eagle=entries.tolist()))
    return found


class Simulator:
    """SpecDecode-Bench's simulator after its published code (`simulator.py`, `predictor.py`): lists
    of requests, copies with counters of their own, seconds.

    Args:
        length: draft tokens; None is its oracle.
    """

    def __init__(self, length: int | None, batch_size: int) -> None:
        self.length, self.copies = length, range(batch_size)

    @staticmethod
    def forward(cached: int, batched: int) -> float:
        return cached * 3.92645679e-08 + batched * 2.10103129e-05 + 5.88590713e-03

    @staticmethod
    def draft(cached: int, tokens: int) -> float:
        return cached * 2.37768493e-09 + tokens * 8.41429603e-07 + 2.13526175e-03

    def plain(self, row: dict[str, Any]) -> float:
        """Mean seconds of a copy."""
        prompt, total = len(row["prompt_token_ids"]), len(row["acc_eagle"]["acc_len"])
        count = len(self.copies)
        spent = self.forward(0, count * prompt) + 1.20683946e-03
        for made in range(1, total):
            spent += self.forward(count * (prompt + made), count) + 1.20683946e-03
        return spent

    def drafting(self, row: dict[str, Any]) -> float:
        """The same; tokens that a copy accepts are cached before the next copy's draft is timed,
        and a finished copy frees its own."""
        prompt, entries = len(row["prompt_token_ids"]), row["acc_eagle"]["acc_len"]
        made, count = [1 for _ in self.copies], len(self.copies)
        prefill = self.forward(0, count * prompt) + 1.20683946e-03
        spent, cached = [prefill for _ in self.copies], count * (prompt + 1)
        while made[0] < len(entries):
            emits = entries[made[0] - 1]  # copies are alike
            tokens = emits if self.length is None else self.length + 1
            verify = self.forward(cached, count * tokens)
            for copy in self.copies:
                spent[copy] += verify + self.draft(cached, tokens) + 1.20683946e-03
                made[copy] += min(emits, tokens)
                cached += min(emits, tokens)
                if made[copy] >= len(entries):
                    cached -= made[copy] + prompt
        return sum(spent) / count

    def speed_up(self, requests: list[dict[str, Any]]) -> float:
        """Mean tokens a second over that of plain decoding, of 300 requests."""
        random.seed(42)
        chosen = random.sample(requests, k=300)
        sizes = [len(self.copies) * len(row["acc_eagle"]["acc_len"]) for row in chosen]
        ours, plain = (
            sum(size / run(row) for size, row in zip(sizes, chosen, strict=True))
            for run in (self.drafting, self.plain)
        )
        return ours / plain


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return imported(tmp_path_factory.mktemp("peer"), 3)


def imported(folder: Path, off: int) -> Path:
    source = write_rows(folder / "log.jsonl", *rows(off))
    reading = ("--entry-predicts", "next", "--max-misaligned", 0.05)
    told = specctl("import", source, "-o", folder / "log", *reading)
    assert told.code == 0, told.err
    is_counted = "whose last round the file holds in part" in told.err
    assert is_counted is bool(off), "a warning and no refusal"
    return folder / "log"


@pytest.mark.parametrize("batch_size", [1, 32])
@pytest.mark.parametrize(("off", "error"), [(0, 5e-4), (3, 5e-3)])
def test_speed_ups_are_those_of_the_simulator(
    off: int, error: float, batch_size: int, log: Path, tmp_path: Path
) -> None:
    """FIXED_1, FIXED_3, FIXED_5 and ORACLE, which it prints to a hundredth. Ends of lists that are
    cut at their text's make up most of the difference: texts are a fifth of the published ones."""
    log = log if off else imported(tmp_path, 0)
    policies = {"ar": 0, **{f"chain:num_draft_tokens={k}": k for k in (1, 3, 5)}, "oracle": None}
    words = ("-p", ",".join(policies), "--batch-size", batch_size)
    asked = ("--definition", "specdecode-bench", "--cost-model", CLOCK, "--json")
    found = json.loads(specctl_out("replay", log, *words, *asked))
    assert (found["kind"], found["num_requests"]) == ("replay-peer", 300)
    requests = rows(off)
    for length, figures in zip(policies.values(), found["policies"], strict=True):
        theirs = 1.0 if length == 0 else Simulator(length, batch_size).speed_up(requests)
        assert figures["speed_up"]["value"] == pytest.approx(theirs, abs=error)
        alone = 1.0 if length == 0 else Simulator(length, 1).speed_up(requests)
        assert figures["speed_up_alone"]["value"] == pytest.approx(alone, abs=error)
        assert length == 0 or abs(theirs - 1) > 0.01, "it would pass as plain decoding"
    own = json.loads(specctl_out("replay", log, "-p", "ar,oracle", *asked[2:]))
    ratio = 1 / own["policies"][1]["pooled"]["against"]["time_us"]["value"]
    assert abs(ratio - found["policies"][-1]["speed_up"]["value"]) > error, "it is another figure"


def specctl_out(*words: object) -> str:
    """What a command prints, its warning of stated costs aside."""
    outcome = specctl(*words)
    assert outcome.code == 0, outcome
    return outcome.out


def test_a_definition_needs_an_import_and_times(log: Path, tmp_path: Path) -> None:
    asked = ("-p", "ar", "--definition", "specdecode-bench")
    assert "--cost-model, whose times it weighs" in refuses(USAGE, "replay", log, *asked)
    assert "leave --in-order out" in refuses(USAGE, "replay", log, *asked, "--in-order")
    assert "expected a folder" in refuses(INPUT, "replay", tmp_path, *asked)


def test_several_imports_are_replayed_each_by_itself(log: Path, tmp_path: Path) -> None:
    other = write_rows(tmp_path / "other.jsonl", *rows()[:9])
    assert specctl("import", other, "-o", tmp_path / "other").code == 0
    words = ("replay", log, tmp_path / "other", "-p", "ar", "-p", "eagle/oracle")
    first, second = json.loads(passes(*words, "-o", tmp_path / "out", "--json").out)
    assert [one["source"]["name"] for one in (first, second)] == ["log.jsonl", "other.jsonl"]
    assert [one["policy"] for one in first["policies"]] == ["ar", "eagle/oracle"]
    assert json.loads((tmp_path / "out" / "other" / "replay.json").read_text()) == second
    assert "different names" in refuses(USAGE, *words, log, "-o", tmp_path / "out")


def test_imports_load_no_torch(log: Path, tmp_path: Path) -> None:
    """Torch takes longer to load than an import to read or to replay."""
    source, out = log.parent / "log.jsonl", tmp_path / "again"
    commands = [
        ["import", source, "-o", out, "--cost-model", CLOCK, "--max-misaligned", 0.5],
        ["replay", log, "-p", "ar,chain:num_draft_tokens=9,oracle"],
        ["replay", log, "-p", "ar,chain", "--batch-size", 4, "--engine", "vllm"],
        ["show", log],
    ]
    script = (
        "import sys; from specctl.cli import main\n"
        f"for words in {[[str(word) for word in words] for words in commands]!r}:\n"
        "    sys.argv = ['specctl', *words]\n"
        "    try: main()\n"
        "    except SystemExit as ended: assert not ended.code, words\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
