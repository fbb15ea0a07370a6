"""llama.cpp's server: in this process by the wheel `xllamacpp`, or running at an address."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from specctl.engines.llamacpp_flags import LlamaServer
from specctl.errors import EngineError, one_line, reason_of

TIMEOUT_S, LONGEST_S = 30.0, 600.0
"""Longest waits: for a page, and for a completion."""
START = "start llama-server, and give its address"
Count = Annotated[int, Field(ge=0)]
Milliseconds = Annotated[float, Field(gt=0)]


class Timings(BaseModel):
    """`timings` of an answer."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
    prompt_n: Count
    prompt_ms: Milliseconds
    predicted_n: Count
    predicted_ms: Milliseconds  # from the first token on
    draft_n: Count = 0
    draft_n_accepted: Count = 0


@dataclass(frozen=True)
class Answer:
    """A completion."""

    text: str
    tokens: tuple[int, ...]  # with the stop token; empty if the server does not say
    timings: Timings


class Client:
    """A `llama-server` at an address.

    Attributes:
        url: its address.
        build: of llama.cpp; 0 if it does not say.
        model: name of its GGUF file; empty if it does not say.

    Raises:
        EngineError: no answer, or that of another server.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        page = self._get("/props")
        try:
            props = dict(json.loads(page))
        except (TypeError, ValueError) as error:
            raise EngineError(
                f"{self.url} is no llama-server: its /props are {one_line(page)[:40]!r}",
                hint=START,
            ) from error
        found = re.match(r"b(\d+)", str(props.get("build_info")))
        self.build = int(found[1]) if found else 0
        self.model = os.path.basename(str(props.get("model_path", "")))

    def complete(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        *,
        ignore_eos: bool = False,
        reuses: bool = False,
    ) -> Answer:
        """The greedy completion of a prompt.

        Args:
            reuses: a slot that has read the prompt's beginning does not read it again.

        Raises:
            EngineError: no answer, the server's refusal, or an answer without times.
        """
        body = {
            "prompt": list(prompt_ids),
            "n_predict": max_tokens,
            "temperature": 0,
            "cache_prompt": reuses,
            "ignore_eos": ignore_eos,
            "return_tokens": True,
        }
        text = self._get("/completion", body)
        try:
            found = json.loads(text)
            timings = Timings.model_validate(found["timings"])
            return Answer(found["content"], tuple(found.get("tokens", ())), timings)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            problem = f"llama.cpp answers without times: {one_line(text)[:200]}"
            raise EngineError(problem) from error

    def metrics(self) -> str:
        """The page of counters."""
        return self._get("/metrics")

    def close(self) -> None:
        """Ends a server that this process started."""

    def _get(self, path: str, body: Any = None) -> str:
        data, wait_s = None, TIMEOUT_S
        if body is not None:
            data, wait_s = json.dumps(body).encode(), LONGEST_S
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=wait_s) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            why = one_line(error.read(500).decode(errors="replace"))
        except (OSError, ValueError, HTTPException) as error:
            inner = getattr(error, "reason", error)  # of a URLError
            why = reason_of(inner) if isinstance(inner, Exception) else str(inner)
        raise EngineError(
            f"{self.url}{path}: no answer of llama.cpp: {why}",
            hint=START,
        )


class OwnServer(Client):
    """A server in this process, on the CPU.

    Args:
        target: GGUF file.
        settings: its drafts, or a `--spec-type` that needs no drafter; None for plain decoding.
        slots: requests together, by default those of the settings. context_tokens: of each.
        exact: float32 caches and no flash attention, for texts that are equal.
        verbosity: of its log on standard error; 4 has acceptance by position, 5 every round.

    Raises:
        EngineError: `xllamacpp` is missing, or a file that llama.cpp does not load.
    """

    def __init__(
        self,
        target: Path,
        settings: LlamaServer | str | None,
        *,
        slots: int | None = None,
        context_tokens: int = 2048,
        num_threads: int | None = None,
        exact: bool = False,
        verbosity: int = 0,
    ) -> None:
        try:
            import xllamacpp
        except ImportError as error:
            hint = "pip install xllamacpp, which holds llama.cpp's server"
            raise EngineError("llama.cpp in this process needs xllamacpp", hint=hint) from error
        params = xllamacpp.CommonParams()
        params.model.path, params.port = str(target), 0
        slots = slots or getattr(settings, "parallel", None) or 1
        params.n_parallel, params.n_ctx = slots, slots * context_tokens
        params.cache_prompt, params.cache_ram_mib = False, 0
        params.endpoint_metrics, params.verbosity = True, verbosity
        caches = [params]
        if num_threads is not None:
            params.cpuparams.n_threads = num_threads
        if settings is not None:
            set_drafts(params.speculative, settings)
            caches.append(params.speculative.draft)
        if exact:
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            for one in caches:
                one.cache_type_k = one.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        try:
            self._server = xllamacpp.Server(params)
        except (RuntimeError, ValueError, OSError) as error:
            drafter = os.path.basename(getattr(settings, "spec_draft_model", None) or "")
            files = " and ".join(filter(None, (target.name, drafter)))
            raise EngineError(
                f"llama.cpp does not start with {files}: {one_line(str(error))}",
                hint="its own log on standard error has the reason",
            ) from error
        super().__init__(self._server.listening_address)
        if found := re.fullmatch(r"\d+\.\d+\.(\d+)", str(xllamacpp.__version__)):
            self.build = int(found[1])  # its /props have none

    def close(self) -> None:
        del self._server  # waits for its threads


def set_drafts(speculative: Any, settings: LlamaServer | str) -> None:
    """Puts the flags of `llama-server` into `CommonParams.speculative` of `xllamacpp`."""
    from xllamacpp import common_speculative_type as kinds

    name = settings if isinstance(settings, str) else settings.spec_type
    if name is None:
        return
    word = name.upper().replace("-", "_")
    speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{word}")]
    if isinstance(settings, str):
        return
    draft = speculative.draft
    draft.mparams.path = settings.spec_draft_model
    for name in ("n_max", "n_min", "p_min", "backend_sampling"):
        value = getattr(settings, f"spec_draft_{name}")
        if value is not None:
            setattr(draft, name, value)
    if settings.spec_synth_rates is not None:
        speculative.synth_rates = list(settings.spec_synth_rates)
