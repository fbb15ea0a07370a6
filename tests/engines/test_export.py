"""Exports: what is written reads back as the policy, what an engine could not take is refused."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specctl.embedded import embedded_path
from specctl.engines.engine import EngineDrafter, EngineSettings, MeanRound, Serving
from specctl.engines.export import (
    ENGINES,
    Source,
    command_lines,
    drafter_of,
    read_exported,
    read_source,
    settings_of,
)
from specctl.engines.llamacpp_flags import FILE as LLAMACPP_FILE
from specctl.engines.settings import (
    FILE_NAME,
    PluginSettings,
    TraceSettings,
    read_settings,
)
from specctl.engines.sglang_flags import ADAPTIVE_FILE
from specctl.engines.vllm_flags import CONFIG_FILE, VLLM
from specctl.engines.vllm_plugin import CHECKED_VERSIONS
from specctl.errors import EngineError, UsageError
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import Chain, Policy, RootOnly, StaticTree, as_chain, build_shape
from specctl.replay.rounds import replay
from specctl.report import Given, read_given
from specctl.report.given import settings_for
from specctl.runtime.words import NamedPolicy, resolve_policy, words_of
from tests.artifacts.examples import POLICIES, write_artifact
from tests.cli.command import COST, USAGE, passes, refuses, specctl
from tests.cli.command import write_artifact as embedded_artifact
from tests.engines.exports import (
    CASES,
    HEAD,
    SCHEDULE,
    TAILED,
    WRONG_LLAMACPP,
    WRONG_SGLANG,
    WRONG_VLLM,
    exported,
)
from tests.replay.logs import random_traces
from tests.report.examples import ladder_results

MEAN = MeanRound(levels=3.4, tokens=9.6)
ENGINE = 8
"""What the command line ends with where an engine lacks a policy."""


# --------------------------------------------------------------------------- there and back


@pytest.mark.parametrize(("engine", "words"), CASES)
def test_show_tells_the_policy_of_an_exported_folder(
    engine: str, words: str, tmp_path: Path
) -> None:
    policy = resolve_policy(words).policy
    written = exported(engine, policy)
    for name, content in written.files.items():
        (tmp_path / name).write_text(content)
    if written.files:  # plain decoding of others and SGLang's static drafts have none
        shown = json.loads(passes("show", tmp_path, "--json").out)
        assert Policy.model_validate_json(json.dumps(shown[engine])) == policy
    assert set(written.files) <= set(ENGINES[engine].files)
    assert words_of(policy) == words


def test_lengths_of_the_last_range_hold_up_to_the_largest_batch() -> None:
    config = json.loads(exported("vllm", TAILED, max_batch_size=32).files[CONFIG_FILE])
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 4, 5], [5, 32, 2]]


def test_a_tree_of_width_one_is_a_chain() -> None:
    narrow = Policy(shape=StaticTree(depth=3, top_k=1, num_tokens=9))
    chain = Policy(shape=Chain(num_draft_tokens=3))
    for engine in ENGINES:
        assert exported(engine, narrow) == exported(engine, chain)


def test_no_draft_token_at_any_load_is_plain_decoding() -> None:
    config = HEAD | {"num_speculative_tokens": 3}
    config["num_speculative_tokens_per_batch_size"] = [[1, 8, 0]]
    assert VLLM.read({CONFIG_FILE: json.dumps(config)}) == Policy(shape=RootOnly())


def test_nodes_that_no_draft_holds_are_not_asked_of_sglang() -> None:
    """SGLang takes the best nodes of what it drafted and fails where there are fewer."""
    wide = Policy(shape=StaticTree(depth=2, top_k=2, num_tokens=48))
    flags = exported("sglang", wide).flags
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == str(1 + 2 + 4)


@pytest.mark.parametrize("kind", ["hetero", "c2t_ffn", "survival", "stop", "ddd", "opt_tree"])
def test_the_plugin_loads_an_artifact_from_anywhere(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its absolute place, whatever folder it was named from; it runs there as a chain."""
    write_artifact(tmp_path / "fitted", kind)
    monkeypatch.chdir(tmp_path)
    source = read_source("fitted/")
    vllm = ENGINES["vllm"]
    chosen = vllm.nearest_to(source.policy)
    assert chosen is not None
    drafter = EngineDrafter(model="head", method="eagle3")
    written = vllm.write(chosen, Serving(drafter=drafter, reference=source.reference_of))
    settings = PluginSettings.model_validate_json(written.files[FILE_NAME])
    assert settings.policy == str(tmp_path / "fitted")
    monkeypatch.chdir("/")
    assert vllm.read(written.files) == as_chain(source.policy)
    levels = json.loads(written.files[CONFIG_FILE])["num_speculative_tokens"]
    assert levels == build_shape(as_chain(source.policy).shape).max_depth


