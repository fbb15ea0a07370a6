"""Files of other tools, by their keys or first lines: whose they are, and what to give instead."""

from __future__ import annotations

import re
from typing import Any

from specctl.errors import InputError

_METRICS = "import the server's /metrics, scraped before and after the run, or its log"
_RESPONSES = "responses of requests are not read: " + _METRICS
_SERVE = "serve the model with `vllm serve`, and import its /metrics"
_READ = "logs and metrics of vLLM, SGLang and llama.cpp are read"

_KEYS: dict[str, dict[str, str]] = {
    _METRICS: {
        "spec_decode_num_drafts": "is a result of `vllm bench serve`",
        "acceptance_rate_per_pos": "is a result of `vllm bench`",
        "spec_decode_acceptance": "holds AIPerf's records of requests",
        "Acceptance_Length_Histogram": "is a result of NVIDIA's specdec_bench",
        "Conditional_Acceptance_Rate": "is a result of NVIDIA's specdec_bench",
        "choices.accept_lengths": "holds answers of Spec-Bench: lengths of rounds are not read",
        "choices.idxs": "holds answers of EAGLE's evaluation scripts, without accepted lengths",
        "question_id choices": "holds answers to a benchmark's questions, without accepted lengths",
        "accept_length output_throughput": "is a result of SGLang's bench_serving",
        "acc_length": "is a result of SGLang's benchmark",
        "request_latency": "is a result of a benchmark of requests",
        "mean_tpot_ms": "is a result of a benchmark of requests, without drafts",
        "benchmarks": "is a result of a benchmark of requests",
        "resourceMetrics": "is an export of OpenTelemetry",
        "n_prompt n_gen avg_ts": "is a result of llama-bench, which drafts nothing",
        "schemaVersion panels": "is a dashboard of Grafana, which holds queries and no counts",
    },
    _RESPONSES: {
        "meta_info.spec_accepted_drafts": "holds responses of SGLang 0.5.11",
        "meta_info.spec_accept_token_num": "holds responses of a SGLang before 0.5.11",
        "meta_info.spec_num_correct_drafts": "holds responses of SGLang 0.5.12 or newer",
        "meta_info": "holds responses of SGLang",
        "metrics.speculative_decoding": "holds responses of vLLM with per-request metrics",
        "object=chat.completion.chunk": "holds chunks of streamed responses",
        "object=text_completion": "holds responses of an OpenAI server",
        "object=chat.completion": "holds responses of an OpenAI server",
        "custom_id response": "holds responses of an OpenAI batch",
    },
    "`specctl collect` reads prompts": {
        "custom_id body": "holds prompts of an OpenAI batch",
        **dict.fromkeys(("messages", "prompt", "conversations", "turns"), "holds prompts"),
    },
    "import the log itself": {"fixed_length_sweep": "is a summary that `specctl import` wrote"},
    "give it with --cost-model": {"kind=cost_model": "is a cost model"},
}
"""By the next step, keys of a record (`.`: of one inside, `=`: with a value), and whose it is."""
_OF_METRICS = "(?:# (?:HELP|TYPE) )"
_OURS = "(?:ray_)?(?:vllm|sglang|llamacpp)[:_]"
_LINES: dict[str, dict[str, str]] = {
    _RESPONSES: {r"data: *\{.*": "is a stream of responses"},
    _SERVE: {
        r"num_draft_tokens: \d|acceptance at token \d": "is the output of vLLM's offline example",
        r"(?:Counter|Gauge|Vector|Histogram)\(name='vllm:": "is of vLLM's LLM.get_metrics()",
    },
    _METRICS: {
        "=+ Serving Benchmark Result|-+Speculative Decoding-+|Acceptance length: ": "is the "
        "output of a benchmark of requests",
    },
    "scrape again, all of a page": {
        _OF_METRICS + _OURS: "has comments on metrics and no sample",
    },
    "import the log of llama-server": {r"n_drafted\s*=": "is the output of llama.cpp's example"},
    _READ: {
        r".*\[GIN\] ": "is a log of Ollama",
        r"Traceback \(most recent call last\)": "is a stack trace",
        f"{_OF_METRICS}?tgi_": "has metrics of text-generation-inference",
        f"{_OF_METRICS}?(?:nv_|trtllm_)": "has metrics of Triton or TensorRT-LLM",
        r"\[TensorRT-LLM\]|\[TRT-LLM\]": "is a log of TensorRT-LLM",
        f"{_OF_METRICS}?lmdeploy": "has metrics of LMDeploy",
        f"{_OF_METRICS}(?!{_OURS})": "has metrics of another program",
    },
}
"""By the next step, beginnings of a line, and whose it is."""


def foreign(name: str, records: list[Any], lines: list[str]) -> InputError:
    """The error for a text, given its first lines and, if it is JSON, its records."""
    if not lines:
        return InputError(f"{name} is empty", hint="give the log of a server, or its /metrics")
    for step, of in _KEYS.items():
        for keys, what in of.items():
            if records and all(_has(records[0], key) for key in keys.split()):
                return InputError(f"{name} {what}", hint=step)
    for step, of in _LINES.items():
        for pattern, what in of.items():
            if any(re.match(pattern, line.strip()) for line in lines):
                return InputError(f"{name} {what}", hint=step)
    return InputError(
        f"{name} has no line of vLLM, SGLang or llama.cpp about drafts; it begins with "
        f"{lines[0].strip()[:60]!r}",
        hint=f"{_READ}: `SpecDecoding metrics: ...`, `Decode batch, ...`, `draft acceptance = ...` "
        "or counters such as vllm:spec_decode_num_drafts",
    )


def _has(record: Any, key: str) -> bool:
    name, _, value = key.partition("=")
    if value:
        return isinstance(record, dict) and record.get(name) == value
    for part in name.split("."):
        record = record[0] if isinstance(record, list) and record else record
        if not (isinstance(record, dict) and part in record):
            return False
        record = record[part]
    return True
