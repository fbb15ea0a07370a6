"""Every bad input gives one line that starts with `error:`, its exit code, and no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.artifacts.examples import sha
from tests.cli.command import copy_model, refuses, write_artifact, write_lines
from tests.cli.conftest import SMALL
from tests.cli.statuses import ARTIFACT, INPUT, MODEL, OUTPUT, USAGE

# --------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--nope"], "--nope"),
        (["frobnicate"], "frobnicate"),
        (["collect"], "prompts"),
        (["fit", "cart", "traces"], "--out"),
        (["run", "--batch-size", "0"], "--batch-size"),
        (["run", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["run", "--threads", "many"], "--threads"),
        (["run", "--temperature", "-1"], "temperature"),
        (["run", "--temperature", "nan"], "temperature"),
        (["run", "--top-p", "0"], "top_p"),
        (["run", "--top-k", "-2"], "top_k"),
        (["run", "--seed", "-1"], "seed"),
        (["run", "--device", "tpu"], "--device"),
        (["run", "--device", "cuda"], "CUDA"),
        (["run", "--device", "cuda:7"], "CUDA"),
        (["run", "--dtype", "int3"], "--dtype"),
        (["run", "--format", "csv"], "--format"),
        (["run", "--compare", "ar", "--policy", "chain"], "--compare --policy"),
        (["run", "--target", "/no/such/model", "--policy", "medusa"], "'medusa'"),
        (["collect", "embedded", "-o", "x", "--target", "/none", "--policy", "medusa"], "'medusa'"),
        (["traces", "snapshot", "x", "--list", "--skip-damaged"], "--list --skip-damaged"),
        (["run", "--stream", "--json"], "--stream"),
        (["run", "--stream", "--batch-size", "2"], "--stream"),
        (["registry", "init", "--registry", ""], "after '--registry'"),
        (["registry", "list", "--registry="], "--registry: expected text, found an empty word"),
        (["registry", "keygen", ""], "after 'keygen'"),
        (["registry", "copy", ""], "a shell variable that is not set"),
        (["run", "--compare", ""], "empty word"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options(arguments: Sequence[str], says: str) -> None:
    assert says in refuses(USAGE, *arguments)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("medusa", "medusa"),
        ("no/such/folder", "no/such/folder"),
        ("chain:num_draft_tokens", "field=value"),
        ("chain:num_draft_tokens=six", "field=value"),
        ("chain:num_draft_tokens=0", "num_draft_tokens"),
        ("chain:width=3", "width"),
        ("eagle2:depth=6:num_tokens=6", "num_tokens"),
        ("eagle2:top_k=999999", "top_k"),
        ("chain,chain", "once"),
        ("ar,,chain", "''"),
    ],
)
def test_bad_policies(policy: str, says: str, prompts: Path) -> None:
    option = "--compare" if "," in policy else "--policy"
    assert says in refuses(USAGE, "run", prompts, option, policy, *SMALL)


def test_a_word_hides_a_folder_and_says_so(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fit echo -o echo`, then `run --policy echo`: the word, whose gates nobody gave."""
    monkeypatch.chdir(tmp_path)
    assert "./echo" not in refuses(USAGE, "run", prompts, "--policy", "echo", *SMALL)
    (tmp_path / "echo").mkdir()
    assert "./echo" in refuses(USAGE, "run", prompts, "--policy", "echo", *SMALL)


def test_drafting_without_a_drafter(prompts: Path, tmp_path: Path) -> None:
    line = refuses(USAGE, "run", prompts, "--drafter", "none", "--policy", "chain", *SMALL)
    assert "--drafter" in line
    out = tmp_path / "traces"
    refuses(USAGE, "collect", prompts, "-o", out, "--drafter", "none", *SMALL)


# --------------------------------------------------------------------------- prompts


def test_missing_prompt_file(tmp_path: Path) -> None:
    for verb in (["run"], ["collect", "-o", tmp_path / "t"]):
        assert "absent.txt" in refuses(INPUT, *verb, tmp_path / "absent.txt", *SMALL)
    assert "a folder" in refuses(INPUT, "run", tmp_path, *SMALL)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_prompt_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.txt"
    path.write_text(content)
    assert "at least one prompt" in refuses(INPUT, "run", path, *SMALL)


@pytest.mark.parametrize(
    "bad", ['{"prompt": "b"', '["prompt"]', '{"prompt": 3}', '{"prompt": " "}', '{"text": "b"}']
)
def test_malformed_line_is_named_by_its_number(tmp_path: Path, bad: str) -> None:
    path = write_lines(tmp_path / "p.jsonl", '{"prompt": "a"}', "", bad)
    assert f"{path}, line 3" in refuses(INPUT, "run", path, *SMALL)


