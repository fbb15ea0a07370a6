"""The plugin inside vLLM (entry point `vllm.general_plugins`): traces and policies of chain drafts.

    step t    execute_model    target's forward                 policy: another one from here on
              _sample          verify the drafts of t - 1       traces: target's view; learn
              propose          draft a level, ask, a level, ... traces: drafter's view; stop
    t + 1     take_draft_token_ids    each request's drafts cut to what its policy keeps

This file replaces methods of vLLM's V1 model runner, and of the proposer that eagle, eagle3, mtp
and draft models share; `vllm_session` does the work. Neither has a stable interface:
`CHECKED_VERSIONS` are the versions that our tests run. Without `SPECCTL_VLLM` nothing is replaced.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from specctl.engines.settings import PACKAGES, VARIABLE, PluginSettings, read_settings
from specctl.engines.vllm_session import Session
from specctl.errors import EngineError
from specctl.formatting import listed

log = logging.getLogger("specctl.engines")
CHECKED_VERSIONS = ("0.32.0", "0.33.0")
"""Versions of vLLM in which `tests/engines` ran: 0.32.0 in its CPU build, 0.33.0 as the Python code
of its wheel on that build's kernels (`scripts/vllm_on_cpu.py`)."""
NEEDED: dict[str, tuple[Any, str]] = {
    "parallel_drafting": (False, "has no levels"),
    "draft_sample_method": ("greedy", "draws drafts"),
    "use_local_argmax_reduction": (False, "hides the drafter's logits"),
    "use_heterogeneous_vocab": (False, "gives the drafter another vocabulary"),
    "disable_padded_drafter_batch": (False, "books new tokens before the drafts"),
}
"""Settings of drafts that the plugin needs, and what another value does."""
_PLACE = "_specctl"
"""The attribute of a model runner and of its proposer that holds their `Session`."""


class Enough(Exception):  # noqa: N818  ends a loop of vLLM's, and is no error
    """No request of the batch wants another level."""


def register() -> None:
    """Replaces vLLM's methods in this process; see `specctl.engines.register`."""
    log_beside_vllm()
    found, settings = vllm_version(), read_settings(os.environ[VARIABLE])
    if found not in CHECKED_VERSIONS and not settings.allow_version:
        raise EngineError(
            f"the plugin is tested in vLLM {' and '.join(CHECKED_VERSIONS)}, and this is {found}",
            hint='install a tested version, set "allow_version": true in the settings to try, or '
            f"unset {VARIABLE}: fixed chains and schedules need no plugin",
        )
    check_packages(settings)
    hook()


def check_packages(settings: PluginSettings) -> None:
    """Checks that the packages are here that the settings need.

    Raises:
        EngineError: one is not, and its use would fail while the server runs.
    """
    if missing := [name for name in settings.packages if find_spec(name) is None]:
        uses = listed([f"{name}, which {PACKAGES[name]}" for name in missing])
        raise EngineError(
            f"the plugin needs {uses}, and vLLM's environment has none",
            hint=f"pip install {' '.join(missing)}",
        )


def log_beside_vllm() -> None:
    """Sends specctl's log to vLLM's handlers; Python drops notes of loggers without handlers."""
    ours, theirs = logging.getLogger("specctl"), logging.getLogger("vllm")
    ours.handlers = theirs.handlers[:]  # a copy: a command adds its own
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate


def vllm_version() -> str:
    """The version of vLLM, without the name of its build."""
    import vllm

    return str(vllm.__version__).partition("+")[0]


# --------------------------------------------------------------------------- hooks


def replaced_methods() -> tuple[tuple[Any, str, Callable[..., Any], bool], ...]:
    """The methods of vLLM that the plugin replaces, as arguments of `wrap`.

    Raises:
        EngineError: a vLLM that lacks one of them.
    """
    try:
        from vllm.config import VllmConfig
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Proposer
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner

        methods = (
            (VllmConfig, "__post_init__", _check_config, False),
            (Runner, "__init__", _start, False),
            (Runner, "execute_model", _execute_model, True),
            (Runner, "_sample", _sample, True),
            (Runner, "sample_tokens", _sample_tokens, True),
            (Runner, "take_draft_token_ids", _take_draft_token_ids, True),
            (Runner, "shutdown", _shutdown, True),
            (Proposer, "propose", _propose, True),
            (Proposer, "_sample_draft_tokens", _sample_draft_tokens, True),
        )
        for owner, name, _, _ in methods:
            getattr(owner, name)
        return methods
    except (ImportError, AttributeError) as error:
        raise EngineError(
            f"vLLM {vllm_version()} lacks a method that the plugin replaces: {error}",
            hint=f"use vLLM {' or '.join(CHECKED_VERSIONS)}, or unset {VARIABLE}",
        ) from error


def hook() -> None:
    """Replaces vLLM's methods, once per process, or raises `EngineError` and replaces none.

    A runner that starts without the variable is left alone.
    """
    methods = replaced_methods()
    runner = methods[1][0]
    if hasattr(runner, "_specctl_hooked"):
        return
    runner._specctl_hooked = True
    for owner, name, around, in_session in methods:
        wrap(owner, name, around, in_session=in_session)
    mend_expansion()


