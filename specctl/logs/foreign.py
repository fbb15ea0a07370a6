"""Files of other tools, by their keys or first lines: whose they are, and what to give instead."""

from __future__ import annotations

import re

from specctl.errors import InputError

_METRICS = "import the server's /metrics, scraped before and after the run, or its log"
_RESPONSES = "responses of requests are not read: " + _METRICS
_SERVE = "serve the model with `vllm serve`, and import its /metrics"
_READ = "logs and metrics of vLLM, SGLang and llama.cpp are read"

_JSON = {
    _METRICS: {
        '"spec_decode_num_drafts"': "is a result of `vllm bench serve`",
        '"acceptance_rate_per_pos"': "is a result of `vllm bench`",
        '"spec_decode_acceptance"': "holds AIPerf's records of requests",
        '"(?:Acceptance_Length_Histogram|Conditional_Acceptance_Rate)"': "is a result of NVIDIA's "
        "specdec_bench",
        '"accept_lengths"': "holds answers of Spec-Bench: lengths of rounds are not read",
        '"idxs"': "holds answers of EAGLE's evaluation scripts, without accepted lengths",
        '"question_id"': "holds answers to a benchmark's questions, without accepted lengths",
        '"acc(?:ept)?_length"': "is a result of SGLang's benchmark",
        '"(?:request_latency|mean_tpot_ms|benchmarks)"': "is a result of a benchmark of requests",
        '"resourceMetrics"': "is an export of OpenTelemetry",
        '"avg_ts"': "is a result of llama-bench, which drafts nothing",
        '"panels"': "is a dashboard of Grafana, which holds queries and no counts",
    },
    _RESPONSES: {
        r'"object":\s*"chat\.completion\.chunk"': "holds chunks of streamed responses",
        '"spec_accepted_drafts"': "holds responses of SGLang 0.5.11",
        '"spec_accept_token_num"': "holds responses of a SGLang before 0.5.11",
        '"spec_num_correct_drafts"': "holds responses of SGLang 0.5.12 or newer",
        '"meta_info"': "holds responses of SGLang",
        '"speculative_decoding"': "holds responses of vLLM with per-request metrics",
        r'"object":\s*"(?:text_|chat\.)completion"': "holds responses of an OpenAI server",
        r'"custom_id"[\s\S]*"response"': "holds responses of an OpenAI batch",
    },
    "`specctl collect` reads prompts": {
        '"custom_id"': "holds prompts of an OpenAI batch",
        '"(?:messages|prompt|conversations|turns)"': "holds prompts",
    },
    "import the log itself": {'"fixed_length_sweep"': "is a summary that `specctl import` wrote"},
    "give it with --cost-model": {r'"kind":\s*"cost_model"': "is a cost model"},
}
"""By the next step, patterns of JSON, and whose it is."""
_OURS = "(?:ray_)?(?:vllm|sglang|llamacpp)[:_]"
_LINES = {
    _RESPONSES: {r"data: *\{": "is a stream of responses"},
    _SERVE: {
        r"num_draft_tokens: \d|acceptance at token \d": "is the output of vLLM's offline example",
        r"(?:Counter|Gauge|Vector|Histogram)\(name='vllm:": "is of vLLM's LLM.get_metrics()",
    },
    _METRICS: {
        "=+ Serving Benchmark Result|-+Speculative Decoding-+|Acceptance length: ": "is the "
        "output of a benchmark of requests",
    },
    "scrape again, all of a page": {
        f"# (?:HELP|TYPE) {_OURS}": "has comments on metrics and no sample"
    },
    "import the log of llama-server": {r"n_drafted\s*=": "is the output of llama.cpp's example"},
    _READ: {
        r".*\[GIN\] ": "is a log of Ollama",
        r"Traceback \(most recent call last\)": "is a stack trace",
        "(?:# (?:HELP|TYPE) )?tgi_": "has metrics of text-generation-inference",
        "(?:# (?:HELP|TYPE) )?(?:nv_|trtllm_)": "has metrics of Triton or TensorRT-LLM",
        "(?:# (?:HELP|TYPE) )?lmdeploy": "has metrics of LMDeploy",
        r"\[TensorRT-LLM\]|\[TRT-LLM\]": "is a log of TensorRT-LLM",
        "# (?:HELP|TYPE) ": "has metrics of another program",
    },
}
"""By the next step, beginnings of a line, and whose it is."""


def foreign(name: str, text: str, *, is_json: bool) -> InputError:
    """The error for a text, given its first lines."""
    if not text.strip():
        return InputError(f"{name} is empty", hint="give the log of a server, or its /metrics")
    tables = {"": _JSON if is_json else {}, r"^\s*": _LINES}
    found = [
        (what, step)
        for start, table in tables.items()
        for step, of in table.items()
        for pattern, what in of.items()
        if re.search(f"{start}(?:{pattern})", text, re.MULTILINE)
    ]
    if found:
        what, step = found[0]
        return InputError(f"{name} {what}", hint=step)
    return InputError(
        f"{name} has no line of vLLM, SGLang or llama.cpp about drafts; it begins with "
        f"{text.strip().splitlines()[0].strip()[:60]!r}",
        hint=f"{_READ}: `SpecDecoding metrics: ...`, `Decode batch, ...`, `draft acceptance = ...` "
        "or counters such as vllm:spec_decode_num_drafts",
    )
