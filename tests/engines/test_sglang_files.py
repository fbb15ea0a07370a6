"""Adaptive files for SGLang, through the code that reads them in its wheel.

SPECCTL_SGLANG_WHEEL names the wheel; its package does not import without CUDA, this module alone
does with stubs for what it takes from others.
"""

from __future__ import annotations

import json
import os
import sys
import types
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from specctl.engines.sglang_flags import ADAPTIVE_FILE
from specctl.policy import ChainSchedule
from specctl.runtime.policy_spec import resolve_policy
from tests.engines.exports import AS_IT_IS, WRONG_SGLANG, exported

WHEEL = os.environ.get("SPECCTL_SGLANG_WHEEL", "")
MODULE = "sglang/srt/speculative/adaptive_spec_params.py"
SCHEDULES = [words for words in AS_IT_IS["sglang"] if words.startswith("schedule")]
pytestmark = pytest.mark.skipif(not WHEEL, reason="SPECCTL_SGLANG_WHEEL names no wheel")


@pytest.fixture(scope="module")
def sglang() -> Any:
    """SGLang's module of adaptive lengths."""
    stubs: dict[str, dict[str, Any]] = {
        "sglang.srt.arg_groups.overrides": {"resolved_view": None, "resolving_view": None},
        "sglang.srt.runtime_context": {"attn_dp_enabled_of": None},
        "sglang.srt.speculative.spec_info": {"SpeculativeAlgorithm": None},
        "sglang.srt.utils": {"log_info_on_rank0": lambda logger, message: None},
    }
    modules = {}
    for name, members in stubs.items():
        modules[name] = types.ModuleType(name)
        vars(modules[name]).update(members)
    for name in ("sglang", "sglang.srt", "sglang.srt.arg_groups", "sglang.srt.speculative"):
        modules[name] = types.ModuleType(name)
    module = types.ModuleType("adaptive_spec_params")
    with zipfile.ZipFile(WHEEL) as wheel, patch.dict(sys.modules, modules):
        exec(compile(wheel.read(MODULE), MODULE, "exec"), vars(module))
    return module


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


def test_the_stated_defaults_are_sglang_s(sglang: Any) -> None:
    from specctl.engines.sglang_flags import SglangSlot

    own = sglang.AdaptiveStepSlot(3, {"candidate_steps": [1, 3]})
    ours = SglangSlot(candidate_steps=(1, 3))
    for name in set(SglangSlot.model_fields) - {"candidate_steps"}:
        assert getattr(own, name) == getattr(ours, name)
    for key, slot in sglang.DEFAULT_ADAPTIVE_CONFIG.items():
        assert SglangSlot.model_validate_json(json.dumps(slot)), key
