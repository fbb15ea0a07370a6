"""Every bad input gives one line that starts with `error:`, its exit code, and no traceback.

The line names the cause and the next step, and nothing is written. The first list has what a
hurried person types wrong in the first half hour; `tests/runtime/test_words.py` has the words of
policies.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from specctl.runtime import load
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
    passes,
    refuses,
    write_artifact,
    write_lines,
)
from tests.cli.conftest import SMALL

LIGHT: list[tuple[int, str, str]] = [
    # Words that do not exist.
    (USAGE, "replya DENSE", "No such command 'replya'. Did you mean 'replay'?"),
    (USAGE, "p.txt", "No such command 'p.txt'; to read it, write: specctl import p.txt"),
    (USAGE, "http://h/metrics", "write: specctl import http://h/metrics"),
    (USAGE, "run p.txt --limt 3", "No such option: --limt; did you mean --limit?"),
    (USAGE, "run p.txt --policy eagle3", "policy 'eagle3' is no word of a policy"),
    (USAGE, "export tune.json --to vllm", "'tune.json' is no file or folder"),
    (USAGE, "replay DENSE -p eagle2:dept=4", "which has depth, top_k, num_tokens; did you"),
    (USAGE, "run p.txt --policy ./nofolder", "no artifact's folder and no REGISTRY/NAME@ALIAS"),
    (USAGE, "run p.txt --format txt", "--format must be auto or text, not txt; did you mean text?"),
    (USAGE, "export chain --to vLLM", "did you mean vllm?"),
    (USAGE, "run p.txt --dtype bf16", "not bf16; did you mean bfloat16?"),
    (USAGE, "run p.txt --device gpu", "--device gpu is none of auto, cpu, cuda"),
    (USAGE, "run p.txt --decisions trch", "'trch' is none of auto, fused, torch, onnx"),
    (USAGE, "import vllm.log -o OUT --batch-sizes 8,x", "e.g. --batch-sizes 1,8,32"),
    (USAGE, "export chain --to vlm", "--to 'vlm' is none of vllm, "),
    # Values out of range, or of another kind.
    (USAGE, "run p.txt --temperature -1", "temperature is -1.0, but must be"),
    (USAGE, "run p.txt --temperature hot", "--temperature must be a number; see specctl run"),
    (USAGE, "run p.txt --max-new-tokens 0", "--max-new-tokens must be at least 1, not 0"),
    (USAGE, "run p.txt --trace OUT --dense-every 0", "--dense-every must be at least 1, not 0"),
    (USAGE, "run p.txt --temperature nan", "temperature"),
    # Options that do not go together, or are missing.
    (USAGE, "collect", "prompts"),
    (USAGE, "run p.txt --compare ar --policy eagle2", "--compare goes without --policy"),
    (USAGE, "collect p.txt -o OUT --dense --top-k 4", "for the children of a drafted node"),
    (USAGE, "ladder DENSE", "such as: specctl ladder traces -o ladder --cost-model"),
    (USAGE, "replay DENSE", "--policy is required; such as: specctl replay traces -p ar,chain"),
    (USAGE, "export chain:3", "--to is required; such as: specctl export chain:3 --to vllm"),
    (USAGE, "fit hetro DENSE -o OUT", "Did you mean 'hetero'?"),
    (USAGE, "tune DENSE --cost-model line --family eagel2", "did you mean eagle2?"),
    (USAGE, "tune DENSE --cost-model line --family mars", "to answers: specctl fit mars"),
    (USAGE, "tune DENSE --cost-model line --family fittde", "did you mean fitted?"),
    (USAGE, "replay DENSE -p fittde", "did you mean fitted?"),
    (
        USAGE,
        "report run/results.json -o p.html",
        "have options: --results, --ladder, --tune",
    ),
    (USAGE, "tune DENSE --cost-model line --batch-size 1,8", "--batch-size must be a whole num"),
    (USAGE, "replay DENSE -p mars", "put a shape before it: eagle2+mars"),
    (USAGE, "replay DENSE -p chain:0", "chain has the settings num_draft_tokens"),
    (USAGE, "collect p.txt", "--out is required; such as: specctl collect embedded -o traces"),
    (USAGE, "registry list", "--registry is required; give it, or set SPECCTL_REGISTRY"),
    (USAGE, "registry trust add a.pub", "--name is required; such as: specctl registry trust add"),
    (USAGE, "registry list --registry=", "the value of --registry is empty"),
    (REGISTRY, "registry pull Toy@prod --registry r", "write it in lower case: toy"),
    (REGISTRY, "registry push ./x n --alias v1 --registry r", "'v1' is the number of a version"),
    # Files that are not there, or are something else.
    (INPUT, "import p.txt --cost-model p.txt", "a log is a source of specctl import"),
    (INPUT, "import h:80/metrics", "h:80/metrics is no file; for a page, write http://h:80/met"),
    (INPUT, "run nofile.txt", "nofile.txt is no such file; name a prompt file, or"),
    (INPUT, "run p.csv", "p.csv has no column of prompts, but 'a', 'b'; name it in the fi"),
    (INPUT, "run empty.txt", "empty.txt has no prompt"),
    (INPUT, "show nofolder", "PLACE/NAME@ALIAS of a registry; check the path\n"),
    (INPUT, "replay nofolder -p ar", "nofolder is no trace set: no such folder;"),
    (
        MODEL,
        "run p.txt --target ./nonexist",
        "no folder here, no GGUF file (NAME.gguf), no hub id (owner/name)",
    ),
]
"""Refused before torch is imported, hence at once."""

LAYER = "model.layers.0.mlp.up_proj.weight"


def without_a_layer(folder: Path) -> Path:
    weights = copy_model("target", folder) / "model.safetensors"
    tensors = load_file(weights)
    tensors.pop(LAYER)
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


def configured(folder: Path, text: str) -> Path:
    (copy_model("target", folder) / "config.json").write_text(text)
    return folder


def small_vocabulary(folder: Path) -> Path:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=300, num_attention_heads=2, num_key_value_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def no_tensors(folder: Path) -> Path:
    (copy_model("target", folder) / "model.safetensors").write_bytes(b"not tensors")
    return folder


def bert(folder: Path) -> Path:
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    write_lines(new_folder(folder) / "config.json", json.dumps(config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
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
    "NO_TARGET_LAYER": without_a_layer,
    "BROKEN": lambda path: configured(path, "{"),
    "STRANGE": lambda path: configured(path, '{"model_type": "strange"}'),
    "NO_TENSORS": no_tensors,
    "BERT": bert,
    "OTHER_VOCABULARY": small_vocabulary,
    "OTHER_TARGET": lambda path: write_artifact(path, "hetero", target_digest=sha("e")),
    "TUNED": lambda path: write_artifact(new_folder(path) / "policy", "chain").parent,
    "CUT_MARKER": lambda path: write_lines(new_folder(path) / "registry.json", "{").parent,
    "CHAIN": lambda path: write_artifact(path, "chain"),
    "KEY": lambda path: new_key(path.parent, path.name),
    "PUBLIC": lambda path: new_key(path.parent, path.name).with_name("PUBLIC.pub"),
    "HALF": half,
}
"""What stands at a path that a command names by one of these words."""
GIVEN = {name.upper(): name for name in ("cost", "dense", "nodes", "prompts", "traces")}
GIVEN["BLIND"] = "blind_traces"
"""Fixtures by such words."""
SIGN = "registry sign CHAIN --name NAME --key"
ADD = "registry trust add PUBLIC --name"
HEAVY: list[tuple[int, str, str]] = [
    # Options.
    (USAGE, "run --device cuda", "CUDA"),
    (USAGE, "fit hetero TRACES -o OUT --gammas '0.3;0.6'", "--gammas must be comma-separated num"),
    (USAGE, "fit c2t NODES -o OUT --lr nan", "--lr.*a number"),
    (USAGE, "fit c2t NODES -o OUT --features draft_lgp", "did you mean draft_logp?"),
    (USAGE, "fit hetero DENSE -o OUT --base eagle2:depth=9", "larger than the traces, which hold"),
    (USAGE, "fit echo DENSE -o OUT --depth 9", "--depth 9 is more than the traces hold, 6"),
    (USAGE, "fit mars embedded -o OUT SMALL --thetas 0.2,0.5", "strictest"),
    (USAGE, "fit adasd embedded -o OUT SMALL --clips 0.2,0.1", "clips rise from above 0"),
    *[
        (USAGE, f"replay DENSE {options}", says)
        for options, says in [
            ("", "--policy"),
            ("-p ar --baseline 2", "--baseline"),
            ("-p ar --batch-size 2", "specctl profile"),
            ("-p ar --engine vllm", "--in-order"),
            ("-p ar --cost-model COST --arrival-rate 0", "--arrival-rate must be above 0"),
            ("-p eagle2+survival --in-order", "cost model"),
        ]
    ],
    (USAGE, "run PROMPTS --decisions fused SMALL", "no graphs on cpu"),
    (USAGE, "run PROMPTS --decisions onnx --policy eagle2 SMALL", "decisions onnx: shape eagle2"),
    # Policies that do not fit the models or the batch.
    (USAGE, "run PROMPTS --policy eagle2:top_k=999999 SMALL", "top_k"),
    (USAGE, "run PROMPTS --drafter none --policy chain SMALL", "--drafter"),
    # Prompts and output.
    (INPUT, "run LONG.txt --strict SMALL", "line-2.*tokens"),
    (OUTPUT, "run PROMPTS -o FILE/out SMALL", "FILE"),
    (OUTPUT, "collect PROMPTS -o TRACES SMALL", "--resume"),
    (INPUT, "report -o r.html --results nope.json", "nope.json cannot be read: no such file"),
    # What a collection cannot do, before its models are loaded.
    (USAGE, "collect PROMPTS -o OUT --target ABSENT --shard 3/2", "--shard must be I/N"),
    (USAGE, "collect PROMPTS -o OUT --target ABSENT --tokens none", "--tokens"),
    (OUTPUT, "collect PROMPTS -o THESIS --target ABSENT", "thesis.tex"),
    (OUTPUT, "collect PROMPTS -o /proc/x --target ABSENT", "/proc/x cannot be written: .*--out"),
    # The run that is resumed was another one.
    (INPUT, "collect PROMPTS -o TRACES --resume SMALL --policy chain", "policy"),
    # Traces.
    (INPUT, "fit hetero ABSENT -o OUT", "no trace set"),
    (INPUT, "fit c2t BLIND -o OUT", "draft tokens; these traces hold 0 accepted"),
    (INPUT, "fit c2t TRACES -o OUT --features copy_length,depth", "dense"),
    (INPUT, "fit mars PROMPTS -o OUT SMALL", "checkable answers"),
    (INPUT, "fit mars embedded embedded -o OUT SMALL", "another file has the id"),
    (INPUT, "replay TRACES -p ar", "collect with --dense"),
    (INPUT, "replay DENSE -p ar --cost-model /nowhere.json", "/nowhere.json is no file, and none"),
    (INPUT, "drift ABSENT -p ar --cost-model /nowhere.json", "/nowhere.json is no file, and none"),
    (OUTPUT, "drift ABSENT -p ar --metrics /proc/x", "metrics /proc/x cannot be written"),
    (INPUT, "show FOLDER", "is an empty folder"),
    (INPUT, "report --run fitted/report.json -o p.html", "give --run FOLDER/results.json"),
    (INPUT, "report --tune fitted/report.json -o p.html", "is of kind 'ladder', and not what"),
    # Artifacts.
    (ARTIFACT, "run PROMPTS --policy OTHER_TARGET SMALL", "E_TARGET"),
    # Models.
    (MODEL, "run PROMPTS --target no-such-folder/no-such-model SMALL", "no-such-folder/no-such-m"),
    (USAGE, "run PROMPTS --drafter embedded:nano SMALL", "nano"),
    (MODEL, "run PROMPTS --target NO_TARGET_LAYER SMALL", LAYER),
    (MODEL, "run PROMPTS --target BROKEN SMALL", "BROKEN"),
    (MODEL, "run PROMPTS --target embeded SMALL", "is set; did you mean embedded?"),
    (MODEL, "run PROMPTS --target STRANGE SMALL", "is of model_type 'strange'"),
    (MODEL, "run PROMPTS --target NO_TENSORS SMALL", "is damaged or does not fit the others"),
    (MODEL, "run PROMPTS --target BERT SMALL", "generates no text (...ForCausalLM): BertForMask"),
    (MODEL, "run PROMPTS --drafter OTHER_VOCABULARY SMALL", "300"),
    # Registries and keys.
    (REGISTRY, "registry list --registry CUT_MARKER", "E_VERSION.*from a copy"),
    (ARTIFACT, "registry push ABSENT NAME", "E_MISSING.*check the path"),
    (ARTIFACT, "registry push FOLDER NAME", "an empty folder"),
    (ARTIFACT, "registry push TUNED NAME", "name .*/TUNED/policy, which is one"),
    (USAGE, "registry push CHAIN NAME --key ABSENT", "key"),
    (REGISTRY, "registry push CHAIN NAME --reason 'two\nlines'", "E_ENTRY"),
    (ARTIFACT, "registry push REGISTRY NAME", "a registry (registry.json)"),
    (REGISTRY, "registry init --registry TRACES", "a trace set (trace.json)"),
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
FOREIGN = ("Traceback", "Error:", "Input should", "Extra inputs", "Expecting", "Validation")
"""Words of libraries, which no message has."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the commands name, and a user without settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECCTL_REGISTRY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    write_lines(tmp_path / "p.txt", "How much is 2 + 2?")
    write_lines(tmp_path / "p.csv", "a,b", "1,2")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "fitted").mkdir()
    (tmp_path / "fitted" / "report.json").write_text('{"kind": "ladder"}')
    return tmp_path


