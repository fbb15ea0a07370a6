"""Which implementation runs, and what is refused."""

from __future__ import annotations

import logging
from contextlib import nullcontext

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


REFUSED = [
    ("auto", "fused", True, "expected triton and CUDA, found tens"),
    ("auto", "fused", False, "found no triton; install it"),
    ("fused", None, True, "fused kernel some_op"),
    ("fast", None, True, "SPECCTL_KERNELS: expected auto or reference or fused"),
]


@pytest.mark.parametrize(("variable", "word", "has_triton", "message"), REFUSED)
def test_what_cannot_run_is_refused(
    variable: str,
    word: str | None,
    has_triton: bool,  # noqa: FBT001
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is forced in code goes before the environment."""
    monkeypatch.setenv(dispatch.VARIABLE, variable)
    monkeypatch.setattr(dispatch, "has_triton", lambda: has_triton)
    by_code = forced(word) if word else nullcontext()  # type: ignore[arg-type]
    with by_code, pytest.raises(UsageError, match=message):
        runs_fused("some_op", torch.zeros(1))
    if variable != "fast":
        assert wanted_backend() == variable
    with forced("reference"):
        assert not runs_fused("some_op", torch.zeros(1))