def wrap(owner: Any, name: str, around: Callable[..., Any], *, in_session: bool = False) -> None:
    """Replaces a method by `around(original, self, ...)`.

    Args:
        in_session: only for objects with a `Session`, by `around(session, original, self, ...)`.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not in_session:
            return around(original, self, *args, **kwargs)
        session = getattr(self, _PLACE, None)
        if session is None:
            return original(self, *args, **kwargs)
        return around(session, original, self, *args, **kwargs)

    setattr(owner, name, method)


def mend_expansion() -> None:
    """Works around vLLM issue 55005: in the CPU build, sampling with drafts reads temperatures from
    uninitialised memory."""
    import vllm.v1.sample.rejection_sampler as sampler
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def expand_batch_to_tokens(
        x: Tensor,
        cu_num_tokens: Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> Tensor:
        counts = torch.diff(cu_num_tokens.long(), prepend=torch.zeros(1, dtype=torch.long))
        values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        return torch.repeat_interleave(values, counts, output_size=num_tokens)

    sampler.expand_batch_to_tokens = expand_batch_to_tokens


def _check_config(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if self.speculative_config is not None and self.use_v2_model_runner:
        raise EngineError(
            "specctl's plugin does not work in vLLM's V2 model runner",
            hint="set VLLM_USE_V2_MODEL_RUNNER=0",
        )


def _start(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    text = os.environ.get(VARIABLE)
    if not text:
        return
    if self.vllm_config.speculative_config is None:
        raise EngineError(
            "specctl's plugin needs --speculative-config with a drafter",
            hint=f"add it (`specctl export` prints it), or unset {VARIABLE}",
        )
    check_engine(self)
    session = Session(read_settings(text), self, vllm_version())
    setattr(self, _PLACE, session)
    setattr(self.drafter, _PLACE, session)


def check_engine(runner: Any) -> None:
    """Checks that the plugin can read and cut the drafts of an engine.

    Raises:
        EngineError: a setting that prevents it, with the one to choose.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Proposer

    drafts, parallel = runner.vllm_config.speculative_config, runner.vllm_config.parallel_config
    is_known = isinstance(getattr(runner, "drafter", None), Proposer)
    size = parallel.world_size * parallel.data_parallel_size
    refusals = {
        f"the drafting method {drafts.method}": (
            not is_known or type(runner.drafter).propose is not Proposer.propose,
            "choose eagle, eagle3, mtp or draft_model",
        ),
        "asynchronous scheduling, in which drafts do not reach the scheduler": (
            runner.use_async_scheduling,
            "start vLLM with --no-async-scheduling",
        ),
        f"{size} workers": (size > 1, "serve on one device"),
    }
    for name, (only, reason) in NEEDED.items():
        found = getattr(drafts, name, only)
        fix = f"set {name} to {str(only).lower()}"
        refusals[f"{name} {found}, which {reason}"] = found != only, fix
    for found, (holds, fix) in refusals.items():
        if holds:
            raise EngineError(f"specctl's plugin does not support {found}", hint=fix)


def _execute_model(
    session: Session, original: Any, self: Any, scheduled: Any, *rest: Any, **more: Any
) -> Any:
    session.begin_step(scheduled)
    return original(self, scheduled, *rest, **more)


def _sample(session: Session, original: Any, self: Any, logits: Tensor, metadata: Any) -> Any:
    session.before_verdict(logits, metadata)
    out = original(self, logits, metadata)
    session.after_verdict(out.sampled_token_ids, metadata)
    return out


def _sample_tokens(session: Session, original: Any, self: Any, *args: Any, **more: Any) -> Any:
    out = original(self, *args, **more)
    session.end_step()
    return out


def _take_draft_token_ids(session: Session, original: Any, self: Any) -> Any:
    out = original(self)
    if out is not None:
        pairs = zip(out.req_ids, out.draft_token_ids, strict=True)
        out.draft_token_ids = [row[: session.kept.get(name)] for name, row in pairs]
    return out


def _shutdown(session: Session, original: Any, self: Any) -> None:
    session.close()
    original(self)


def _propose(session: Session, original: Any, self: Any, **given: Any) -> Tensor:
    session.keep_logits(self.model)
    root_ids: Tensor = given["next_token_ids"].long()
    session.begin_draft(given["num_speculative_tokens"], root_ids)
    try:
        drafted: Tensor = original(self, **given)
    except Enough:
        levels = session.levels
        drafted = torch.stack(levels, 1) if levels else root_ids[:, None][:, :0]
    session.end_draft()
    return drafted


def _sample_draft_tokens(session: Session, original: Any, self: Any, *args: Any) -> Any:
    if not session.drafts_on:
        raise Enough
    tokens, probs = original(self, *args)
    session.take_level(tokens)
    if not session.drafts_on:
        raise Enough
    return tokens, probs