EARLY = [
    (OUTPUT, "fit hetero TRACES -o THESIS", "holds something else; choose another output folder"),
    (OUTPUT, "fit mars embedded -o THESIS", "holds something else"),
    (OUTPUT, "fit adasd embedded -o /proc/x", "/proc cannot be written: .*--out"),
    (USAGE, "fit mars embedded -o OUT --shape eagle4", "did you mean eagle2?"),
    (INPUT, "fit mars embedded -o OUT --limit 8", "8 prompts with .*at least 114 can, if none"),
    (USAGE, "profile -o OUT --policy chian", "did you mean chain?"),
    (ARTIFACT, "profile -o OUT --policy FOLDER", "an empty folder"),
    (ARTIFACT, "fit mars embedded -o OUT --shape FOLDER", "an empty folder"),
    (OUTPUT, "profile -o /proc/x", "/proc/x cannot be written"),
    (USAGE, "collect PROMPTS -o OUT --dense --drafter none", "give --drafter"),
    (USAGE, "collect PROMPTS -o OUT --drafter none", "give --drafter"),
    (USAGE, "run PROMPTS --drafter none --compare ar,chain", "give --drafter"),
    (OUTPUT, "run PROMPTS --trace /proc/x", "/proc/x cannot be written"),
]
"""Refusals that no model is loaded for."""
CASES = [*LIGHT, *HEAVY, *EARLY]


