"""Flags and adaptive files for SGLang, through the code of its wheel that reads them; and the names
by which its code writes what `specctl import` reads.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specctl.embedded import embedded_path
from specctl.engines.sglang_flags import ADAPTIVE_FILE, MODELS
from specctl.policy import ChainSchedule, RootOnly, build_shape
from specctl.runtime.words import resolve_policy
from tests.engines.exports import AS_IT_IS, WRONG_SGLANG, exported
from tests.engines.sglang_wheel import WHEEL, adaptive_module, from_wheel, needs_wheel

SCHEDULES = [words for words in AS_IT_IS["sglang"] if words.startswith("schedule")]
pytestmark = needs_wheel


@pytest.fixture(scope="module")
def sglang() -> Any:
    with adaptive_module() as module:
        return module


@pytest.mark.parametrize("words", AS_IT_IS["sglang"])
def test_sglang_s_parser_takes_the_flags(words: str) -> None:
    """The parser that its server makes of the fields of speculation and of scheduling."""
    pytest.importorskip("msgspec", reason="SGLang's fields need msgspec; make engines has it")
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    groups = "sglang.srt.arg_groups"
    needed = ("arg_utils", "choices", "fields.spec", "fields.schedule")
    with from_wheel(*(f"{groups}.{name}" for name in needed)) as [utils, _, spec, schedule]:
        utils.add_cli_args_from_dataclass(parser, spec.Spec)
        sizes = ["max_running_requests"]
        utils.add_cli_args_from_dataclass(parser, schedule.Schedule, fields=sizes)
    shape = resolve_policy(words).policy.shape
    found = parser.parse_args(exported("sglang", words, max_batch_size=24).flags)
    assert found.max_running_requests == (None if isinstance(shape, RootOnly) else 24)
    assert found.speculative_adaptive == isinstance(shape, ChainSchedule)
    if isinstance(shape, RootOnly):
        assert found.speculative_algorithm is None
        return
    rule = build_shape(shape)
    assert (found.speculative_algorithm, found.speculative_draft_model_path) == ("EAGLE3", "head")
    assert found.speculative_num_steps == rule.max_depth
    assert found.speculative_eagle_topk == rule.top_k
    assert found.speculative_num_draft_tokens == rule.max_tokens


@pytest.mark.parametrize("words", SCHEDULES)
def test_sglang_drafts_by_batch_size_as_exported(words: str, sglang: Any, tmp_path: Path) -> None:
    """Whatever is accepted: with one candidate its average moves nothing."""
    shape = resolve_policy(words).policy.shape
    assert isinstance(shape, ChainSchedule)
    export = exported("sglang", words, folder=tmp_path)
    file = tmp_path / ADAPTIVE_FILE
    file.write_text(export.files[ADAPTIVE_FILE])
    flags = dict(zip(export.flags, export.flags[1:], strict=False))
    assert flags["--speculative-adaptive-config"] == str(file)
    steps = int(flags["--speculative-num-steps"])
    # What its server checks of the two together.
    assert steps in sglang.resolve_candidate_steps_from_config(str(file))
    assert flags["--speculative-num-draft-tokens"] == str(steps + 1)
    params = sglang.AdaptiveSpeculativeParams(steps, str(file))
    for accepted in (0, 99):
        for size in range(1, 40):
            for _ in range(50):
                params.on_verify_complete([accepted] * size, size)
            assert params.get_steps_for_batch(size) == shape.length_at(size)


@pytest.mark.parametrize("case", WRONG_SGLANG)
def test_what_is_refused_here_sglang_refuses_or_takes_silently(
    case: str, sglang: Any, tmp_path: Path
) -> None:
    content, refuses = WRONG_SGLANG[case]
    file = tmp_path / ADAPTIVE_FILE
    file.write_text(json.dumps(content))
    if refuses:
        with pytest.raises((ValueError, AttributeError, TypeError)):
            sglang.resolve_candidate_steps_from_config(str(file))
    else:
        steps = sglang.resolve_candidate_steps_from_config(str(file))
        sglang.AdaptiveSpeculativeParams(steps[0], str(file))


def test_the_architectures_of_drafters_are_those_of_its_models() -> None:
    """Its registry has the `EntryClass` of each file; `_config_draft_model` renames targets."""
    wheel, classes = zipfile.ZipFile(WHEEL), {"Dots3NoteForCausalLM"}  # renamed by its config
    for name in wheel.namelist():
        if re.fullmatch(r"sglang/srt/models/\w+\.py", name):
            found = re.findall(r"^EntryClass = (\[[^]]*\]|\w+)", wheel.read(name).decode(), re.M)
            classes |= {*re.findall(r"\w+", " ".join(found))}
    code = wheel.read("sglang/srt/configs/model_config.py").decode()
    body = code[code.index("def _config_draft_model") : code.index("def _derive_hybrid_model")]
    names = {*re.findall(r'"(\w*(?:For[CG]|MTP|_V3)\w*)"', body), "MiMoV2FlashForCausalLM"}
    drafts = r"\w+(ForCausalLMEagle3?|NextN|MTP)|\w*(Eagle3|DFlash|DSpark|LiLiCorr|Assist|XPress).*"
    heads = {one for one in classes if re.fullmatch(drafts, one)}
    assert {one for one in classes | names if re.fullmatch("|".join(MODELS.values()), one)} == (
        heads | names | {"Dots3NoteForCausalLM", "MiMoV2ForCausalLM"}
    )


WRITTEN = {
    "managers/scheduler_components/metrics_reporter.py": (
        "Decode batch{iter_msg}, #running-req: {num_running_reqs}, ",
        "accept len: {spec_accept_length:.2f}, accept rate: {spec_accept_rate:.2f}, ",
        "cap len: {",
    ),
    "observability/metrics_collector.py": (
        *(f'"sglang:spec_{gauge}"' for gauge in ("accept_length", "num_steps", "num_draft_tokens")),
        *(f'"sglang:{counter}_total"' for counter in ("generation_tokens", "spec_verify_calls")),
        *(f'"sglang:{counter}_total"' for counter in ("num_requests", "num_aborted_requests")),
    ),
}
"""Parts of lines of its log, and names of its metrics, by the file that writes them."""


@pytest.mark.parametrize("path", WRITTEN)
def test_sglang_writes_the_names_that_are_imported(path: str) -> None:
    """Figures of such a log and of such a page: `tests/logs/test_import_servers.py`."""
    code = zipfile.ZipFile(WHEEL).read(f"sglang/srt/{path}").decode()
    assert [one for one in WRITTEN[path] if one not in code] == []


@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_sglang_captures_the_layers_that_the_embedded_head_was_trained_with(model: str) -> None:
    """By its method of the target, whose layer i hands out its input."""
    code = ast.parse(zipfile.ZipFile(WHEEL).read(f"sglang/srt/models/{model}.py"))
    name = "set_eagle3_layers_to_capture"
    [method] = [
        one for one in ast.walk(code) if isinstance(one, ast.FunctionDef) and one.name == name
    ]
    method.args.args[1].annotation = None
    found: dict[str, Any] = {}
    exec(compile(ast.Module([method], []), model, "exec"), found)
    target = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True), model=SimpleNamespace())
    config = json.loads((embedded_path("eagle3") / "config.json").read_text())
    found[name](target, config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    assert target.model.layers_to_capture == [2, 4, 5]
