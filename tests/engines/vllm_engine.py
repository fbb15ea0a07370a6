"""vLLM's CPU build on the embedded pair, in this process or as a server, and what it counted.

Run by `make engines` in the virtual environment that has vLLM; the ordinary suite skips its tests.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl

from specctl.collect.prompts import Prompt, load_prompts
from specctl.embedded import embedded_path
from specctl.engines.settings import VARIABLE, PluginSettings
from specctl.logs.trace_set import TraceSet
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import DecodeSettings, conversation_ids
from specctl.runtime.identity import load_tokenizer
from specctl.runtime.load import Pair
from specctl.runtime.words import resolve_policy
from tests.cli.command import specctl

METHODS = {"eagle3": "eagle3", "small": "draft_model"}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
Texts = list[list[int]]
MAX_MODEL_LEN = 1024
MAX_NEW_TOKENS = 48


@cache
def packaged(count: int) -> tuple[Prompt, ...]:
    """First turns of prompts, spread over the categories of the packaged set, named in order."""
    every = load_prompts("embedded")
    chosen = (every[i * len(every) // count] for i in range(count))
    return tuple(
        replace(one, prompt_id=f"p{i:03d}", turns=one.turns[:1]) for i, one in enumerate(chosen)
    )


def ids_of(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids, as `collect` gives them to the target."""
    tokenizer = load_tokenizer(embedded_path("target"))
    return [list(conversation_ids(tokenizer, one, [])) for one in prompts]


def plain_texts(pair: Pair, prompts: Sequence[Prompt], length: int = MAX_NEW_TOKENS) -> Texts:
    """Of plain decoding, by specctl's own loop."""
    decoder = Decoder(pair, resolve_policy("ar").policy, batch_size=8)
    found = {
        one.prompt.prompt_id: list(one.completions[0].token_ids)
        for one in decoder.converse(prompts, DecodeSettings(length))
    }
    return [found[one.prompt_id] for one in prompts]


@cache
def rows_of(path: Path, table: str) -> pl.DataFrame:
    """A table of a trace set, in order; requests by name."""
    rows = TraceSet.open(str(path)).scan(table).collect()
    keys = ["request_id", "round_idx", *(["node_idx"] if table == "nodes" else [])]
    return rows.with_columns(pl.col("request_id").cast(pl.String)).sort(keys)


@dataclass
class Engine:
    """A vLLM in this process."""

    llm: Any

    @property
    def runner(self) -> Any:
        executor = self.llm.llm_engine.engine_core.engine_core.model_executor
        return executor.driver_worker.worker.model_runner

    @property
    def session(self) -> Any:
        return self.runner._specctl

    def generate(
        self, given: Sequence[Sequence[int]], *, at_once: int | None = None, **sampling: Any
    ) -> list[list[int]]:
        """Texts, as token ids.

        Args:
            at_once: requests that vLLM holds at a time, all by default; the next one is handed over
                as one ends.
        """
        from vllm import SamplingParams

        params = SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_NEW_TOKENS, **sampling})
        serving, waiting = self.llm.llm_engine, list(enumerate(given))[::-1]
        texts: list[list[int]] = [[] for _ in given]
        while waiting or serving.has_unfinished_requests():
            num_held = serving.get_num_unfinished_requests()
            while waiting and (at_once is None or num_held < at_once):
                row, ids = waiting.pop()
                serving.add_request(str(row), {"prompt_token_ids": list(ids)}, params)
                num_held += 1
            for out in serving.step():
                if out.finished:
                    texts[int(out.request_id)] = list(out.outputs[0].token_ids)
        return texts

    def counters(self) -> dict[str, int]:
        """vLLM's own counters of speculation, since it was started."""
        found = {one.name: getattr(one, "value", None) for one in self.llm.get_metrics()}
        return {
            name: int(found[f"vllm:spec_decode_num_{name}"] or 0)
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        }


@contextmanager
def engine(
    drafter: str = "eagle3",
    num_speculative_tokens: int = 5,
    settings: PluginSettings | None = None,
    *,
    batch_size: int = 8,
    exported: dict[str, Any] | None = None,
    **speculative: Any,
) -> Iterator[Engine]:
    """Starts vLLM, and ends it.

    Args:
        exported: a whole `--speculative-config`, in place of one made of the others.
    """
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    os.environ[VARIABLE] = "" if settings is None else settings.to_json()
    import vllm.plugins
    from vllm import LLM

    vllm.plugins.plugins_loaded = False  # each engine reads the variable anew
    llm = LLM(
        model=str(embedded_path("target")),
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=batch_size,
        seed=0,
        disable_log_stats=False,
        speculative_config=exported
        or speculative_config(drafter, num_speculative_tokens, **speculative),
    )
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def speculative_config(drafter: str, num_speculative_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "method": METHODS[drafter],
        "model": str(embedded_path(drafter)),
        "num_speculative_tokens": num_speculative_tokens,
        **more,
    }


def printed(*words: object) -> str:
    """What a command prints, warnings aside; a refusal fails the test."""
    done = specctl(*words)
    assert done.code == 0, done
    return done.out


# --------------------------------------------------------------------------- as a server


@dataclass
class Server:
    """vLLM's OpenAI server, with its engine in a process of its own."""

    process: subprocess.Popen[str]
    url: str

    def complete(self, ids: Sequence[int], **sampling: Any) -> list[int]:
        """The text that one request gets, as token ids."""
        body = {
            "model": "target",
            "prompt": list(ids),
            "max_tokens": MAX_NEW_TOKENS,
            "temperature": 0.0,
            "return_token_ids": True,
            **sampling,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return list(json.load(answer)["choices"][0]["token_ids"])

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    def kill(self) -> None:
        """SIGKILL to the server and to its engine at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def server(
    settings: PluginSettings | None,
    log: Path,
    drafter: str = "eagle3",
    num_speculative_tokens: int = 5,
    *,
    batch_size: int = 8,
) -> Iterator[Server]:
    """Starts the server and waits until it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    options = {
        "model": str(embedded_path("target")),
        "served-model-name": "target",
        "dtype": "float32",
        "max-model-len": str(MAX_MODEL_LEN),
        "max-num-seqs": str(batch_size),
        "host": "127.0.0.1",
        "port": str(port),
        "speculative-config": json.dumps(speculative_config(drafter, num_speculative_tokens)),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environment[VARIABLE] = "" if settings is None else settings.to_json()
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, *words, "--enforce-eager"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            text=True,
        )
    started = Server(process, f"http://127.0.0.1:{port}")
    try:
        while not _answers(started):
            if process.poll() is not None:
                raise AssertionError(log.read_text()[-4000:])
            time.sleep(0.2)
        yield started
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def _answers(one: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{one.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