# --------------------------------------------------------------------------- what is lost

LOST = (
    ("vllm", "eagle2", "the tree of eagle2", "chain:6"),
    ("vllm", "threshold", "the tree of threshold", "threshold:top_k=1"),
    ("vllm", "chain+echo_budget:max_tokens=8", "budget echo_budget", "chain"),
    ("vllm", "chain+mars", "acceptance mars", "chain"),
    ("vllm", "svip+ratio", "only the likeliest ones", "svip"),
    ("sglang", "chain+ratio", "sampled drafts", "chain"),
    ("sglang", "confidence:window=5", "the choice of stop", None),
    ("sglang", "chain+survival:max_tokens=8", "budget survival", "chain"),
    ("sglang", "threshold:depth=3:top_k=2:num_tokens=9", "choice of threshold", None),
    ("sglang", "eagle2:5x8/250", "nodes above 128",
      "eagle2:5x8/128"),
    ("llamacpp", "chain+ratio", "sampled drafts", "chain"),
    ("llamacpp", "eagle2", "the choice of eagle2", "chain:6"),
    ("vllm", "p_min:threshold=0.3:window=5", "among the ten", "confidence:threshold=0.3:window=5"),
    ("llamacpp", "adasd_stop", "or up to its own stop", None),
    ("llamacpp", "confidence:window=5", "among the ten likeliest", "p_min:threshold=0.4:window=5"),
    ("llamacpp", "stop:signal=confidence:threshold=0.4:window=5:top_k=2:num_tokens=9",
      "the choice of stop", "p_min:threshold=0.4:window=5"),
    ("llamacpp", TAILED, "lengths by batch size", "chain:5"),
    ("llamacpp", "adasd_stop:window=5", "the choice of adasd_stop", None),
    ("transformers", "eagle2", "the choice of eagle2", "chain:6"),
    ("transformers", TAILED, "lengths of larger batches", "chain:5"),
    ("transformers", "confidence:keep_last=false", "without their last uncertain", "confidence"),
    ("transformers", "svip:window=7", "sqrt_entropy", None),
)  # fmt: skip


@pytest.mark.parametrize(("name", "words", "lost", "nearest"), LOST)
def test_what_an_engine_lacks_is_said_and_the_nearest_offered(
    name: str, words: str, lost: str, nearest: str | None
) -> None:
    """Not for a rule of which no mean round is known: its largest may be a hundred times that."""
    engine, policy = ENGINES[name], resolve_policy(words, allow_lossy=True).policy
    assert any(lost in one for one in engine.losses(policy))
    chosen = engine.nearest_to(policy)
    assert chosen == (None if nearest is None else resolve_policy(nearest).policy)
    if chosen is None:
        return
    assert engine.runs(chosen)
    assert engine.nearest_to(chosen) == chosen


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("kind", POLICIES)
def test_every_policy_has_a_nearest_that_can_be_written(name: str, kind: str) -> None:
    engine, policy = ENGINES[name], POLICIES[kind]
    chosen = engine.nearest_to(policy, MEAN) if engine.losses(policy) else policy
    assert chosen is not None
    method = "draft_model" if name == "transformers" else "eagle3"
    serving = Serving(
        drafter=EngineDrafter(model="head", method=method),
        target="target",
        max_batch_size=engine.max_batch_size or 8,
        reference=lambda _: "chain",
    )
    assert engine.runs(chosen)
    engine.write(chosen, serving)


def test_drawn_drafts_are_exported_where_the_engine_draws() -> None:
    assert exported("transformers", "confidence+ratio").code[-1].endswith("do_sample=True)")


def test_the_mean_round_sizes_the_nearest_static_draft() -> None:
    sglang = ENGINES["sglang"]
    stop = resolve_policy("confidence:window=20").policy
    tree = resolve_policy("threshold:depth=8:top_k=4").policy
    wide = resolve_policy("threshold:depth=8:top_k=8").policy
    for policy, mean, nearest in (
        (stop, MEAN, "chain:3"),
        (tree, MEAN, "eagle2:3x4/10"),
        (stop, MeanRound(levels=0.2, tokens=1.2), "chain:1"),
        (wide, MeanRound(levels=5, tokens=300.0), "eagle2:5x8/128"),
    ):
        assert sglang.nearest_to(policy, mean) == resolve_policy(nearest).policy


# --------------------------------------------------------------------------- wrong settings


@pytest.mark.parametrize("case", WRONG_VLLM)
def test_settings_that_vllm_would_refuse_or_change(case: str) -> None:
    text = json.dumps(HEAD | WRONG_VLLM[case][0])
    with pytest.raises(EngineError, match="--speculative-config"):
        ENGINES["vllm"].read({CONFIG_FILE: text})


