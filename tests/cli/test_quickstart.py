"""`quickstart` recognises what one has and prints commands that exist; `doctor` says what works."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from specctl.cli import doctor, load_all_verbs, quickstart
from specctl.cli.quickstart import recognised
from specctl.errors import InputError
from tests.cli.command import INPUT, USAGE, passes, refuses, specctl, write_lines

VLLM_LINE = (
    "(APIServer pid=7) INFO 11-24 05:00:10 [metrics.py:120] SpecDecoding metrics: Mean acceptance "
    "length: 2.50, Accepted throughput: 15.00 tokens/s, Drafted throughput: 50.00 tokens/s, "
    "Accepted: 150 tokens, Drafted: 500 tokens, Per-position acceptance rate: 0.750, 0.750, "
    "Avg Draft acceptance rate: 30.0%"
)


@pytest.fixture(autouse=True)
def _as_on_a_new_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No models in the cache, no serving engine, no settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "cached_pair", list)
    monkeypatch.setattr(quickstart, "installed_engines", lambda: {"transformers": "5.17"})
    monkeypatch.setattr(doctor, "installed_engines", lambda: {"transformers": "5.17"})
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("SPECCTL_REGISTRY", raising=False)


def planned(*words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(passes("quickstart", *words, "--json").out)
    return found


def check_typed(command: str) -> None:
    """That a command names a verb and options that there are."""
    program, *words = shlex.split(command, comments=True)
    assert program == "specctl"
    verb: Any = typer.main.get_command(load_all_verbs())
    while hasattr(verb, "commands"):
        verb = verb.commands[words.pop(0)]
    known = {name for param in verb.params for name in param.opts}
    assert {word for word in words if word.startswith("-")} <= known, command


@pytest.fixture
def things(
    tmp_path: Path,
    dense: Path,
    traces: Path,
    cost: Path,
    artifacts: dict[str, Path],
) -> dict[str, str]:
    """One of each kind, by kind."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(
        json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
    )
    (tmp_path / "head").mkdir()
    (tmp_path / "head/config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32})
    )
    rows = [{"prompt": f"Say {n}.", "prompt_id": str(n)} for n in range(3)]
    write_lines(tmp_path / "p.jsonl", *map(json.dumps, rows))
    write_lines(tmp_path / "r.jsonl", *(json.dumps({**row, "response": "Yes."}) for row in rows))
    write_lines(tmp_path / "vllm.log", VLLM_LINE)
    return {
        "target": "model",
        "drafter": "head",
        "prompts": "p.jsonl",
        "responses": "r.jsonl",
        "engine log": "vllm.log",
        "dense traces": str(dense),
        "live traces": str(traces),
        "cost model": str(cost),
        "artifact": str(artifacts["chain"]),
    }


def test_every_kind_is_recognised_and_leads_to_commands(things: dict[str, str]) -> None:
    for kind, word in things.items():
        assert recognised(word).kind == kind
        for engine in ((), ("--for", "vllm"), ("--for", "sglang")):
            plan = planned(word, *engine)
            assert len(plan["commands"]) == 3
            for command in (*plan["before"], *plan["commands"], *plan["after"]):
                check_typed(command)
    typed = planned(*things.values(), "--for", "vllm")["commands"]
    assert things["artifact"] in typed[0], "what leads furthest decides"


def test_models_and_prompts_stand_in_the_commands(things: dict[str, str]) -> None:
    plan = planned("org/Big-8B", "org/EAGLE3-Big-8B", things["prompts"])
    pair = "--target org/Big-8B --drafter org/EAGLE3-Big-8B"
    collect, profile, tune = plan["commands"]
    assert collect == f"specctl collect p.jsonl --dense -o traces {pair}"
    assert pair in profile
    assert tune == "specctl tune traces --family threshold --cost-model cost_model.json -o tuned"
    served = planned(things["target"], "head", "--for", "sglang", things["responses"])
    assert served["commands"][0].startswith("specctl collect r.jsonl --responses r.jsonl --dense")
    assert [command.split()[1] for command in served["before"]] == ["profile"]
    assert planned(things["cost model"], "--for", "vllm")["before"] == []


def test_a_log_of_an_engine_says_which_one_serves(things: dict[str, str]) -> None:
    plan = planned(things["engine log"])
    assert plan["commands"][0] == "specctl import vllm.log"
    assert "--to vllm" in plan["commands"][1]
    assert "--for vllm" in plan["commands"][2]