def test_unknown_format_of_a_file(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", '{"utterance": "a"}')
    assert "--format" in refuses(INPUT, "run", path, *SMALL)


def test_prompt_longer_than_the_context(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "long.txt", "short", "one two three " * 4000)
    for verb in (["run"], ["collect", "-o", tmp_path / "t"]):
        line = refuses(INPUT, *verb, path, *SMALL)
        assert "line-2" in line
        assert "tokens" in line


# --------------------------------------------------------------------------- output


@pytest.fixture
def under_a_file(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "regular-file", "x") / "out"


def test_unwritable_output(prompts: Path, under_a_file: Path) -> None:
    assert "regular-file" in refuses(OUTPUT, "run", prompts, "-o", under_a_file, *SMALL)
    assert "regular-file" in refuses(OUTPUT, "collect", prompts, "-o", under_a_file, *SMALL)


def test_output_folder_with_something_else(prompts: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "thesis.tex", "mine")
    line = refuses(OUTPUT, "collect", prompts, "-o", tmp_path, "--resume", *SMALL)
    assert "thesis.tex" in line
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_output_folder_with_traces_wants_resume(prompts: Path, traces: Path) -> None:
    assert "--resume" in refuses(OUTPUT, "collect", prompts, "-o", traces, *SMALL)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--shard", "3/2"], USAGE),
        (["--tokens", "none"], USAGE),
        (["--tokens", "hash"], USAGE),
        (["-o", "here"], OUTPUT),
    ],
)
def test_what_a_collection_cannot_do_is_told_before_its_models_are_loaded(
    prompts: Path, tmp_path: Path, options: Sequence[str], code: int
) -> None:
    """The target is not there: a refusal that names the option came first."""
    (tmp_path / "here").mkdir()
    write_lines(tmp_path / "here" / "thesis.tex", "mine")
    options = [str(tmp_path / word) if word == "here" else word for word in options]
    command = ("collect", prompts, "-o", tmp_path / "out", "--target", tmp_path / "no-model")
    line = refuses(code, *command, *options)
    assert options[0] in line or "thesis.tex" in line


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--policy", "chain"], "policy"),
        (["--drafter", "embedded:small"], "drafter"),
        (["--temperature", "0.5"], "sampling.temperature"),
        (["--max-new-tokens", "9"], "max_new_tokens"),
    ],
)
def test_resume_of_another_run(
    prompts: Path, traces: Path, options: Sequence[str], says: str
) -> None:
    line = refuses(INPUT, "collect", prompts, "-o", traces, "--resume", *SMALL, *options)
    assert says in line


def test_resume_with_another_target(prompts: Path, traces: Path, tmp_path: Path) -> None:
    folder = copy_model("target", tmp_path / "retrained")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    line = refuses(INPUT, "collect", prompts, "-o", traces, "--resume", "--target", folder, *SMALL)
    assert "target" in line


# --------------------------------------------------------------------------- traces


def test_fit_without_accepted_rows(blind_traces: Path, tmp_path: Path) -> None:
    line = refuses(INPUT, "fit", "cart", blind_traces, "-o", tmp_path / "policy")
    assert "not_fully_accepted" in line
    assert not (tmp_path / "policy").exists()


def test_fit_with_one_prompt(perfect_traces: Path, tmp_path: Path) -> None:
    line = refuses(INPUT, "fit", "cart", perfect_traces, "-o", tmp_path / "policy")
    assert "prompts" in line


