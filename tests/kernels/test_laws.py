"""Laws of all ops: which implementation runs; twins take the same arguments and agree, devices may
not mix, graphs replay.
"""

from __future__ import annotations

import copy
import inspect
import logging
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch

from scripts.gpu.smoke import tolerance
from specctl.errors import UsageError
from specctl.kernels import dispatch
from specctl.kernels.dispatch import forced, runs_fused, wanted_backend
from tests.kernels.calls import Call, calls
from tests.kernels.conftest import FUSED
from tests.kernels.helpers import captured, on_device, overwrite, poisoned, tensors_of


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
    ("auto", "fused", True, "needs CUDA, and its tensors are on cpu"),
    ("auto", "fused", False, "needs triton, which is not installed; install it"),
    ("fused", None, True, "fused kernel some_op"),
    ("fast", None, True, "SPECCTL_KERNELS must be auto or reference or fused"),
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


CALLS = calls()
QUICK = [name for name, call in CALLS.items() if sum(t.numel() for t in call.tensors) < 2_000_000]


@pytest.mark.parametrize("package", sorted({call.package for call in CALLS.values()}))
def test_twins_take_the_same_arguments(package: str) -> None:
    pytest.importorskip("triton")
    modules = [
        import_module(f"specctl.kernels.{package}.{name}") for name in ("reference", "fused")
    ]
    for op in {call.op for call in CALLS.values() if call.package == package}:
        reference, fused = (list(inspect.signature(getattr(m, op)).parameters) for m in modules)
        assert fused[: len(reference)] == reference, op


@pytest.mark.parametrize("name", [name for name in QUICK if len(CALLS[name].tensors) > 1])
def test_devices_may_not_mix(name: str) -> None:
    call = CALLS[name]
    for spoilt in (call.tensors[0], call.tensors[-1]):
        elsewhere = torch.empty_strided(
            spoilt.shape, spoilt.stride(), dtype=spoilt.dtype, device="meta"
        )
        memo = {id(tensor): tensor for tensor in call.tensors} | {id(spoilt): elsewhere}
        mixed: Call = copy.deepcopy(call, memo)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="tensors must be on one device, not on cpu, meta"):
            mixed.public()(*mixed.args, **mixed.options)


@FUSED
@pytest.mark.parametrize("name", QUICK)
def test_twins_agree(name: str, backend: str, device: torch.device) -> None:
    """Results, and all that an op writes in place or must leave alone."""
    if backend == "interpreter" and sum(t.numel() for t in CALLS[name].tensors) > 200_000:
        pytest.skip("too slow as Python")
    mine, theirs = on_device(CALLS[name], device), on_device(CALLS[name], torch.device("cpu"))
    with poisoned():
        found = mine.public()(*mine.args, **mine.options)
    with forced("reference"):
        wanted = theirs.public()(*theirs.args, **theirs.options)
    for one, other in zip(
        tensors_of(found, *mine.tensors), tensors_of(wanted, *theirs.tensors), strict=True
    ):
        rtol, atol = tolerance(one)
        torch.testing.assert_close(one.cpu(), other, equal_nan=True, rtol=rtol, atol=atol)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name",
    [n for n in QUICK if CALLS[n].op in ("close_gates", "link_tree", "commit_kv", "append_level",
                                         "settle")],
)  # fmt: skip
def test_a_thousand_launches_beside_other_work_give_the_same_bits(name: str) -> None:
    """Ops that read what they write: a missing barrier shows where blocks are held up."""
    there, busy = torch.device("cuda"), torch.cuda.Stream()
    fresh, wanted = on_device(CALLS[name], there), None
    work = torch.ones(2048, 2048, device=there)
    differs = torch.zeros((), dtype=torch.bool, device=there)
    with forced("fused"):
        for _ in range(1000):
            with torch.cuda.stream(busy):
                work @ work
            given = on_device(fresh, there)
            found = tensors_of(given.public()(*given.args, **given.options), *given.tensors)
            wanted = wanted or found
            for one, other in zip(found, wanted, strict=True):
                differs |= (one.nan_to_num() != other.nan_to_num()).any()
    assert not bool(differs)


@pytest.mark.cuda
@pytest.mark.parametrize("name", QUICK)
def test_a_graph_reads_what_is_there_at_its_replay(name: str) -> None:
    """Captured without waiting for the device, then replayed on other inputs."""
    there = torch.device("cuda")
    given = on_device(CALLS[name], there)
    with forced("fused"):
        graph, found = captured(lambda: given.public()(*given.args, **given.options))
        fresh = calls(seed=1)[name]
        overwrite(given.tensors, fresh.tensors)
        graph.replay()
        eager = on_device(fresh, there)
        wanted = eager.public()(*eager.args, **eager.options)
    torch.cuda.synchronize()
    for one, other in zip(
        tensors_of(found, *given.tensors), tensors_of(wanted, *eager.tensors), strict=True
    ):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
