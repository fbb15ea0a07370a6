"""The examples below `--help` of every verb run, in a folder that has what they name."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from tests.cli.command import COST, specctl, write_artifact, write_lines
from tests.cli.helps import VERBS, examples_of
from tests.logs.import_cases import COUNTERS, scrape, vllm_figures, vllm_load, vllm_log

NOT_RUN = {
    "collect embedded -o traces --dense --depth 5 --children 4 --limit 24": "minutes",
    "run embedded --compare ar,chain,eagle2 --limit 24 -o results": "minutes",
    "profile -o cost_model.json": "minutes",
    "profile --target TARGET --drafter HEAD -o cost_model.json": "minutes",
    "profile --policy fitted -o cost_model.json": "minutes",
    "fit auto traces -o auto --cost-model cost_model.json": "minutes: all other fits, and a search",
    "fit mars questions.jsonl -o mars --target TARGET --drafter HEAD": "minutes: 114 questions",
    "fit adasd questions.jsonl -o adasd --target TARGET --drafter HEAD": "minutes: 114 questions",
    "profile --from engine-traces -o vllm.json": "an engine's traces",
    "collect prompts.jsonl -o traces --target TARGET --drafter HEAD --workers 8": "eight CPUs",
    "import http://localhost:8000/metrics --watch 60": "a server",
    "registry init --registry s3://bucket/policies": "a bucket",
    "registry trust revoke ed25519:1c671e3c4d54 --reason 'lost laptop'": "a key of this id",
    "drift traces --policy eagle2": "traffic of over 200 prompts",
    "drift traces --policy NAME@prod --reference march --metrics drift.prom": "traffic of a month",
    "recalibrate recent -p hetero --cost-model cost_model.json -o again": "a log of all its levels",
    "recalibrate recent -p NAME@prod --cost-model line -o again": "traffic of what was published",
}
"""Examples that need what is not here, or take long."""
PUBLISHED = "qwen3-8b+eagle3@h200:chat"
WORDS = {"TARGET": "embedded", "HEAD": "embedded", "DRAFTER": "embedded"}
MORE = {
    "collect": ("--max-new-tokens", "4"),
    "run": ("--max-new-tokens", "4"),
    "fit c2t": ("--epochs", "4", "--min-steps", "100"),
}
"""Behind an example, to be quick."""


def ready(*words: object) -> None:
    """Runs a command, which may warn."""
    outcome = specctl(*words)
    assert outcome.code == 0, (words, outcome)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the examples read."""
    folder = tmp_path_factory.mktemp("examples")
    quick = ("--max-new-tokens", 8, "--device", "cpu", "--threads", 1)
    dense = ("--dense", "--depth", 5, "--children", 4, "--limit", 48)
    ready("collect", "embedded", "-o", folder / "traces", *dense, *quick)
    (folder / "cost_model.json").write_text(json.dumps(COST))
    write_lines(folder / "vllm.log", *vllm_log())
    write_lines(folder / "k3.log", *vllm_log())
    write_lines(folder / "k5.log", vllm_load(), vllm_figures((3, 5, 0, 1, 2, 4), 5))
    (folder / "before.prom").write_text(scrape())
    later = (f"{line.rpartition(' ')[0]} {2 * float(line.split()[-1])}" for line in COUNTERS)
    (folder / "after.prom").write_text(scrape(*later))
    lines = (json.dumps({"prompt_id": f"p{n}", "turns": [f"What is {n} + 3?"]}) for n in range(2))
    write_lines(folder / "prompts.jsonl", *lines)
    write_lines(folder / "prompts.txt", "How much is 2 + 3?")
    ready("fit", "hetero", folder / "traces", "-o", folder / "hetero")
    tuned = ("--cost-model", folder / "cost_model.json", "-o", folder / "tuned", "--threads", 1)
    ready("tune", folder / "traces", *tuned)
    run = ("--compare", "ar,chain", "--limit", 2, "-o", folder / "run", *quick)
    ready("run", "embedded", *run)
    place = ("--registry", folder / "policies")
    ready("registry", "init", *place)
    write_artifact(folder / "second", "eagle2")
    for artifact in ("hetero", "second"):
        ready("registry", "push", folder / artifact, PUBLISHED, "--alias", "prod", *place)
    name = "embedded+eagle3@cpu:demo"
    ready("registry", "keygen", folder / "alice")
    ready("registry", "sign", folder / "second", "--name", name, "--key", folder / "alice")
    trusted = ("--trust", folder / "config" / "specctl" / "trust.json")
    ready("registry", "trust", "add", folder / "alice.pub", "--name", "embedded*", *trusted)
    return folder


@pytest.mark.parametrize("verb", VERBS)
def test_examples_run(
    verb: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(shutil.copytree(made, tmp_path / "here"))
    monkeypatch.chdir(here)
    monkeypatch.setenv("SPECCTL_REGISTRY", str(here / "policies"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # this copy of it is new
    for example in [one for one in examples_of(verb) if one not in NOT_RUN]:
        words = [WORDS.get(word, word) for word in shlex.split(example)]
        if "-o" in words and "--resume" not in words:
            place = here / words[words.index("-o") + 1]
            shutil.rmtree(place, ignore_errors=True)
        if verb == "registry init":
            shutil.rmtree(here / "policies")
        ready(*words, *MORE.get(verb, ()))


def test_examples_that_are_not_run_exist() -> None:
    assert set(NOT_RUN) <= {example for verb in VERBS for example in examples_of(verb)}
