"""`export` writes each kind of drafter as the engine's own method, and refuses another one."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch

from specctl.engines.engine import EngineDrafter, Serving
from specctl.engines.export import ENGINES, drafter_of, read_source
from specctl.engines.llamacpp_flags import TYPES
from specctl.engines.settings import TraceSettings
from specctl.engines.sglang_flags import ALGORITHMS
from specctl.engines.vllm_flags import KINDS as VLLM_KINDS
from specctl.engines.vllm_flags import VLLM
from specctl.errors import EngineError, ModelError, UsageError
from specctl.runtime.checkpoints import WORDS, Kind, Served
from specctl.runtime.load import load_pair
from specctl.runtime.words import resolve_policy
from tests.cli.command import USAGE, passes, refuses, specctl
from tests.runtime.checkpoints import KINDS, SIXTEEN, arch, publish

CHAIN = read_source("chain:4").named
BY_ENGINE = {
    "eagle3": ("eagle3", "EAGLE3"),
    "eagle": ("eagle", "EAGLE"),
    "peagle": ("eagle3", None),
    "medusa": ("medusa", None),
    "mlp_speculator": (None, None),
    "dflash": ("dflash", "DFLASH"),
    "dspark": ("dspark", "DSPARK"),
    "mtp": ("mtp", "EAGLE"),
    "draft_model": ("draft_model", "STANDALONE"),
}
"""vLLM's method and SGLang's algorithm, where they have one."""
SERVED = [kind for kind, (method, _) in BY_ENGINE.items() if method]
FOLDERS = {kind: name for name, (_, _, kind) in reversed(KINDS.items()) if "MTP" not in name}
FOLDERS |= {"eagle3": "SpecForge", "eagle": "EAGLE-1 of SGLang", "mtp": "MTP of SGLang"}
OWN_NAME = ("SafeAILab", "SafeAILab, 13B", "AngelSlim", "EAGLE-1 of SafeAILab", "EAGLE-1 of vLLM")
"""Heads that SGLang loads once they are named as its own model is."""
NOT_IN_SGLANG = (
    *(
        *OWN_NAME,
        "SafeAILab, weights not downloaded",
        "no draft_vocab_size",
        "AngelSlim for speech",
    ),
    *("Automodel", "Automodel for gpt-oss", "speculators", "vLLM's Qwen3", "vLLM's MiniMax"),
    *("EAGLE-1 without its embedding", "EAGLE-1 of two layers", "EAGLE-1 of vLLM, DeepSeek"),
    *("EAGLE-1 of Automodel", "EAGLE-1 by vLLM's model_type", "DFlash of AngelSlim"),
    *("DFlash of speculators", "DFlash2 of speculators", "XPress of vLLM 0.33"),
    *("DFlash by its config", "DFlash by its tensors", "DSpark of ModelOpt"),
    *("DSpark of vLLM, Gemma 4", "DSpark of speculators", "MTP of vLLM", "MTP of Qwen3.5"),
    "MTP of speculators",
)
"""Folders of kinds that it serves, whose architecture it has no model for."""
NOT_IN_VLLM = (
    *("DFlash of AngelSlim", "DFlash by its config", "DFlash by its tensors"),
    "DSpark of ModelOpt",
)
"""The same, of block drafters alone: of the others its code makes the name in many ways."""


def folder_of(kind: str, place: Path) -> Path:
    config, stems, _ = KINDS[FOLDERS[kind]]
    return publish(place, config, stems)


def test_every_kind_has_a_method() -> None:
    assert {*get_args(Kind)} == {*WORDS} == {*BY_ENGINE}
    assert {kind for kind, (_, other) in BY_ENGINE.items() if other} == {*ALGORITHMS}


def test_the_option_names_the_kinds_that_an_engine_serves() -> None:
    assert {*get_args(Served)} == {*VLLM_KINDS, *ALGORITHMS, *TYPES}
    shown = " ".join(passes("export", "--help-all").out.replace("│", " ").split())
    [told] = re.findall(r"a drafter that is not here: (.*?)\. N-grams", shown)
    assert tuple(one.partition(" ")[0] for one in told.split(", ")) == get_args(Served)
    assert "--method" in refuses(USAGE, "export", "chain", "--to", "vllm", "--method", "mlp")


@pytest.mark.parametrize("kind", BY_ENGINE)
def test_engines_get_their_own_method(tmp_path: Path, kind: str) -> None:
    method, algorithm = BY_ENGINE[kind]
    found = drafter_of(CHAIN, str(folder_of(kind, tmp_path)), None)
    assert found is not None
    assert found.method == kind
    serving = Serving(drafter=found, target="t.gguf")
    if method is None:
        with pytest.raises(EngineError, match=f"of kind {kind}, and vLLM drafts with eagle3, "):
            VLLM.write(CHAIN.policy, serving)
    else:
        export = VLLM.write(CHAIN.policy, serving)
        config = json.loads(export.files["speculative-config.json"])
        assert (config["method"], config["model"]) == (method, str(tmp_path))
        assert config.get("parallel_drafting") == (True if kind == "peagle" else None)
        assert VLLM.read(export.files) == CHAIN.policy
        assert ("serve this one with 0.32" in " ".join(export.notes)) == (kind == "medusa")
    if algorithm is None:
        with pytest.raises(EngineError, match=f"of kind {kind}, and SGLang drafts with eagle3, "):
            ENGINES["sglang"].write(CHAIN.policy, serving)
    else:
        flags = ENGINES["sglang"].write(CHAIN.policy, serving).flags
        assert flags[:2] == ("--speculative-algorithm", algorithm)
    if kind != "draft_model":
        with pytest.raises(EngineError, match=f"of kind {kind}, and transformers"):
            ENGINES["transformers"].write(CHAIN.policy, serving)
    if kind not in ("eagle3", "draft_model"):  # whose GGUF files are written here
        with pytest.raises(
            EngineError, match=f"of kind {kind}, (and llama.cpp|whose GGUF file is)"
        ):
            ENGINES["llamacpp"].write(CHAIN.policy, serving)


@pytest.mark.parametrize("name", [one for one, (_, _, kind) in KINDS.items() if kind in ALGORITHMS])
def test_a_folder_whose_architecture_an_engine_lacks_is_refused(tmp_path: Path, name: str) -> None:
    """The refusal names it; where the engine's own name is all that is missing, that is the hint,
    and following it helps."""
    config, stems, kind = KINDS[name]
    found = drafter_of(CHAIN, str(publish(tmp_path, config, stems)), kind)  # type: ignore[arg-type]
    serving = Serving(drafter=found, target="t.gguf")
    for engine, lacking in (("sglang", NOT_IN_SGLANG), ("vllm", NOT_IN_VLLM)):
        if name not in lacking:
            assert ENGINES[engine].write(CHAIN.policy, serving).flags
            continue
        with pytest.raises(EngineError, match=f"of architecture {found.architecture}, and") as no:  # type: ignore[union-attr]
            ENGINES[engine].write(CHAIN.policy, serving)
        own = re.search(r'\["(\w+)"\]', no.value.hint or "")
        if engine == "sglang" and name in OWN_NAME:
            assert own is not None
            again = publish(tmp_path / "again", config | {"architectures": [own[1]]}, stems)
            named = drafter_of(CHAIN, str(again), None)
            assert ENGINES["sglang"].write(CHAIN.policy, Serving(drafter=named)).flags


def test_a_model_that_vllm_has_since_a_release_is_noted(tmp_path: Path) -> None:
    config, stems, _ = KINDS["XPress of vLLM 0.33"]
    found = drafter_of(CHAIN, str(publish(tmp_path, config, stems)), None)
    [note] = VLLM.write(CHAIN.policy, Serving(drafter=found)).notes
    assert note == "vLLM 0.32 has no Qwen3XPressModel: serve this one with 0.33 or newer."
    assert ", Qwen3XPressModel; " in passes("show", tmp_path).out


@pytest.mark.parametrize(("kind", "given"), [*zip(BY_ENGINE, reversed(BY_ENGINE), strict=True)])
def test_a_method_that_contradicts_the_folder_is_refused(
    tmp_path: Path, kind: Any, given: Any
) -> None:
    folder = str(folder_of(kind, tmp_path))
    if given == kind:
        assert drafter_of(CHAIN, folder, given) == drafter_of(CHAIN, folder, None)
        return
    with pytest.raises(UsageError, match=f"--method {given} contradicts .* {WORDS[kind]}"):
        drafter_of(CHAIN, folder, given)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_advice_of_a_contradiction_works(tmp_path: Path, engine: str) -> None:
    """For every engine: the method is settled before one writes."""
    folder = folder_of("draft_model", tmp_path)
    words = ("export", "chain", "--to", engine, "--drafter", folder, "--target", "t.gguf")
    ended = specctl(*words, "--method", "eagle3")
    assert (ended.code, ended.out) == (USAGE, "")
    assert "leave --method out, which writes draft_model" in ended.err
    assert passes(*words).out


def test_a_drafter_that_is_not_here_has_nothing_to_contradict(tmp_path: Path) -> None:
    """Its kind is the given one; without one its config.json is fetched, or it is asked for."""
    found = EngineDrafter(model="org/head", method="dspark")
    assert drafter_of(CHAIN, "org/head", "dspark") == found
    with pytest.raises(UsageError, match=r"not in the hub's cache, .*; give --method eagle3 or "):
        drafter_of(CHAIN, "org/head", None)
    config = folder_of("dspark", tmp_path) / "config.json"
    with patch("huggingface_hub.hf_hub_download", return_value=str(config)):
        fetched = drafter_of(CHAIN, "org/head", None)
    assert fetched == found.model_copy(update={"architecture": "DSparkDraftModel"})


def test_a_model_with_mtp_layers_drafts_for_itself_or_another(tmp_path: Path) -> None:
    name = str(publish(tmp_path, SIXTEEN | {"num_nextn_predict_layers": 1}, ()))
    with pytest.raises(UsageError, match="give --method draft_model or mtp"):
        drafter_of(CHAIN, name, None, "org/target")
    for method, target in ((None, name), ("mtp", "org/target"), ("draft_model", "org/target")):
        found = drafter_of(CHAIN, name, method, target)  # type: ignore[arg-type]
        assert found is not None
        assert found.method == (method or "mtp")
    with pytest.raises(UsageError, match="contradicts"):
        drafter_of(CHAIN, name, "eagle3", name)


def test_a_block_drafter_as_gguf_does_not_say_whose_it_is(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="no gguf here; the extra gguf has it")
    from specctl.engines.gguf_files import write_gguf

    file, tensors = tmp_path / "d.gguf", iter([("fc.weight", torch.zeros(4, 32))])
    write_gguf(file, "dflash", {}, tensors, "float32")
    with pytest.raises(UsageError, match=r"as a DFlash .* or as a DSpark .*method dflash or dsp"):
        drafter_of(CHAIN, str(file), None)
    found = drafter_of(CHAIN, str(file), "dspark")
    assert found is not None
    assert found.method == "dspark"


def test_a_folder_that_is_no_drafter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="BertForMaskedLM"):
        drafter_of(CHAIN, str(publish(tmp_path, arch("BertForMaskedLM"), ())), None)
    ended = specctl("export", "chain", "--to", "vllm", "--drafter", tmp_path)
    assert ended.code == 5
    assert ended.err.count("\n") == 1


# --------------------------------------------------------------------------- blocks

DSPARK = EngineDrafter(model="d", method="dspark", block_size=7)
DFLASH = EngineDrafter(model="d", method="dflash", block_size=15)


@pytest.mark.parametrize(
    ("drafter", "words", "outcome"),
    [
        (DFLASH, "chain:15", ("1", "1", "16")),
        (DFLASH, "chain:5", "trained to draft 15 tokens a round, and not 5"),
        (DSPARK, "chain:7", ("1", "1", "8")),
        (DSPARK, "chain:5", "whole block of a DSpark drafter, 7 tokens"),
        (DSPARK.model_copy(update={"block_size": None}), "chain", ("1", "1", "5")),
        (DFLASH, "eagle2", "chains with DFLASH, no trees"),
        (DFLASH, "schedule:from_batch=1/5:num_draft_tokens=5/2", "only with an EAGLE drafter"),
    ],
)
def test_sglang_drafts_a_block_in_one_step(
    drafter: EngineDrafter, words: str, outcome: str | tuple[str, ...]
) -> None:
    """`_handle_dflash` and `_handle_dspark` of SGLang 0.5.23 set one step and width 1, and refuse
    another window than DSpark's block."""
    policy, serving = resolve_policy(words).policy, Serving(drafter=drafter)
    if isinstance(outcome, str) and "trained" not in outcome:
        with pytest.raises(EngineError, match=outcome):
            ENGINES["sglang"].write(policy, serving)
        return
    export = ENGINES["sglang"].write(policy, serving)
    if isinstance(outcome, str):
        assert outcome in export.notes[0]
    else:
        names = ("num-steps", "eagle-topk", "num-draft-tokens")
        flags = [export.flags[export.flags.index(f"--speculative-{one}") + 1] for one in names]
        assert (tuple(flags), export.notes) == (outcome, ())


