"""`specctl doctor` where vLLM is. Run in the environment of `make engines`."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="no vLLM here; make engines has one")

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from specctl.cli.doctor import check_vllm
from specctl.engines import vllm_plugin
from specctl.errors import EngineError


def test_the_hooks_are_found_and_a_vllm_without_one_is_refused(
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