@pytest.mark.parametrize(("code", "command", "says"), CASES, ids=[case[1] for case in CASES])
def test_bad_input_is_refused_and_nothing_is_written(
    code: int,
    command: str,
    says: str,
    place: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words: list[object] = []
    known = {"OUT": place / "out", "NAME": NAME, "REGISTRY": place / "registry"}
    if command.startswith("registry") and (code, command, says) in HEAVY:
        request.getfixturevalue("registry")
    for word in shlex.split(command):
        name, _, rest = word.partition("/")
        if name in MADE:
            path = place / name
            words.append((path if path.exists() else MADE[name](path)) / rest)
        elif word in GIVEN:
            words.append(request.getfixturevalue(GIVEN[word]))
        else:
            words += SMALL if word == "SMALL" else [known.get(word, word)]
    if (code, command, says) in EARLY:
        monkeypatch.setattr(load, "load_pair", None)
    before = contents(place)
    line = refuses(code, *words)
    assert all(part in line for part in says.split(".*")), line
    assert not any(word in line.removeprefix("error:") for word in (*FOREIGN, "hunter2")), line
    assert len(re.sub(r"sha256:\w+", "", line.replace(str(place), ""))) < 330, "a person reads it"
    assert contents(place) == before


def test_refusals_that_need_no_model_import_none(place: Path) -> None:
    """All in one process; torch alone takes over a second, transformers several."""
    commands = [shlex.split(command) for _, command, _ in LIGHT if "DENSE" not in command]
    script = (
        "import sys; from specctl.cli import main\n"
        f"for words in {commands!r}:\n"
        "    sys.argv = ['specctl', *words]\n"
        "    try: main()\n"
        "    except SystemExit as ended: assert ended.code, words\n"
        "    heavy = {'torch', 'transformers', 'polars'} & {*sys.modules}\n"
        "    assert not heavy, (words, heavy)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=place, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("\n") == len(commands)


@pytest.mark.parametrize(
    ("more", "differs"),
    [
        (("--max-new-tokens", 9), "collect.max_new_tokens: it has 8, not 9"),
        (("--policy", "chain"), "policy.shape"),
        (("--temperature", 1), "sampling.temperature: it has 0.0, not 1.0"),
        (("--drafter", "embedded:small"), "collect.drafter: it has 'embedded', not 'embedded:sma"),
        (("--tokens", "drop"), "it has --tokens keep, not --tokens drop"),
        (("--dense",), "policy.shape"),
        ((), ""),
    ],
)
def test_a_resumed_set_is_compared_before_models_load(
    traces: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[object, ...],
    differs: str,
) -> None:
    """Also a run that has nothing left to do loads none."""
    monkeypatch.setattr(load, "load_pair", None)
    words = ("collect", prompts, "-o", traces, "--resume", *SMALL, *more)
    if differs:
        assert differs in refuses(INPUT, *words)
    else:
        assert "0 prompts collected" in passes(*words).out


def test_a_word_hides_a_folder_and_says_so(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fit echo -o echo`, then `run --policy echo`: the word, whose gates nobody gave."""
    monkeypatch.chdir(tmp_path)
    assert "./echo" not in refuses(USAGE, "run", prompts, "--policy", "echo", *SMALL)
    (tmp_path / "echo").mkdir()
    assert "./echo" in refuses(USAGE, "run", prompts, "--policy", "echo", *SMALL)