@pytest.mark.parametrize("method", TYPES)
def test_llamacpp_drafts_from_gguf_files_of_each_kind(method: Any) -> None:
    """The words are those of build 11549; layers for MTP may be the target's own."""
    serving = Serving(drafter=EngineDrafter(model="d.gguf", method=method), target="t.gguf")
    export = ENGINES["llamacpp"].write(CHAIN.policy, serving)
    assert export.flags[:4] == ("--spec-type", TYPES[method], "--spec-draft-model", "d.gguf")
    assert ENGINES["llamacpp"].read(export.files) == CHAIN.policy
    assert not export.made
    if method == "mtp":
        own = ENGINES["llamacpp"].write(CHAIN.policy, replace(serving, target="d.gguf"))
        assert "--spec-draft-model" not in own.flags


@pytest.mark.parametrize("method", ["dflash", "dspark", "medusa", "peagle"])
def test_rules_of_the_plugin_need_a_drafter_of_one_token_a_step(method: Any) -> None:
    serving = Serving(drafter=EngineDrafter(model="d", method=method))
    with pytest.raises(EngineError, match="export chain:4 without --trace"):
        VLLM.write(resolve_policy("confidence:window=4").policy, serving)
    logging = Serving(drafter=serving.drafter, trace=TraceSettings(out="t", dense=True))
    with pytest.raises(EngineError, match="drafts them together"):
        VLLM.write(CHAIN.policy, logging)
    assert VLLM.write(CHAIN.policy, serving).files