@pytest.mark.parametrize("case", WRONG_SGLANG)
def test_adaptive_files_that_sglang_would_refuse_or_misread(case: str) -> None:
    with pytest.raises(EngineError, match="adaptive configuration"):
        ENGINES["sglang"].read({ADAPTIVE_FILE: json.dumps(WRONG_SGLANG[case][0])})


@pytest.mark.parametrize("case", WRONG_LLAMACPP)
def test_flags_that_llamacpp_would_refuse_or_misread(case: str) -> None:
    chain = json.loads(exported("llamacpp", "chain:3").files[LLAMACPP_FILE])
    with pytest.raises(EngineError, match=LLAMACPP_FILE):
        ENGINES["llamacpp"].read({LLAMACPP_FILE: json.dumps(chain | WRONG_LLAMACPP[case])})


def test_rates_of_llamacpp_may_be_equal() -> None:
    rates = (0.123457, 0.123457)
    written = exported("llamacpp", "chain:2", synthetic_rates=rates)
    assert written.flags[-2:] == ("--spec-synth-rates", "0.123457,0.123457")
    assert "Acceptances are made up" in written.notes[-1]


def test_one_draft_token_at_least_is_a_chain_of_llamacpp() -> None:
    files = exported("llamacpp", "chain:3").files
    at_least = json.dumps(json.loads(files[LLAMACPP_FILE]) | {"spec_draft_n_min": 1})
    chain = Policy(shape=Chain(num_draft_tokens=3))
    assert ENGINES["llamacpp"].read({LLAMACPP_FILE: at_least}) == chain


@pytest.mark.parametrize(
    ("method", "max_batch_size", "is_off"),
    [("eagle3", 4, True), ("eagle3", None, True), ("eagle3", 1, False), ("draft_model", 4, False)],
)
def test_heads_that_serve_several_requests_do_not_sample_in_llamacpps_backend(
    method: Any, max_batch_size: int | None, *, is_off: bool
) -> None:
    """There an EAGLE-3 head lost half of its accepted tokens (`tests/engines/test_llamacpp.py`)."""
    drafter = EngineDrafter(model="d.gguf", method=method)
    serving = Serving(drafter=drafter, max_batch_size=max_batch_size)
    written = ENGINES["llamacpp"].write(resolve_policy("chain").policy, serving)
    assert ("--no-spec-draft-backend-sampling" in written.flags) == is_off
    assert bool(written.notes) == is_off


def test_files_of_llamacpp_that_cannot_be_shown(tmp_path: Path) -> None:
    file = tmp_path / LLAMACPP_FILE
    for content, says in (
        (b'{"draft_max": 3}', "llama-server.json: draft_max"),
        (b"\xff", "which is not UTF-8"),
    ):
        file.write_bytes(content)
        assert says in refuses(ENGINE, "show", tmp_path)
    file.unlink()
    file.mkdir()
    assert "is a folder with 'llama-server.json'" in refuses(4, "show", tmp_path)


def test_batches_below_sglang_s_first_key_take_its_settings() -> None:
    """Its own choice among several lengths is no policy of ours."""
    late = json.dumps({"4": {"candidate_steps": [3]}, "16": {"candidate_steps": [1]}})
    expected = resolve_policy("schedule:from_batch=1/16:num_draft_tokens=3/1").policy
    assert ENGINES["sglang"].read({ADAPTIVE_FILE: late}) == expected
    moving = json.dumps({"1": {"candidate_steps": [1, 3, 5]}})
    with pytest.raises(EngineError, match="several candidate_steps"):
        ENGINES["sglang"].read({ADAPTIVE_FILE: moving})


# --------------------------------------------------------------------------- as typed


def test_files_and_flags_of_vllm(tmp_path: Path) -> None:
    """The command names the files by their absolute places, and `show` reads them back."""
    words = "stop:signal=survival:threshold=0.5:window=5"
    said = passes("export", words, "--to", "vllm", "--drafter", "embedded", "-o", tmp_path).out
    lines = said.splitlines()
    assert f"SPECCTL_VLLM={tmp_path}/{FILE_NAME} \\" in lines
    assert "VLLM_USE_V2_MODEL_RUNNER=0 \\" in lines
    assert lines[lines.index("vllm serve TARGET \\") + 2] == "  --no-async-scheduling"
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert (config["method"], config["num_speculative_tokens"]) == ("eagle3", 5)
    assert (Path(config["model"]) / "config.json").is_file()
    for place in (tmp_path, tmp_path / FILE_NAME, tmp_path / CONFIG_FILE):
        assert passes("show", place).out == f"vLLM: {words}\n"
    plain = passes("export", "chain", "--to", "vllm", "--drafter", "embedded", "-o", tmp_path).out
    assert passes("show", tmp_path).out == "vLLM: chain\n"  # without the plugin's file
    assert f"removed {tmp_path / FILE_NAME}, of an earlier export" in plain.splitlines()
    [checked] = [line for line in plain.splitlines() if line.startswith("Written for vLLM")]
    assert all(version in checked.partition(":")[0] for version in CHECKED_VERSIONS)
    (tmp_path / "other.json").write_text("{}")
    assert read_exported(tmp_path / "other.json") == []


