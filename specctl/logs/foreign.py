"""Files of other tools, by their keys or first lines: whose they are, and what to give instead."""

from __future__ import annotations

import re
from typing import Any

from specctl.errors import InputError

_METRICS = "import the server's /metrics, scraped before and after the run, or its log"
_RESPONSES = "responses of requests are not read: " + _METRICS

_KEYS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("spec_decode_num_drafts",),
        "is a result of `vllm bench serve`",
        _METRICS,
    ),
    (("spec_decode_acceptance",), "holds AIPerf's records of requests", _METRICS),
    (("acceptance_rate_per_pos",), "is a result of `vllm bench`", _METRICS),
    (("Acceptance_Length_Histogram",), "is a result of NVIDIA's specdec_bench", _METRICS),
    (("Conditional_Acceptance_Rate",), "is a result of NVIDIA's specdec_bench", _METRICS),
    (("meta_info.spec_accepted_drafts",), "holds responses of SGLang 0.5.11", _RESPONSES),
    (("meta_info.spec_accept_token_num",), "holds responses of a SGLang before 0.5.11", _RESPONSES),
    (
        ("meta_info.spec_num_correct_drafts",),
        "holds responses of SGLang 0.5.12 or newer",
        _RESPONSES,
    ),
    (("meta_info",), "holds responses of SGLang", _RESPONSES),
    (
        ("metrics.speculative_decoding",),
        "holds responses of vLLM with per-request metrics",
        _RESPONSES,
    ),
    (("object=chat.completion.chunk",), "holds chunks of streamed responses", _RESPONSES),
    (("object=text_completion",), "holds responses of an OpenAI server", _RESPONSES),
    (("object=chat.completion",), "holds responses of an OpenAI server", _RESPONSES),
    (
        ("choices.accept_lengths",),
        "holds answers of Spec-Bench",
        "lengths of rounds are not read: " + _METRICS,
    ),
    (
        ("choices.idxs",),
        "holds answers of EAGLE's evaluation scripts, without accepted lengths",
        _METRICS,
    ),
    (
        ("question_id", "choices"),
        "holds answers to a benchmark's questions, without accepted lengths",
        _METRICS,
    ),
    (("accept_length", "output_throughput"), "is a result of SGLang's bench_serving", _METRICS),
    (("custom_id", "response"), "holds responses of an OpenAI batch", _METRICS),
    (("custom_id", "body"), "holds prompts of an OpenAI batch", "`specctl collect` reads prompts"),
    (("messages",), "holds prompts", "`specctl collect` reads prompts"),
    (("prompt",), "holds prompts", "`specctl collect` reads prompts"),
    (("conversations",), "holds prompts", "`specctl collect` reads prompts"),
    (("turns",), "holds prompts", "`specctl collect` reads prompts"),
    (("request_latency",), "is a result of a benchmark of requests", _METRICS),
    (("mean_tpot_ms",), "is a result of a benchmark of requests, without drafts", _METRICS),
    (("fixed_length_sweep",), "is a summary that `specctl import` wrote", "import the log itself"),
    (("kind=cost_model",), "is a cost model", "give it with --cost-model"),
    (("resourceMetrics",), "is an export of OpenTelemetry", _METRICS),
    (("benchmarks",), "is a result of a benchmark of requests", _METRICS),
    (("acc_length",), "is a result of SGLang's benchmark", _METRICS),
    (("n_prompt", "n_gen", "avg_ts"), "is a result of llama-bench, which drafts nothing", _METRICS),
    (
        ("schemaVersion", "panels"),
        "is a dashboard of Grafana, which holds queries and no counts",
        _METRICS,
    ),
)
"""Keys of a record (with `.` for a nested one, `=` for a value): whose, and what to give."""

_LINES: tuple[tuple[str, str, str], ...] = (
    (r"data: *\{.*", "is a stream of responses", _RESPONSES),
    (
        r"num_draft_tokens: \d|acceptance at token \d",
        "is the output of vLLM's offline example",
        "serve the model with `vllm serve`, and import its /metrics",
    ),
    (
        r"=+ Serving Benchmark Result|-+Speculative Decoding-+|Acceptance length: ",
        "is the output of a benchmark of requests",
        _METRICS,
    ),
    (
        r"(?:# (?:HELP|TYPE) )?(?:tgi_|te_request)",
        "has metrics of text-generation-inference",
        "vLLM, SGLang and llama.cpp are read",
    ),
    (
        r"(?:# (?:HELP|TYPE) )?(?:nv_|trtllm_|nv_trt)",
        "has metrics of Triton or TensorRT-LLM",
        "vLLM, SGLang and llama.cpp are read",
    ),
    (
        r"\[TensorRT-LLM\]|\[TRT-LLM\]",
        "is a log of TensorRT-LLM",
        "vLLM, SGLang and llama.cpp are read",
    ),
    (
        r"(?:# (?:HELP|TYPE) )?lmdeploy",
        "has metrics of LMDeploy",
        "vLLM, SGLang and llama.cpp are read",
    ),
    (
        r".*\[GIN\] ",
        "is a log of Ollama",
        "OLLAMA_DEBUG=1 lets its llama.cpp print `draft acceptance`",
    ),
    (
        r"# (?:HELP|TYPE) ",
        "has metrics of another program than vLLM, SGLang or llama.cpp",
        "scrape the server's own port, http://HOST:PORT/metrics",
    ),
    (
        r"(?:Counter|Gauge|Vector|Histogram)\(name='vllm:",
        "is the output of vLLM's LLM.get_metrics()",
        "serve the model with `vllm serve`, and import its /metrics",
    ),
    (r"n_drafted\s*=", "is the output of llama.cpp's example", "import the log of llama-server"),
    (r"Traceback \(most recent call last\)", "is a stack trace", "give the server's log"),
    (r"[\w.]+=?,?.*\bp50\b.*\bp99\b", "is a table of latencies", _METRICS),
)
READ = "logs and metrics of vLLM, SGLang and llama.cpp are read"


def foreign_record(name: str, record: Any) -> InputError | None:
    """The error for a JSON record of another tool; None if nothing tells whose it is."""
    for keys, what, hint in _KEYS:
        if all(_has(record, key) for key in keys):
            return InputError(f"{name} {what}", hint=hint)
    return None


def _has(record: Any, key: str) -> bool:
    name, _, value = key.partition("=")
    for part in name.split("."):
        record = record[0] if isinstance(record, list) and record else record
        if not (isinstance(record, dict) and part in record):
            return False
        record = record[part]
    return not value or record == value


def foreign_text(name: str, lines: list[str]) -> InputError:
    """The error for a text without a line that is read."""
    for pattern, what, hint in _LINES:
        if any(re.match(pattern, line.strip()) for line in lines):
            return InputError(f"{name} {what}", hint=hint)
    if not lines:
        return InputError(f"{name} is empty", hint="give the log of a server, or its /metrics")
    return InputError(
        f"{name} has no line of vLLM, SGLang or llama.cpp about drafts; it begins with "
        f"{lines[0].strip()[:60]!r}",
        hint=f"{READ}: `SpecDecoding metrics: ...`, `Decode batch, ...`, `draft acceptance = ...`, "
        "or counters such as vllm:spec_decode_num_drafts",
    )
