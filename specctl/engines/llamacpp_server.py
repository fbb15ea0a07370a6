"""llama.cpp's server: in this process by the wheel `xllamacpp`, or a running one by its address."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from specctl.engines.llamacpp_flags import LlamaServer
from specctl.errors import EngineError, one_line, reason_of
from specctl.records import describe_violation

NEEDS = "pip install xllamacpp, which holds llama.cpp's server"
TIMEOUT_S = 600.0
"""Longest wait for an answer of a running server."""


class Timings(BaseModel):
    """`timings` of an answer."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float  # from the first token on
    draft_n: int = 0
    draft_n_accepted: int = 0


@dataclass(frozen=True)
class Answer:
    """A completion."""

    text: str
    ends: bool  # at a stop token, not at the limit
    timings: Timings


class Server(Protocol):
    """A server of completions."""

    build: str  # of llama.cpp

    def ask(self, body: dict[str, Any]) -> Any:
        """The JSON answer to a completion request."""
        ...

    def metrics(self) -> str:
        """The page of counters."""
        ...

    def close(self) -> None:
        """Ends a server that this process started."""
        ...


class OwnServer:
    """A server in this process, on the CPU.

    Args:
        target: GGUF file. settings: its drafts; None for plain decoding.
        slots: requests together. context_tokens: of each.
        exact: float32 caches and no flash attention, so that equal texts can be expected.
        verbosity: of its log on standard error; 5 names every round.

    Raises:
        EngineError: `xllamacpp` is missing, or a file that llama.cpp does not load.
    """

    def __init__(
        self,
        target: Path,
        settings: LlamaServer | None,
        *,
        slots: int = 1,
        context_tokens: int = 2048,
        num_threads: int | None = None,
        exact: bool = False,
        verbosity: int = 0,
    ) -> None:
        try:
            import xllamacpp
        except ImportError as error:
            raise EngineError("llama.cpp in this process needs xllamacpp", hint=NEEDS) from error
        self.build = str(xllamacpp.__version__).rpartition(".")[2]
        params = xllamacpp.CommonParams()
        params.model.path = str(target)
        params.n_parallel, params.n_ctx = slots, slots * context_tokens
        params.cache_prompt, params.cache_ram_mib = False, 0
        params.endpoint_metrics, params.verbosity = True, verbosity
        if num_threads is not None:
            params.cpuparams.n_threads = num_threads
        if exact:
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            off = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            params.flash_attn_type = off
        if settings is not None:
            set_drafts(params.speculative, settings, xllamacpp, exact=exact)
        try:
            self._server = xllamacpp.Server(params)
        except (RuntimeError, ValueError, OSError) as error:
            raise EngineError(
                f"llama.cpp does not start with {target.name}: {one_line(str(error))}",
                hint="its own log on standard error has the reason",
            ) from error

    def ask(self, body: dict[str, Any]) -> Any:
        found = self._server.handle_completions(body)
        return json.loads(found) if isinstance(found, str) else found

    def metrics(self) -> str:
        return str(self._server.handle_metrics())

    def close(self) -> None:
        del self._server  # waits for its threads


def set_drafts(
    speculative: Any, settings: LlamaServer, xllamacpp: Any, *, exact: bool = False
) -> None:
    """Puts the flags of `llama-server` into `CommonParams.speculative` of `xllamacpp`."""
    kinds = xllamacpp.common_speculative_type
    name = settings.spec_type.upper().replace("-", "_")
    speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{name}")]
    draft = speculative.draft
    draft.mparams.path = settings.spec_draft_model
    draft.n_max, draft.n_min = settings.spec_draft_n_max, settings.spec_draft_n_min
    draft.p_min = settings.spec_draft_p_min
    if settings.spec_draft_backend_sampling is not None:
        draft.backend_sampling = settings.spec_draft_backend_sampling
    if settings.spec_synth_rates is not None:
        speculative.synth_rates = list(settings.spec_synth_rates)
    if exact:
        draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32


class RunningServer:
    """A running `llama-server`.

    Raises:
        EngineError: no llama.cpp answers at the address.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        found = self._get("/props")
        self.build = re.sub(r"^b|-.*$", "", str(found.get("build_info", "unknown")))

    def ask(self, body: dict[str, Any]) -> Any:
        return self._get("/v1/completions", body)

    def metrics(self) -> str:
        return str(self._get("/metrics", as_text=True))

    def close(self) -> None:
        """Leaves the server running."""

    def _get(self, path: str, body: Any = None, *, as_text: bool = False) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                text = answer.read().decode()
            return text if as_text else json.loads(text)
        except (OSError, ValueError) as error:
            why = f"HTTP {error.code}" if isinstance(error, urllib.error.HTTPError) else ""
            raise EngineError(
                f"{self._url}{path}: no answer of llama.cpp ({why or reason_of(error)})",
                hint="start llama-server with --metrics, and give its address",
            ) from error


class Client:
    """Completions of a server."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def complete(
        self, prompt_ids: Sequence[int], max_tokens: int, *, ignore_eos: bool = False
    ) -> Answer:
        """The greedy completion of a prompt.

        Raises:
            EngineError: the server's refusal, or an answer without times.
        """
        body = {
            "prompt": list(prompt_ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "cache_prompt": False,
            "ignore_eos": ignore_eos,
        }
        found = self.server.ask(body)
        try:
            [choice] = found["choices"]
            timings = Timings.model_validate(found["timings"])
            return Answer(str(choice["text"]), choice["finish_reason"] == "stop", timings)
        except ValidationError as error:
            problem = describe_violation(error)
        except (KeyError, TypeError, ValueError):
            problem = one_line(json.dumps(found))[:200]
        raise EngineError(f"llama.cpp answers without times: {problem}")

    def complete_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, together: int = 1
    ) -> list[Answer]:
        """The completions of prompts, some of them at a time."""
        if together == 1:
            return [self.complete(one, max_tokens) for one in prompts]
        with ThreadPoolExecutor(together) as pool:
            return list(pool.map(lambda one: self.complete(one, max_tokens), prompts))

    def counters(self) -> dict[str, float]:
        """The server's counters by name, without the prefix."""
        found = re.findall(r"^llamacpp:(\w+) ([-+.\deE]+)$", self.server.metrics(), re.M)
        return {name: float(value) for name, value in found}