def test_files_and_models_of_llamacpp(tmp_path: Path) -> None:
    """The models come first: one that is refused leaves no folder behind, and no flags."""
    pytest.importorskip("gguf", reason="no gguf here; the extra gguf has it")
    words = ("export", "chain", "--to", "llamacpp", "--drafter", "embedded:small")
    folder = tmp_path / "serve"
    passes(*words, "--target", "embedded", "--weights", "q8_0", "-o", folder)
    flags = json.loads((folder / LLAMACPP_FILE).read_text())
    models = [flags[name] for name in ("model", "spec_draft_model")]
    assert models == [str(folder / name) for name in ("target.gguf", "drafter.gguf")]
    assert all(Path(model).is_file() for model in models)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "qwen2"}')
    refused = tmp_path / "refused"
    refuses(5, *words, "--target", other, "-o", refused)
    assert not refused.exists()
    refused.mkdir()
    refuses(5, *words, "--target", other, "-o", refused)
    assert list(refused.iterdir()) == []


@pytest.mark.parametrize("name", ["vllm", "sglang", "llamacpp"])
def test_a_shell_reads_the_printed_command_as_it_is_meant(name: str) -> None:
    engine = ENGINES[name]
    serving = Serving(drafter=EngineDrafter(model="my head's.gguf", method="eagle3"))
    written = engine.write(resolve_policy("chain").policy, serving)
    lines = command_lines(engine, written, "my target.gguf")
    words = shlex.split(" ".join(line.removesuffix("\\") for line in lines))
    assert words[-len(written.flags) :] == [*written.flags]
    assert "my target.gguf" in words


def test_the_drafter_is_that_of_the_artifact_or_given(tmp_path: Path) -> None:
    """Its kind is read from its folder; nothing is taken for granted."""
    fitted = embedded_artifact(tmp_path / "fitted", "hetero")
    said = passes("export", fitted, "--to", "vllm", "--nearest").out
    assert '"method": "eagle3"' in said
    assert str(embedded_path("eagle3")) in said
    alone = ("export", "chain", "--to", "vllm", "--target", "TARGET")
    assert "needs the drafter" in refuses(USAGE, *alone)
    assert "The pair is the embedded one" in passes(*alone[:-2]).out
    elsewhere = ("export", "chain", "--to", "vllm", "--drafter", "somebody/head")
    assert "--method" in refuses(USAGE, *elsewhere)
    assert '"method": "eagle"' in passes(*elsewhere, "--method", "eagle").out
    small = ("export", "chain", "--to", "vllm", "--drafter", "embedded:small")
    assert '"method": "draft_model"' in passes(*small).out


OTHER_PAIRS = (
    ("--drafter embedded", False),
    ("--target embedded --drafter embedded:eagle3", False),
    ("--drafter embedded:small", True),
    ("--target embedded:small", True),
    ("--target org/other", True),
    ("--target org/other --drafter org/head --method eagle3", True),
)


@pytest.mark.parametrize(("words", "warned"), OTHER_PAIRS)
@pytest.mark.parametrize("kind", ["stop", "chain"])
def test_a_policy_of_another_pair_is_exported_with_a_warning(
    kind: str, words: str, tmp_path: Path, *, warned: bool
) -> None:
    """And with the refusal to come, where the plugin checks the pair."""
    fitted = embedded_artifact(tmp_path / "fitted", kind)
    done = specctl("export", fitted, "--to", "vllm", *words.split())
    assert done.code == 0, done.err
    assert done.err.startswith("warning: ") == warned, done.err
    assert ("was made on embedded with embedded" in done.err) == warned
    assert ("the plugin refuses it" in done.err) == (warned and kind != "chain")