def test_a_longer_chain_than_the_block_is_noted() -> None:
    policy = resolve_policy("chain:9").policy
    assert "trained to draft 7 tokens" in VLLM.write(policy, Serving(drafter=DSPARK)).notes[0]


# --------------------------------------------------------------------------- reading vLLM's file


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        ({"draft_tensor_parallel_size": 1, "max_model_len": 4096}, None),
        ({"revision": "main", "quantization": "fp8"}, None),
        ({"disable_padded_drafter_batch": True, "attention_backend": "FLASH_ATTN"}, None),
        ({"draft_load_config": {"load_format": "dummy"}}, None),
        ({"prompt_lookup_max": 4}, "prompt_lookup_max of vLLM changes what is drafted or accepted"),
        ({"synthetic_acceptance_length": 2.0}, "synthetic_acceptance_length of vLLM"),
        ({"enable_adaptive_verification": True}, "remove it"),
        ({"rejection_sample_method": "block"}, "rejection_sample_method"),
        ({"rejection_sample_method": "fly"}, "rejection_sample_method"),
        ({"fly_window_size": 3}, "fly_window_size of vLLM changes what is drafted or accepted"),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5]},
            "synthetic makes acceptances up",
        ),
        ({"no_such_key": 1}, "no_such_key"),
    ],
)
def test_keys_of_vllm_that_are_passed_over_or_refused_by_name(
    tmp_path: Path, more: dict[str, Any], refusal: str | None
) -> None:
    """Passed over are those that leave the policy as it is."""
    path = tmp_path / "speculative-config.json"
    config = {"method": "eagle3", "model": "h", "num_speculative_tokens": 3}
    path.write_text(json.dumps(config | more))
    shown = specctl("show", path)
    if refusal is None:
        assert shown.out == "vLLM: chain:3\n"
        assert all(name in shown.err for name in more)
    else:
        assert (shown.code, shown.out) == (8, "")
        assert refusal in shown.err


# --------------------------------------------------------------------------- what runs here


@pytest.mark.parametrize("kind", [one for one in BY_ENGINE if one not in ("eagle3", "draft_model")])
def test_a_drafter_that_only_engines_run_is_named_and_the_advice_works(
    tmp_path: Path, kind: Any
) -> None:
    """Before a model is loaded; as a target too."""
    folder = folder_of(kind, tmp_path)
    with (
        patch("specctl.runtime.load.load_target", side_effect=AssertionError),
        pytest.raises(ModelError, match=f"drafter .* is {WORDS[kind]}, and only") as refused,
    ):
        load_pair("embedded", str(folder))
    assert refused.value.hint is not None
    commands = re.findall(r"`specctl (export .*?)`", refused.value.hint)
    assert len(commands) == (kind in SERVED)
    for command in commands:
        assert f'"method": "{BY_ENGINE[kind][0]}"' in passes(*shlex.split(command)).out
    with pytest.raises(ModelError, match=f"target .* is {WORDS[kind]}, no model of its own"):
        load_pair(str(folder), None)
