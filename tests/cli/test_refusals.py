"""Every bad input gives one line that starts with `error:`, its exit code, and no traceback."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.artifacts.examples import sha
from tests.cli.command import (
    ARTIFACT,
    INPUT,
    MODEL,
    NAME,
    OUTPUT,
    REGISTRY,
    USAGE,
    contents,
    copy_model,
    new_key,
    refuses,
    write_artifact,
    write_lines,
)
from tests.cli.conftest import SMALL

LAYER = "model.layers.0.mlp.up_proj.weight"


def changed(name: str, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    weights = copy_model(name, folder) / "model.safetensors"
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


def configured(name: str, folder: Path, text: Callable[[dict[str, Any]], str]) -> Path:
    config = copy_model(name, folder) / "config.json"
    config.write_text(text(json.loads(config.read_text())))
    return folder


def small_vocabulary(folder: Path) -> Path:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=300, num_attention_heads=2, num_key_value_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def new_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def half(path: Path) -> Path:
    path.with_name(f"{path.name}.pub").touch()
    return path


MADE: dict[str, Callable[[Path], Path]] = {
    "ABSENT": lambda path: path,
    "FILE": lambda path: write_lines(path, "x"),
    "LONG.txt": lambda path: write_lines(path, "short", "one two three " * 4000),
    "FOLDER": new_folder,
    "THESIS": lambda path: write_lines(new_folder(path) / "thesis.tex", "mine").parent,
    "RETRAINED": lambda path: changed(
        "target", path, lambda tensors: tensors["model.norm.weight"].mul_(1.5)
    ),
    "NO_FC": lambda path: changed("eagle3", path, lambda tensors: tensors.pop("fc.weight")),
    "NO_TARGET_LAYER": lambda path: changed("target", path, lambda tensors: tensors.pop(LAYER)),
    "BROKEN": lambda path: configured("target", path, lambda _: "{"),
    "OTHER_VOCABULARY": small_vocabulary,
    "OTHER_HEAD": lambda path: configured(
        "eagle3", path, lambda it: json.dumps({**it, "target_hidden_size": 2 * it["hidden_size"]})
    ),
    "OTHER_TARGET": lambda path: write_artifact(path, "hetero", target_digest=sha("e")),
    "LOSSY": lambda path: write_artifact(path, "mars"),
    "TUNED": lambda path: write_artifact(new_folder(path) / "policy", "chain").parent,
    "CUT_MARKER": lambda path: write_lines(new_folder(path) / "registry.json", "{").parent,
    "CHAIN": lambda path: write_artifact(path, "chain"),
    "KEY": lambda path: new_key(path.parent, path.name),
    "PUBLIC": lambda path: new_key(path.parent, path.name).with_name("PUBLIC.pub"),
    "HALF": half,
}
"""What stands at a path that a command names by one of these words."""
GIVEN = {name.upper(): name for name in ("cost", "dense", "nodes", "prompts", "traces")}
GIVEN |= {"BLIND": "blind_traces", "SURE": "perfect_traces"}
"""Fixtures by such words."""
SIGN = "registry sign CHAIN --name NAME --key"
ADD = "registry trust add PUBLIC --name"
CASES: list[tuple[int, str, str]] = [
    # Options.
    (USAGE, "run --nope", "--nope"),
    (USAGE, "collect", "prompts"),
    (USAGE, "run --batch-size 0", "--batch-size"),
    (USAGE, "run --threads many", "--threads"),
    (USAGE, "run --temperature nan", "temperature"),
    (USAGE, "run --seed -1", "seed"),
    (USAGE, "run --device cuda", "CUDA"),
    (USAGE, "run --device cuda:7", "CUDA"),
    (USAGE, "run --compare ar --policy chain", "--compare --policy"),
    (USAGE, "run --target ABSENT --policy medusa", "'medusa'"),
    (USAGE, "traces snapshot OUT --list --skip-damaged", "--list --skip-damaged"),
    (USAGE, "run --stream --json", "--stream"),
    (USAGE, "run --stream --batch-size 2", "--stream"),
    (USAGE, "registry init --registry ''", "after '--registry'"),
    (USAGE, "registry list --registry=", "the value of --registry is empty"),
    (USAGE, "registry show ''", "a shell variable that is not set"),
    (USAGE, "run --compare ''", "the word after '--compare' is empty"),
    *[
        (USAGE, f"fit cart TRACES -o OUT {options}", says)
        for options, says in [
            ("--label luck", "--label must be tcr or accepted"),
            ("--gammas '0.3;0.6'", "--gammas must be comma-separated numbers"),
            ("--held-out 1.5", "--held-out"),
            ("--alpha -1", "alpha"),
        ]
    ],
    *[
        (USAGE, f"fit {verb} NODES -o OUT {option} {value}", f"{option}.*{says}")
        for verb, option, value, says in [
            ("c2t", "--hidden", "1", "at least 2"),
            ("c2t", "--lr", "nan", "a number"),
            ("c2t", "--recall", "0", "above 0"),
            ("c2t", "--features", "joint_prob,colour", "'colour' is none of"),
            ("c2t", "--negatives", "-1", "at least 0"),
            ("echo", "--delta", "2", "at most 1"),
        ]
    ],
    *[
        (USAGE, f"fit mars embedded -o OUT --max-new-tokens 12 --device cpu {options}", says)
        for options, says in [
            ("--thetas 0.2,0.5", "strictest"),
            ("--thetas high", "--thetas must be comma-separated"),
            ("--deny -1", "--deny must be at least 0"),
            ("--num-seeds 2", "--num-seeds"),
            ("--max-loss 0", "--max-loss must be above 0"),
            ("--loss half", "one-sided"),
        ]
    ],
    *[
        (USAGE, f"replay DENSE {options}", says)
        for options, says in [
            ("", "--policy"),
            ("-p ar -p ar", "each of them once"),
            ("-p ar --baseline 2", "--baseline"),
            ("-p ar --batch-size 2", "specctl profile"),
            ("-p ar --batch-size 2 --by-category", "--by-category"),
            ("-p ar --tpot-limit-ms 5", "--tpot-limit-ms"),
            ("-p ar --engine vllm", "--in-order"),
            ("-p schedule:from_batch=2/3:num_draft_tokens=3/4", "begin with 1"),
            ("-p ar --in-order --arrival-rate 3", "--arrival-rate"),
            ("-p ar --cost-model COST --arrival-rate 0", "arrival_rate_per_s"),
            ("-p eagle2+survival --in-order", "cost model"),
        ]
    ],
    (USAGE, "run PROMPTS --decisions fused SMALL", "no graphs on cpu"),
    (
        USAGE,
        "run PROMPTS --decisions onnx --compare ar,eagle2 SMALL",
        "decisions onnx: shape eagle2",
    ),
    # Policies.
    *[
        (USAGE, f"run PROMPTS --policy {policy} SMALL", says)
        for policy, says in [
            ("chain:width=3", "width"),
            ("eagle2:depth=6:num_tokens=6", "num_tokens"),
            ("eagle2:top_k=999999", "top_k"),
        ]
    ],
    (USAGE, "run PROMPTS --compare chain,chain SMALL", "once"),
    (USAGE, "run PROMPTS --compare ar,,chain SMALL", "''"),
    *[
        (USAGE, f"run PROMPTS --policy {policy} --batch-size 2 --allow-lossy SMALL", says)
        for policy, says in [
            ("ar+survival:max_tokens=8", "ar drafts nothing"),
            ("eagle2+marginal:tokens_per_s=100", "specctl profile"),
            ("eagle2+echo_budget:max_tokens=1", "below the batch size, 2"),
            ("eagle2+survival:max_tokens=1", "below the batch size, 2"),
            ("eagle2+mars:theta=1.5", "theta"),
            ("echo:gate_levels=2/1:thresholds=0.3/0.1", "strictly increasing"),
            ("echo:gate_levels=1/:thresholds=1.5/", "thresholds"),
            ("eagle2+eagle2", "another shape"),
        ]
    ],
    (USAGE, "run PROMPTS --drafter none --policy chain SMALL", "--drafter"),
    (USAGE, "collect PROMPTS -o OUT --drafter none SMALL", ""),
    # Prompts.
    (INPUT, "collect ABSENT -o OUT SMALL", "ABSENT"),
    (INPUT, "run LONG.txt --on-long error SMALL", "line-2.*tokens"),
    (INPUT, "collect LONG.txt -o OUT --on-long error SMALL", "line-2.*tokens"),
    # Output.
    (OUTPUT, "run PROMPTS -o FILE/out SMALL", "FILE"),
    (OUTPUT, "collect PROMPTS -o FILE/out SMALL", "FILE"),
    (OUTPUT, "collect PROMPTS -o THESIS --resume SMALL", "thesis.tex"),
    (OUTPUT, "collect PROMPTS -o TRACES SMALL", "--resume"),
    (INPUT, "fit cart TRACES -o THESIS", ""),
    # What a collection cannot do, before its models are loaded.
    (USAGE, "collect PROMPTS -o OUT --target ABSENT --shard 3/2", "--shard must be I/N"),
    (USAGE, "collect PROMPTS -o OUT --target ABSENT --tokens none", "--tokens"),
    (OUTPUT, "collect PROMPTS -o THESIS --target ABSENT", "thesis.tex"),
    # The run that is resumed was another one.
    *[
        (INPUT, f"collect PROMPTS -o TRACES --resume SMALL {options}", says)
        for options, says in [("--policy chain", "policy"), ("--target RETRAINED", "target")]
    ],
    # Traces.
    (INPUT, "fit cart BLIND -o OUT", "not_fully_accepted"),
    (INPUT, "fit cart SURE -o OUT", "prompts"),
    (INPUT, "fit cart FOLDER -o OUT", "trace.json"),
    (INPUT, "fit cart ABSENT -o OUT", "no trace set"),
    (INPUT, "fit cart TRACES BLIND -o OUT", "drafter_digest"),
    (INPUT, "fit c2t BLIND -o OUT", "draft tokens; these traces hold 0 accepted"),
    (INPUT, "fit c2t SURE -o OUT", "at least 2 prompts"),
    (INPUT, "fit c2t TRACES -o OUT --features copy_length,depth", "dense"),
    (USAGE, "fit adasd embedded -o OUT SMALL --clips 0.2,0.1", "clips rise from above 0"),
    (USAGE, "fit adasd embedded -o OUT SMALL --half-life 0", "--half-life must be .*above 0"),
    (INPUT, "fit mars PROMPTS -o OUT SMALL", "checkable answers"),
    (INPUT, "fit mars embedded embedded -o OUT SMALL", "another file has the id"),
    (INPUT, "replay TRACES -p ar", "collect with --dense"),
    (INPUT, "replay DENSE -p ar --cost-model /nowhere.json", "cost model /nowhere.json"),
    (INPUT, "show FOLDER", "is an empty folder"),
    (INPUT, "show ABSENT", "no folder"),
    # Artifacts.
    (ARTIFACT, "run PROMPTS --policy OTHER_TARGET SMALL", "E_TARGET"),
    (USAGE, "run PROMPTS --policy LOSSY SMALL", "--allow-lossy"),
    # Models.
    (MODEL, "run PROMPTS --target no-such-folder/no-such-model SMALL", "no-such-folder/no-such-m"),
    (MODEL, "run PROMPTS --drafter no-such-folder/no-such-model SMALL", "no-such-folder/no-such-m"),
    (USAGE, "run PROMPTS --drafter embedded:nano SMALL", "nano"),
    (MODEL, "run PROMPTS --target FOLDER SMALL", "config.json"),
    (MODEL, "run PROMPTS --drafter NO_FC SMALL", "fc.weight"),
    (MODEL, "run PROMPTS --target NO_TARGET_LAYER SMALL", LAYER),
    (MODEL, "run PROMPTS --target BROKEN SMALL", "BROKEN"),
    (MODEL, "run PROMPTS --drafter OTHER_VOCABULARY SMALL", "300"),
    (MODEL, "run PROMPTS --drafter OTHER_HEAD SMALL", ""),
    # Registries and keys.
    (REGISTRY, "registry list --registry CUT_MARKER", "E_VERSION.*from a copy"),
    (ARTIFACT, "registry push FOLDER NAME", "an empty folder"),
    (ARTIFACT, "registry push TUNED NAME", "name .*/TUNED/policy, which is one"),
    (ARTIFACT, "run --policy TUNED", "name .*/TUNED/policy, which is one"),
    (USAGE, "registry push CHAIN NAME --key ABSENT", "key"),
    (REGISTRY, "registry push CHAIN NAME --reason 'two\nlines'", "E_ENTRY"),
    (REGISTRY, "registry push /nothing Capitals", "E_NAME"),  # before the artifact is looked at
    (ARTIFACT, "registry push REGISTRY NAME", "a registry \\(registry.json\\)"),
    (ARTIFACT, "registry push TRACES NAME", "a trace set \\(trace.json\\)"),
    (REGISTRY, "registry promote NAME prod x --registry TRACES", "E_NO_REGISTRY"),
    (REGISTRY, "registry init --registry TRACES", "a trace set \\(trace.json\\)"),
    (REGISTRY, "registry init", "E_EXISTS"),
    (USAGE, "registry list --registry s3://key:hunter2@bucket/x", "not repeated"),
    (OUTPUT, "registry keygen KEY", "never replaced"),
    (OUTPUT, "registry keygen HALF", "HALF.pub"),
    (OUTPUT, "registry keygen ABSENT/x", "make the folder .*/ABSENT"),
    (USAGE, "registry sign CHAIN --key KEY", "--name"),
    (USAGE, f"{SIGN} PUBLIC", "is a public key; name "),
    (USAGE, f"{ADD} [a-z]", "names"),
    (USAGE, "registry trust add KEY --name *", "is a private key; name "),
]


@pytest.mark.parametrize(("code", "command", "says"), CASES, ids=[case[1] for case in CASES])
def test_bad_input_is_refused_and_nothing_is_written(
    code: int, command: str, says: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    words: list[object] = []
    known = {"OUT": tmp_path / "out", "NAME": NAME, "REGISTRY": tmp_path / "registry"}
    if command.startswith("registry"):
        request.getfixturevalue("registry")
    for word in shlex.split(command):
        name, _, rest = word.partition("/")
        if name in MADE:
            path = tmp_path / name
            words.append((path if path.exists() else MADE[name](path)) / rest)
        elif word in GIVEN:
            words.append(request.getfixturevalue(GIVEN[word]))
        else:
            words += SMALL if word == "SMALL" else [known.get(word, word)]
    before = contents(tmp_path)
    line = refuses(code, *words)
    assert re.search(says, line)
    assert "hunter2" not in line, "a password"
    assert contents(tmp_path) == before


def test_a_word_hides_a_folder_and_says_so(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fit echo -o echo`, then `run --policy echo`: the word, whose gates nobody gave."""
    monkeypatch.chdir(tmp_path)
    assert "./echo" not in refuses(USAGE, "run", prompts, "--policy", "echo", *SMALL)
    (tmp_path / "echo").mkdir()
    assert "./echo" in refuses(USAGE, "run", prompts, "--policy", "echo", *SMALL)
