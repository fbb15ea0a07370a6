"""Exports to vLLM, through the parser of its own server: arguments to engine configuration; and
`specctl doctor` there.

Run in the environment of `make engines`; elsewhere there is no vLLM.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="no vLLM here; make engines has one")

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from specctl.cli.doctor import check_vllm
from specctl.embedded import embedded_path
from specctl.engines import vllm_plugin
from specctl.engines.engine import EngineDrafter, Serving
from specctl.engines.export import ENGINES
from specctl.engines.settings import FILE_NAME, TraceSettings
from specctl.errors import EngineError
from specctl.policy import ChainSchedule, RootOnly, build_shape
from specctl.runtime.words import resolve_policy
from tests.engines.exports import AS_IT_IS, RANGES, WRONG_VLLM

MAX_BATCH_SIZE = 24
SERVER = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256")
HEAD = EngineDrafter(model=str(embedded_path("eagle3")), method="eagle3")
SMALL = EngineDrafter(model=str(embedded_path("small")), method="draft_model")
pytestmark = [
    pytest.mark.filterwarnings("default"),  # vLLM's own are many
    pytest.mark.usefixtures("_plugins_off"),
]


@pytest.fixture
def _plugins_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")


def configured(*flags: str) -> Any:
    """The configuration that `vllm serve TARGET FLAGS` would start with."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    model = ("--model", str(embedded_path("target")))
    return EngineArgs.from_cli_args(
        parser.parse_args([*model, *SERVER, *flags])
    ).create_engine_config()


def lengths_of(speculation: Any) -> list[int]:
    """Draft tokens by batch size, as vLLM's scheduler looks them up."""
    return build_dynamic_sd_schedule_lookup(
        getattr(speculation, RANGES), MAX_BATCH_SIZE, speculation.num_speculative_tokens
    )


def test_a_server_that_logs_ends_in_time_to_write(tmp_path: Path) -> None:
    trace = TraceSettings(out=str(tmp_path / "traces"), dense=True)
    export = ENGINES["vllm"].write(resolve_policy("chain").policy, Serving(HEAD, trace=trace))
    with patch.dict(os.environ, export.environment):
        assert configured(*export.flags).shutdown_timeout == 10


@pytest.mark.parametrize("words", AS_IT_IS["vllm"])
def test_vllm_takes_what_is_exported(words: str) -> None:
    """With the length that the policy drafts at most, and at every batch size its own."""
    policy = resolve_policy(words).policy
    serving = Serving(drafter=HEAD, max_batch_size=MAX_BATCH_SIZE)
    export = ENGINES["vllm"].write(policy, serving)
    with patch.dict(os.environ, export.environment):
        found = configured(*export.flags)
    speculation = found.speculative_config
    if isinstance(policy.shape, RootOnly):
        assert speculation is None
        return
    assert speculation.method == "eagle3"
    assert speculation.num_speculative_tokens == build_shape(policy.shape).max_depth
    assert found.scheduler_config.max_num_seqs == MAX_BATCH_SIZE
    if FILE_NAME in export.files:
        assert found.scheduler_config.async_scheduling is False
    if isinstance(policy.shape, ChainSchedule):
        sizes = range(1, MAX_BATCH_SIZE + 1)
        assert lengths_of(speculation)[1:] == [policy.shape.length_at(size) for size in sizes]
    else:
        assert speculation.num_speculative_tokens_per_batch_size is None


def test_vllm_takes_a_draft_model() -> None:
    export = ENGINES["vllm"].write(resolve_policy("chain").policy, Serving(drafter=SMALL))
    assert configured(*export.flags).speculative_config.method == "draft_model"


@pytest.mark.parametrize("case", WRONG_VLLM)
def test_what_is_refused_here_vllm_refuses_or_changes(case: str) -> None:
    settings, refuses = WRONG_VLLM[case]
    text = json.dumps(HEAD.model_dump(exclude_none=True) | settings)
    if refuses:
        with pytest.raises((ValueError, TypeError)):
            lengths_of(configured("--speculative-config", text).speculative_config)
    else:
        [[first, _, length]] = settings[RANGES]
        table = lengths_of(configured("--speculative-config", text).speculative_config)
        assert table[first] < length


def test_doctor_says_that_hooks_are_found_and_a_vllm_without_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SPECCTL_VLLM", raising=False)
    found = check_vllm()
    assert (found.state, found.fix) == ("ok", "")
    assert "all hooks of the plugin present; off, as SPECCTL_VLLM is not set" in found.found
    monkeypatch.setenv("SPECCTL_VLLM", '{"policy": "chain"}')
    assert check_vllm().found.endswith("SPECCTL_VLLM is set")
    monkeypatch.setattr(vllm_plugin, "CHECKED_VERSIONS", ("9.9",))
    assert (check_vllm().state, check_vllm().fix[:11]) == ("wrong", "install 9.9")
    monkeypatch.delattr(GPUModelRunner, "take_draft_token_ids")
    with pytest.raises(EngineError, match="a method that the plugin replaces"):
        check_vllm()
