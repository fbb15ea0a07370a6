"""Which implementation runs, and what is refused."""

from __future__ import annotations

import logging

import pytest
import torch

from specctl.errors import UsageError
from specctl.kernels import dispatch
from specctl.kernels.dispatch import forced, runs_fused, wanted_backend


@pytest.fixture(autouse=True)
def _afresh() -> None:
    dispatch._log_choice.cache_clear()
    dispatch._from_environment.cache_clear()


def test_a_cpu_runs_the_reference_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.zeros(1)
    with caplog.at_level(logging.INFO, "specctl.kernels"):
        assert not any(runs_fused("some_op", x) for _ in range(3))
    assert caplog.messages == ["kernel some_op: reference on cpu"]


def test_a_forced_kernel_that_cannot_run_is_refused() -> None:
    x = torch.zeros(1)
    with forced("fused"), pytest.raises(UsageError, match="expected triton and CUDA, found tens"):
        runs_fused("some_op", x)
    assert wanted_backend() == "auto"


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    with forced("fused"), pytest.raises(UsageError, match="found no triton; install it"):
        runs_fused("some_op", torch.zeros(1))


def test_the_environment_forces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "fused")
    with pytest.raises(UsageError, match="fused kernel some_op"):
        runs_fused("some_op", torch.zeros(1))
    with forced("reference"):
        assert not runs_fused("some_op", torch.zeros(1))


def test_unknown_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "fast")
    with pytest.raises(UsageError, match="SPECCTL_KERNELS: expected auto or reference or fused"):
        runs_fused("some_op", torch.zeros(1))