def test_fit_from_what_is_no_trace_folder(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        assert "trace.json" in refuses(INPUT, "fit", "cart", folder, "-o", tmp_path / "policy")


def test_fit_options_out_of_range(traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "policy"
    for option, value, says in [
        ("--label", "luck", "label"),
        ("--filter", "some", "filter"),
        ("--method", "magic", "method"),
        ("--max-leaf-depth", 99, "--max-leaf-depth"),
        ("--gammas", "0.3;0.6", "--gammas"),
        ("--held-out", 1.5, "--held-out"),
        ("--alpha", -1, "alpha"),
        ("--index-base", 2, "--index-base"),
    ]:
        assert says in refuses(USAGE, "fit", "cart", traces, "-o", out, option, value)


def test_damaged_traces(traces: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(traces, tmp_path / "traces"))
    segment = sorted((copy / "nodes").iterdir())[0]
    segment.write_bytes(segment.read_bytes()[:-100])
    for verb in (["show", copy], ["fit", "cart", copy, "-o", tmp_path / "policy"]):
        assert segment.name in refuses(INPUT, *verb)
    segment.unlink()
    assert segment.name in refuses(INPUT, "show", copy)


def test_altered_traces(traces: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(traces, tmp_path / "traces"))
    segment = sorted((copy / "rounds").iterdir())[0]
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    assert segment.name in refuses(INPUT, "show", copy)


def test_traces_of_two_pairs(traces: Path, blind_traces: Path, tmp_path: Path) -> None:
    line = refuses(INPUT, "fit", "cart", traces, blind_traces, "-o", tmp_path / "policy")
    assert "drafter_digest" in line


def test_fit_over_something_else(traces: Path, perfect_traces: Path, tmp_path: Path) -> None:
    """A finished fit never replaces what is not an artifact; here the fit itself may refuse."""
    write_lines(tmp_path / "thesis.tex", "mine")
    for folder in (traces, perfect_traces):
        assert refuses(INPUT, "fit", "cart", folder, "-o", tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "mine\n"


# --------------------------------------------------------------------------- artifacts


def test_artifact_for_another_pair(prompts: Path, tmp_path: Path) -> None:
    for field, code in (("tokenizer_digest", "E_TOKENIZER"), ("target_digest", "E_TARGET")):
        folder = write_artifact(tmp_path / field, "hetero", **{field: sha("e")})
        assert code in refuses(ARTIFACT, "run", prompts, "--policy", folder, *SMALL)


def test_damaged_artifact(prompts: Path, tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "policy", "hetero")
    tensors = folder / "policy.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    assert "E_DIGEST" in refuses(ARTIFACT, "run", prompts, "--policy", folder, *SMALL)
    assert "E_DIGEST" in refuses(ARTIFACT, "show", folder)


def test_lossy_artifact_wants_consent(prompts: Path, tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "policy", "mars")
    assert "--allow-lossy" in refuses(USAGE, "run", prompts, "--policy", folder, *SMALL)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("ar+survival:max_tokens=8", "ar drafts nothing"),
        ("eagle2+marginal:tokens_per_s=100", "specctl profile"),
        ("eagle2+echo_budget:max_tokens=1", "at least the batch size, 2"),
        ("eagle2+survival:max_tokens=1", "at least the batch size, 2"),
        ("eagle2+mars:theta=1.5", "theta"),
        ("echo:gate_levels=2/1:thresholds=0.3/0.1", "strictly increasing"),
        ("echo:gate_levels=1/:thresholds=1.5/", "thresholds"),
        ("eagle2+eagle2", "another shape"),
    ],
)
def test_parts_that_cannot_go_together(policy: str, says: str, prompts: Path) -> None:
    arguments = ("run", prompts, "--policy", policy, "--batch-size", 2, "--allow-lossy", *SMALL)
    assert says in refuses(USAGE, *arguments)


def test_show_of_neither_artifact_nor_traces(tmp_path: Path) -> None:
    assert "neither" in refuses(INPUT, "show", tmp_path)
    assert "no folder" in refuses(INPUT, "show", tmp_path / "absent")


# --------------------------------------------------------------------------- models


def test_missing_model_folder(prompts: Path) -> None:
    for option in ("--target", "--drafter"):
        line = refuses(MODEL, "run", prompts, option, "no-such-folder/no-such-model", *SMALL)
        assert "no-such-folder/no-such-model" in line


def test_unknown_embedded_model(prompts: Path) -> None:
    assert "nano" in refuses(USAGE, "run", prompts, "--drafter", "embedded:nano", *SMALL)


def test_empty_model_folder(prompts: Path, tmp_path: Path) -> None:
    for option in ("--target", "--drafter"):
        assert "config.json" in refuses(MODEL, "run", prompts, option, tmp_path, *SMALL)


def drop_tensor(folder: Path, name: str) -> Path:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_head_with_a_missing_tensor(prompts: Path, tmp_path: Path) -> None:
    folder = drop_tensor(copy_model("eagle3", tmp_path / "head"), "fc.weight")
    assert "fc.weight" in refuses(MODEL, "run", prompts, "--drafter", folder, *SMALL)


@pytest.mark.parametrize(("option", "name"), [("--target", "target"), ("--drafter", "small")])
def test_checkpoint_with_a_missing_tensor(
    prompts: Path, tmp_path: Path, option: str, name: str
) -> None:
    missing = "model.layers.0.mlp.up_proj.weight"
    folder = drop_tensor(copy_model(name, tmp_path / name), missing)
    assert missing in refuses(MODEL, "run", prompts, option, folder, *SMALL)


def test_target_with_broken_config(prompts: Path, tmp_path: Path) -> None:
    for content in ("{", "[]", '{"model_type": "no-such-architecture"}'):
        folder = copy_model("target", tmp_path / f"target-{len(content)}")
        (folder / "config.json").write_text(content)
        assert "target-" in refuses(MODEL, "run", prompts, "--target", folder, *SMALL)


def test_drafter_with_another_vocabulary(prompts: Path, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "small")
    line = refuses(MODEL, "run", prompts, "--drafter", tmp_path / "small", *SMALL)
    assert "300" in line


def test_head_for_another_target(prompts: Path, tmp_path: Path) -> None:
    folder = copy_model("eagle3", tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    config["target_hidden_size"] = 2 * config.get("target_hidden_size", config["hidden_size"])
    (folder / "config.json").write_text(json.dumps(config))
    refuses(MODEL, "run", prompts, "--drafter", folder, *SMALL)
