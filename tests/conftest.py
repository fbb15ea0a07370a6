"""Shared set-up: no hub, one thread per process, so that the suite is quiet and repeatable."""

from __future__ import annotations

import gc
import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from tests.servers import S3_ENVIRONMENT, make_bucket, s3_server

gc.disable()  # until all modules and tests are there: they are never garbage
with suppress(ImportError):  # an engine's environment lacks it
    from hypothesis import settings

    settings.register_profile("suite", deadline=None)  # a busy machine is no failure
    settings.load_profile("suite")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _heeds_ctrl_c() -> None:
    """A shell starts what runs in its background deaf to it; a user's terminal does not."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _folders_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What specctl caches, trusts and remembers is this run's, not the developer's."""
    for name in ("STATE", "CACHE", "CONFIG"):
        os.environ[f"XDG_{name}_HOME"] = str(tmp_path_factory.mktemp(name.lower()))


@pytest.fixture(autouse=True)
def _policies_do_not_fail(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of a policy, from which decoding recovers, fails the test that did not ask for it."""
    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    if folder in ("kernels", "policy") or "policy_faults" in request.keywords:
        return
    from specctl.runtime.runnable import Faults

    def fail(_: Faults, reason: str) -> None:
        raise AssertionError(f"a policy failed: {reason}")

    monkeypatch.setattr(Faults, "note", fail)


@pytest.fixture
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes every clock for a good one, checked by plain decoding: other work is no subject."""
    from specctl.cli import judging
    from specctl.replay.cost import live, model, profile, rates

    for part in (model, rates):
        monkeypatch.setattr(part, "LARGEST_ERROR", float("inf"))
    monkeypatch.setattr(live, "NUM_PASSES", 1)
    monkeypatch.setattr(profile, "NUM_TIMED_QUICK", 1)
    monkeypatch.setattr(profile, "checked_policies", lambda *_: [profile.PLAIN])
    monkeypatch.setattr(judging, "NUM_CHECKED", 1)


LONG = (
    "test_docs", "test_interpreted", "test_equality", "test_captured_rounds", "test_interrupt",
    "test_verbs", "test_ray", "test_arrows", "test_vllm", "test_examples", "test_policies",
    "test_packaging", "test_spread_target", "test_models", "test_signals", "test_units",
    "test_notebook",
)  # fmt: skip
"""Modules of few tests that take long: begun first, lest one worker is left with them at the end.
Makefile's --no-loadscope-reorder keeps that order; pytest-xdist's own begins with many tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gc.freeze()
    gc.enable()
    items.sort(key=lambda item: not item.path.stem.startswith(LONG))
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries come one after the other."""
    monkeypatch.setattr("specctl.stores.creating.FIRST_WAIT_S", 0.0)


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 server (moto) on loopback, one for each worker of the suite."""
    with s3_server(tmp_path_factory.mktemp("moto")) as endpoint:
        yield endpoint


@pytest.fixture
def s3_url(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh bucket and prefix on it, with the environment that reaches it."""
    for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": s3_endpoint}.items():
        monkeypatch.setenv(name, value)
    bucket = f"test-{uuid.uuid4().hex[:12]}"
    make_bucket(s3_endpoint, bucket)
    return f"s3://{bucket}/shared"


@pytest.fixture(scope="session")
def ray_address(s3_endpoint: str) -> Iterator[str]:
    """A Ray cluster with room for four workers that reach the bucket; this process is connected."""
    import ray

    from specctl.collect.workers import OWN

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # a token would be written to the user's home
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": s3_endpoint}.items():
            patch.setenv(name, value)
        before = signal.getsignal(signal.SIGTERM)
        ray.init("local", num_cpus=4, log_to_driver=False, **OWN)
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def two_prompts_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals over fewer prompts than are asked for, where a test reckons them by hand."""
    monkeypatch.setattr("specctl.stats.MIN_PROMPTS", 2)