def test_an_installed_engine_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "installed_engines", lambda: {"vllm": "0.32.0"})
    assert "--to vllm" in planned()["commands"][0]
    pair = [quickstart.Thing("org/A", "target"), quickstart.Thing("org/A-eagle3", "drafter")]
    monkeypatch.setattr(quickstart, "cached_pair", lambda: pair)
    assert "--drafter org/A-eagle3" in planned()["commands"][0]
    assert "A-eagle3" not in " ".join(planned("org/B", "org/B-eagle3")["commands"])


def test_a_pair_is_found_in_the_cache_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    configs = {
        "org--Big": {"model_type": "qwen3", "hidden_size": 64, "vocab_size": 9},
        "org--Big-EAGLE3": {"hidden_size": 64, "vocab_size": 9, "draft_vocab_size": 5},
        "org--Other": {"model_type": "qwen3", "hidden_size": 32, "vocab_size": 9},
    }
    for name, config in configs.items():
        folder = tmp_path / f"models--{name}"
        snapshot = folder / "snapshots" / "0123abcd"
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0123abcd")
        (snapshot / "config.json").write_text(json.dumps(config))
    found = quickstart.cached_pair(tmp_path)
    assert [(one.word, one.kind) for one in found] == [
        ("org/Big", "target"),
        ("org/Big-EAGLE3", "drafter"),
    ]
    assert quickstart.cached_pair(tmp_path / "absent") == []


def test_what_is_nothing_is_refused(tmp_path: Path) -> None:
    assert "check the spelling" in refuses(INPUT, "quickstart", "nonsense")
    assert "--for: expected vllm" in refuses(USAGE, "quickstart", "--for", "vlm")
    write_lines(tmp_path / "table.csv", "a,b", "1,2")
    assert "expected prompts, a log" in refuses(INPUT, "quickstart", "table.csv")
    (tmp_path / "folder").mkdir()
    assert "expected the folder of an artifact" in refuses(INPUT, "quickstart", "folder")
    with pytest.raises(InputError, match="nothing of that name"):
        recognised("no such thing")


def test_doctor_says_ok_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {one["what"]: one for one in json.loads(passes("doctor", "--json").out)}
    states = {what: one["state"] for what, one in found.items()}
    assert states == {
        "versions": "ok",
        "device": "ok",
        "models": "ok",
        "disk": "ok",
        "settings": "-",
        "registry": "-",
        "vLLM": "-",
        "SGLang": "-",
    }
    assert "8 tokens decoded" in found["models"]["found"]

    monkeypatch.setenv("SPECCTL_REGISTRY", str(tmp_path / "absent"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    monkeypatch.setattr(
        doctor, "requires", lambda _: ["torch>=99", "nothing-here", "x; extra=='s3'"]
    )
    ended = specctl("doctor", "--drafter", "embedded:target", "--json")
    assert ended.code == 1
    assert "versions, disk and registry wrong" in ended.err
    found = {one["what"]: one for one in json.loads(ended.out)}
    assert all(found[what]["fix"] for what in ("versions", "disk", "registry"))
    assert "torch 2" in found["versions"]["found"]
    assert "nothing-here none" in found["versions"]["found"]


def test_doctor_loads_the_models_that_are_named(tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (tmp_path / "bert/config.json").write_text(json.dumps(config))
    ended = specctl("doctor", "--target", "bert")
    assert ended.code == 1
    assert "models wrong" in ended.err
    assert "models" in ended.out


def test_doctor_finds_a_registry_and_settings(registry: Path, tmp_path: Path) -> None:
    (tmp_path / "config" / "specctl").mkdir(parents=True)
    (tmp_path / "config" / "specctl" / "config.toml").write_text("[run]\nbatch-size = 2\n")
    found = {one["what"]: one["found"] for one in json.loads(passes("doctor", "--json").out)}
    assert found["registry"] == f"{registry}: 0 names"
    assert found["settings"].endswith("sets run")


def test_the_readme_shows_the_commands_for_nothing_at_all() -> None:
    """And tests/test_docs.py runs them, in an empty folder."""
    page = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    plan = planned()
    block = "\n".join(["specctl quickstart", *plan["commands"], *plan["after"]])
    assert f"```bash\n{block}\n```" in page