def test_a_log_inside_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("export", "chain:8", "--to", "vllm", "--drafter", "embedded")
    traced = (*words, "--trace", "traces", "--dense", "--every", 4, "--max-bytes", 1000000)
    passes(*traced, "-o", "serve")
    settings = PluginSettings.model_validate_json((tmp_path / "serve" / FILE_NAME).read_text())
    assert settings.policy is None
    assert settings.trace is not None
    assert settings.trace.out == str(tmp_path / "traces")
    assert (settings.trace.dense, settings.trace.every) == (True, 4)
    assert settings.trace.max_bytes == 1000000
    inline = json.loads(passes(*traced, "--json").out)["environment"]["SPECCTL_VLLM"]
    assert PluginSettings.model_validate_json(inline) == settings


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nowhere.json", "nowhere.json, cannot be used: no such file or folder"),
        ("{}", "SPECCTL_VLLM, cannot be used: it has no policy and no trace"),
        (' {"policy": "chain", "trace": {"out": "t", "dense": true}}', "nothing to a policy"),
        ('{"trace": {"out": "t", "dense": true, "dense_every": 2}}', "needs a log of rounds"),
    ],
)
def test_settings_that_the_plugin_cannot_use(text: str, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        read_settings(text)


REFUSED = (
    (USAGE, "chain --to tgi", "none of vllm, sglang, transformers"),
    (USAGE, "chain --to vllm --drafter embedded --method eagle9", "none of eagle3, eagle,"),
    (USAGE, "chain --to sglang --max-draft-tokens 8", "--max-draft-tokens is for vLLM"),
    (USAGE, "chain --to transformers --max-batch-size 4", "at most 1 request"),
    (ENGINE, "chain --to transformers --drafter embedded", "drafts with draft_model here"),
    (ENGINE, "chain --to llamacpp --drafter embedded", "the target is not named; give --target"),
    (USAGE, "chain --to sglang --trace t", "in which specctl logs"),
    (USAGE, "chain --to vllm --dense", "--dense needs --trace"),
    (ENGINE, "ar --to vllm --trace t", "drafts"),
    (
        ENGINE,
        "confidence:window=4 --to vllm --drafter embedded --trace t --dense",
        "chain:4 for the log",
    ),
    (ENGINE, f"{TAILED} --to sglang --drafter embedded:small", "EAGLE drafter"),
    (4, "wrong.json --to vllm", "specctl tune"),
)


@pytest.mark.parametrize(("code", "words", "says"), REFUSED)
def test_exports_that_are_refused(
    code: int, words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.json").write_text("{}")
    assert says in refuses(code, "export", *words.split(), "-o", "out")
    assert not Path("out").exists()


def test_a_policy_that_the_engine_lacks_is_written_on_request_alone(tmp_path: Path) -> None:
    words = ("export", "eagle2", "--to", "vllm", "--drafter", "embedded", "-o", tmp_path)
    refused = specctl(*words)
    assert refused.code == ENGINE
    assert "vLLM does not run the tree of eagle2" in refused.out
    assert "The nearest policy that it runs: chain:6." in refused.out
    assert "tune --for vllm" in refused.out
    assert "--nearest" in refused.err
    said = (line.split(":")[0] for line in refused.out.splitlines())
    assert not any(line in refused.err for line in said), "a sentence on both streams"
    assert list(tmp_path.iterdir()) == []
    passes(*words, "--nearest")
    assert json.loads((tmp_path / CONFIG_FILE).read_text())["num_speculative_tokens"] == 6


# --------------------------------------------------------------------------- figures and tunings


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "traces"
    random_traces(folder, num_prompts=24, depth=4, top_k=3)
    return folder


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("costs") / "cost_model.json"
    path.write_text(json.dumps(COST))
    return path


def test_figures_of_a_policy_and_of_the_nearest(traces: Path, costs: Path) -> None:
    """The nearest is as long as the policy's mean round, and the figures are replay's own."""
    words = ("confidence:threshold=0.3:window=4", "--to", "sglang", "--nearest")
    words += ("--drafter", "embedded", "--log", traces)
    said = json.loads(passes("export", *words, "--json").out)
    first, second = said["replay"]["policies"]
    levels = first["pooled"]["drafted_levels"] / first["pooled"]["calls"]
    length = said["exported"]["shape"]["num_draft_tokens"]
    assert length == round(levels) < 4
    label = f"chain:{length}"
    own = ("replay", traces, "-p", f"confidence:threshold=0.3:window=4,{label}", "--json")
    alone = json.loads(passes(*own).out)["policies"]
    calls = [one["pooled"]["calls"] for one in (first, second)]
    assert [one["pooled"]["calls"] for one in alone] == calls
    assert second["pooled"]["policy"] == label
    assert "tokens/s" in specctl("export", *words, "--cost-model", costs).out


def test_a_load_is_simulated_as_its_engine_batches(traces: Path, costs: Path) -> None:
    """A policy that the engine lacks is simulated in our own batches, and no budget without one."""
    log = ("--to", "vllm", "--drafter", "embedded", "--log", traces, "--cost-model", costs)
    for words, engine in (("chain:3", "vllm"), ("eagle2:depth=3", "specctl")):
        of_batch = ("export", words, *log, "--nearest", "--max-batch-size", 2, "--json")
        assert json.loads(passes(*of_batch).out)["replay"]["load"]["engine"] == engine
    told = refuses(USAGE, "export", "chain+survival:max_tokens=8", *log)
    assert "needs --max-batch-size above 1 and --cost-model" in told


@pytest.mark.parametrize("words", ["chain:3", "eagle2:depth=3:top_k=3"])
def test_synthetic_rates_are_those_of_the_written_policy(words: str, traces: Path) -> None:
    """The i-th is the chance that a round accepts i tokens, where it drafts as many."""
    policy = resolve_policy("chain:3").policy
    export = ("export", words, "--to", "vllm", "--drafter", "embedded", "--nearest")
    said = json.loads(passes(*export, "--log", traces, "--synthetic", "--json").out)
    assert Policy.model_validate_json(json.dumps(said["exported"])) == policy
    [run] = replay(DenseLog.open(TraceSet.open(str(traces))), [policy], with_bounds=False)
    drafted, accepted = run.outcomes.verified - 1, run.outcomes.accepted
    rates = json.loads(said["files"][CONFIG_FILE])["synthetic_acceptance_rates"]
    chance = 1.0
    for place in range(3):
        chance *= (accepted[(drafted > place) & (accepted >= place)] > place).mean()
        assert rates[place] == pytest.approx(chance, abs=1e-6)


def test_synthetic_rates_need_a_log_and_an_engine_that_draws_them(traces: Path) -> None:
    assert "needs --log" in refuses(USAGE, "export", "chain", "--to", "vllm", "--synthetic")
    log = ("--log", traces, "--synthetic")
    for words in (("chain", "--to", "sglang"), ("ar", "--to", "vllm")):
        assert "for drafts in vLLM and llama.cpp" in refuses(USAGE, "export", *words, *log)


def test_a_fitted_tree_and_its_chain_are_told_apart(traces: Path, tmp_path: Path) -> None:
    fitted = write_artifact(tmp_path / "fitted", "hetero") or tmp_path / "fitted"
    said = specctl("export", fitted, "--to", "vllm", "--log", traces)
    assert "The nearest policy that it runs: hetero on a chain." in said.out, said


def test_a_lossy_policy_has_no_figures_but_its_nearest_has(traces: Path) -> None:
    said = specctl(
        *("export", "chain+mars", "--to", "vllm", "--drafter", "embedded", "--nearest"),
        *("--log", traces, "--json"),
    )
    [figures] = json.loads(said.out)["replay"]["policies"]
    assert figures["pooled"]["policy"] == "chain"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_tuning_for_an_engine_searches_what_it_runs(
    engine: str, traces: Path, costs: Path, tmp_path: Path
) -> None:
    """Every finalist can be exported as it is, and so can the file that says it."""
    verb = ("tune", traces, "--cost-model", costs, "--for", engine, "--held-out", 0.5, "--seed", 3)
    family = ("--family", "confidence:window=4") if engine in ("vllm", "transformers") else ()
    outcome = specctl(*verb, *family, "-o", tmp_path, "--threads", 1)
    assert outcome.code == 0, outcome
    document = json.loads((tmp_path / "tune.json").read_text())
    assert document["for_engine"] == document["config"]["for_engine"] == engine
    assert f"for {engine}: latency" in outcome.out
    for standing in document["policies"]:
        policy = Policy.model_validate_json(json.dumps(standing["record"]))
        assert ENGINES[engine].runs(policy)
    eagle2 = next(found for found in document["families"] if found["family"] == "eagle2")
    assert (eagle2["num_settings"] > 0) == (engine == "sglang")
    assert (eagle2["num_not_run"] > 0) == (engine != "sglang")
    left_out = any(found["num_not_run"] for found in document["families"])
    assert ("of the grid are of other engines" in outcome.out) == left_out
    small = "embedded:small" if engine == "transformers" else "embedded"
    done = specctl("export", tmp_path / "tune.json", "--to", engine, "--drafter", small)
    assert (done.code, "was made on synthetic" in done.err) == (0, True)


def test_tuning_for_an_engine_refuses_what_it_lacks(traces: Path, costs: Path) -> None:
    verb = ("tune", traces, "--cost-model", costs, "--held-out", 0.5)
    warned = specctl(*verb, "--for", "sglang", "--family", "svip")
    assert warned.code == USAGE
    assert "--family svip: the engine of --for runs none of the" in warned.err
    assert "--for" in refuses(USAGE, *verb, "--for", "tgi")
    assert "at most 1" in refuses(USAGE, *verb, "--for", "transformers", "--batch-size", 4)


@pytest.fixture(scope="module")
def tuned(traces: Path, costs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned") / "for-vllm"
    verb = ("tune", traces, "--cost-model", costs, "--held-out", 0.5, "--seed", 3, "--for", "vllm")
    assert specctl(*verb, "-o", folder, "--threads", 1).code == 0
    return folder


def test_a_tuning_names_the_artifact_beside_it(tmp_path: Path, tuned: Path) -> None:
    """The plugin then follows that folder; without it the words must do."""
    shutil.copytree(tuned, tmp_path, dirs_exist_ok=True)
    source = read_source(str(tmp_path / "tune.json"))
    assert source.reference == str(tmp_path / "policy")
    assert source.mean == read_source(str(tmp_path / "policy")).mean
    page_says_what_export_says(tmp_path / "tune.json")
    (tmp_path / "policy").rename(tmp_path / "moved")
    assert read_source(str(tmp_path / "tune.json")).reference == words_of(source.policy)
    write_artifact(tmp_path / "policy", "hetero")  # of another tuning
    assert read_source(str(tmp_path / "tune.json")).reference == words_of(source.policy)


PLAINLY = {
    "vllm": "vllm serve TARGET",
    "sglang": "python -m sglang.launch_server --model-path TARGET",
    "transformers": "target.generate(**inputs)",
}


def test_where_drafting_does_not_pay_the_plain_command_is_printed(
    traces: Path, tmp_path: Path
) -> None:
    """With the reason, of `tune.json`, of the artifact beside it and on the page."""
    slow, tuned = tmp_path / "slow.json", tmp_path / "tuned"
    slow.write_text(json.dumps(COST | {"draft_fixed_us": 9000.0}))
    verb = ("tune", traces, "--cost-model", slow, "--held-out", 0.5, "--seed", 3, "--for", "vllm")
    assert specctl(*verb, "-o", tuned, "--threads", 1).code == 0
    document = json.loads((tuned / "tune.json").read_text())
    assert document["chosen"] == "ar"
    reason = "No setting is faster, even on training prompts."
    assert reason in (tuned / "policy" / "README.md").read_text()
    for engine, command in PLAINLY.items():
        for given in (tuned / "tune.json", tuned / "policy"):
            words = ("export", given, "--to", engine, "--target", "TARGET")
            written = json.loads(passes(*words, "--json").out)
            assert (written["flags"], written["files"], written["losses"]) == ([], {}, [])
            lines = passes(*words).out.splitlines()
            assert command in lines
            why = "`specctl tune` chose plain" if given.is_dir() else reason
            assert sum(line.startswith(why) for line in lines) == 1
    [page] = settings_for(read_given(tune=tuned / "tune.json"), tuned / "tune.json").engines
    assert [*page.lines] == ["vllm serve synthetic"]
    assert page.notes[0] == reason


def test_the_nearest_is_as_large_as_the_rounds_of_the_tuning(tuned: Path, tmp_path: Path) -> None:
    """Not as the largest: a mean round of 5.4 nodes was written as 711."""
    document = json.loads((tuned / "tune.json").read_text())
    [chosen] = [one for one in document["policies"] if one["policy"] == document["chosen"]]
    calls = chosen["held_out"]
    assert 1 < calls["levels_per_call"]["value"] <= calls["verified_per_call"]["value"] - 1
    rule = resolve_policy("threshold:depth=8:top_k=10").policy
    chosen["record"] = rule.model_dump(mode="json")
    calls["levels_per_call"]["value"], calls["verified_per_call"]["value"] = 3.2, 5.4
    (tmp_path / "tune.json").write_text(json.dumps(document))
    words = ("--to", "sglang", "--drafter", "embedded", "--nearest")
    flags = json.loads(specctl("export", tmp_path / "tune.json", *words, "--json").out)["flags"]
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == "5"
    assert flags[flags.index("--speculative-num-steps") + 1] == "3"
    refused = specctl("export", "threshold:depth=8:top_k=10", *words)
    assert refused.code == ENGINE
    assert "specctl tune --for sglang" in refused.err
    assert refused.err.count("\n") == 1


def test_the_kind_of_a_downloaded_drafter_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the hub's cache, without the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    chain = read_source("chain").named
    for name, kind, of in (
        ("eagle3", "eagle3", "LlamaForCausalLMEagle3"),
        ("small", "draft_model", "LlamaForCausalLM"),
    ):
        folder = tmp_path / f"models--org--{name}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("abc")
        (folder / "snapshots" / "abc").mkdir(parents=True)
        config = (embedded_path(name) / "config.json").read_text()
        (folder / "snapshots" / "abc" / "config.json").write_text(config)
        found = drafter_of(chain, f"org/{name}", None)
        assert found == EngineDrafter(model=f"org/{name}", method=kind, architecture=of)
    for name in ("org/other", "no model of the hub"):
        with pytest.raises(UsageError, match=r"of unknown kind: .*; give --method"):
            drafter_of(chain, name, None)


def page_says_what_export_says(path: Path) -> None:
    """Of the engine that was tuned for, and of no other; a pair without a drafter is said.

    Places of this machine are words there, and the artifact is its folder's name.
    """
    [unknown] = settings_for(read_given(tune=path), path).engines
    assert unknown.lines == ()
    assert unknown.notes[0].startswith("Nothing to set in vLLM yet: drafter ")
    document = json.loads(path.read_text()) | {"target": "embedded", "drafter": "embedded"}
    path.write_text(json.dumps(document))
    given = settings_for(read_given(tune=path), path)
    assert given.artifact == resolve_policy(str(path.parent / "policy")).artifact_digest
    [vllm] = given.engines
    said = passes("export", path, "--to", "vllm", "--drafter", "embedded", "--target", "embedded")
    places = {embedded_path("target"): "TARGET", embedded_path("eagle3"): "DRAFTER"}
    printed = said.out.replace(str(path.parent / "policy"), path.parent.name)
    for place, name in places.items():
        printed = printed.replace(str(place), name)
    assert "\n".join(vllm.lines) in printed
    assert vllm.lines[-1].startswith("  --")
    assert "/" not in " ".join(vllm.lines)
    assert vllm.notes[-1] == "For TARGET and DRAFTER write your own places."


def test_an_artifact_on_a_page_is_named_after_its_folder(tmp_path: Path) -> None:
    """Whose plugin loads it by its place."""
    (tmp_path / "my fits" / "policy").mkdir(parents=True)
    place = str(tmp_path / "my fits" / "policy")
    source = replace(read_source("confidence:window=4"), reference=place)
    found = settings_of(source, ENGINES["vllm"], "embedded", "embedded")
    assert '"policy":"my fits"' in "".join(found.lines).replace(": ", ":")
    assert str(tmp_path) not in repr(found)
    assert found.notes[-1] == "For TARGET, DRAFTER and my fits write your own places."


def test_a_page_names_every_engine_for_a_ladder() -> None:
    """A loss with the nearest, or flags and their file; the label of an artifact has no words."""

    def engines(label: str) -> list[EngineSettings]:
        ladder = ladder_results(label=label, target="embedded", drafter="embedded")
        return list(settings_for(Given(ladder=ladder), None).engines)

    vllm, sglang, transformers, llamacpp = engines("eagle2:4x2/9")
    assert vllm.lines == transformers.lines == ()
    assert vllm.notes[0].endswith("The nearest policy that it runs: chain.")
    assert llamacpp.notes[0].endswith("The nearest policy that it runs: chain.")
    assert "  --speculative-num-draft-tokens 9" in sglang.lines
    assert "# sglang-adaptive.json:" in engines(SCHEDULE)[1].lines
    for label in ("mine", "hetero"):
        [own] = settings_for(Given(ladder=ladder_results(label=label)), None).engines
        assert own.notes == (
            f"specctl export ARTIFACT --to ENGINE prints what to set for {label}.",
        )
    assert settings_for(Given(), None).engines == ()


def test_a_policy_that_nothing_names_is_refused() -> None:
    """A fitted record of which only tune.json is left has no words."""
    fitted = Source(NamedPolicy("hetero", POLICIES["hetero"]), None)
    with pytest.raises(EngineError, match="policy hetero"):
        fitted.reference_of(POLICIES["hetero"])
    assert words_of(POLICIES["hetero"]) is None
    assert fitted.reference_of(Policy(shape=RootOnly())) == "ar"


def test_room_for_longer_policies_is_left_unused() -> None:
    """`num_speculative_tokens` may be more than the policy drafts; the plugin then plays it."""
    chain = resolve_policy("chain:3").policy
    drafter = EngineDrafter(model="d", method="eagle3")
    export = VLLM.write(chain, Serving(drafter=drafter, max_draft_tokens=8))
    assert json.loads(export.files["speculative-config.json"])["num_speculative_tokens"] == 8
    assert VLLM.read(export.files) == chain
    trace = TraceSettings(out="t", dense=True)
    logged = VLLM.write(chain, Serving(drafter=drafter, max_draft_tokens=8, trace=trace))
    assert "policy" not in json.loads(logged.files["specctl-vllm.json"])
