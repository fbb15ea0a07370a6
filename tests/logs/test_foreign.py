"""Files of other tools are named for what they are, with something that is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.logs.import_cases import refused

SPEC = {"num_spec_steps": 25, "num_accepted_draft_tokens": 38}
RECORDS: list[tuple[Any, str]] = [
    (
        {"backend": "vllm", "num_prompts": 80, "spec_decode_num_drafts": 60},
        "result of `vllm bench serve`",
    ),
    (
        {"backend": "vllm", "mean_tpot_ms": 4.1, "duration": 6.0},
        "result of a benchmark of requests",
    ),
    (
        {"backend": "sglang", "accept_length": 2.5, "output_throughput": 9.0},
        "SGLang's benchmark",
    ),
    (
        {"metadata": {}, "metrics": {}, "spec_decode_acceptance": {"engine": "vllm"}},
        "AIPerf's records",
    ),
    ({"Request_AL": {}, "Acceptance_Length_Histogram": {"1": 4}}, "NVIDIA's specdec_bench"),
    ({"meta_info": {"spec_accepted_drafts": 5, "spec_verify_ct": 2}}, "responses of SGLang 0.5.11"),
    ({"meta_info": {"spec_accept_token_num": 5}}, "responses of a SGLang before 0.5.11"),
    ({"meta_info": {"spec_num_correct_drafts": 5}}, "responses of SGLang 0.5.12 or newer"),
    ({"text": "", "meta_info": {"id": "r"}}, "responses of SGLang"),
    ([{"text": "", "meta_info": {"id": "r"}}], "responses of SGLang"),
    (
        {"object": "chat.completion", "metrics": {"speculative_decoding": SPEC}},
        "per-request metrics",
    ),
    ({"id": "a", "object": "chat.completion.chunk", "choices": []}, "chunks of streamed responses"),
    (
        {"object": "chat.completion.chunk", "metrics": {"speculative_decoding": SPEC}},
        "chunks of streamed responses",
    ),
    ({"id": "a", "object": "chat.completion", "choices": []}, "responses of an OpenAI server"),
    ({"id": "a", "object": "text_completion", "choices": []}, "responses of an OpenAI server"),
    (
        {"question_id": 8, "choices": [{"turns": ["a"], "idxs": [4], "new_tokens": [9]}]},
        "EAGLE's evaluation",
    ),
    ({"question_id": 8, "choices": [{"accept_lengths": [1, 2]}]}, "answers of Spec-Bench"),
    ({"question_id": 8, "choices": [{"turns": ["a"]}]}, "without accepted lengths"),
    ({"custom_id": "a", "response": {"body": {}}}, "responses of an OpenAI batch"),
    ({"custom_id": "a", "body": {"messages": []}}, "prompts of an OpenAI batch; `specctl collect`"),
    ({"messages": [{"role": "user", "content": "a"}]}, "holds prompts; `specctl collect`"),
    ({"prompt": "a"}, "holds prompts"),
    ({"turns": ["a"]}, "holds prompts"),
    ({"conversations": [{"from": "human", "value": "a"}]}, "holds prompts"),
    ({"n_prompt": 512, "n_gen": 0, "avg_ts": 4.0}, "llama-bench, which drafts nothing"),
    ({"resourceMetrics": []}, "an export of OpenTelemetry"),
    ({"benchmarks": [{}]}, "result of a benchmark of requests"),
    ({"run_name": "a", "acc_length": 2.5}, "SGLang's benchmark"),
    ({"schemaVersion": 39, "panels": []}, "dashboard of Grafana"),
    ({"kind": "cost_model"}, "is a cost model; give it with --cost-model"),
    ({"fixed_length_sweep": None, "num_rounds": 4}, "a summary that `specctl import` wrote"),
]
TEXTS = [
    (
        'data: {"id": "a", "object": "chat.completion.chunk"}\n\ndata: [DONE]\n',
        "a stream of responses",
    ),
    (
        "-----\nnum_drafts: 6000\nnum_draft_tokens: 18000\nacceptance at token 0: 0.70\n",
        "vLLM's offline",
    ),
    (
        "============ Serving Benchmark Result ============\nSuccessful requests: 80\n",
        "a benchmark",
    ),
    (
        "---------------Speculative Decoding---------------\nAcceptance rate (%): 45\n",
        "a benchmark",
    ),
    ("# HELP tgi_request_count x\ntgi_request_count 4\n", "text-generation-inference"),
    ("# HELP nv_inference_count x\nnv_inference_count 4\n", "Triton or TensorRT-LLM"),
    ("[TensorRT-LLM] TensorRT-LLM version: 1.0\n", "a log of TensorRT-LLM"),
    ("# HELP lmdeploy:x y\n", "metrics of LMDeploy"),
    ('[GIN] 2026/01/02 - 03:04:05 | 200 | 1.2s | POST "/api/chat"\n', "a log of Ollama"),
    (
        "# HELP python_gc x\npython_gc 1\n",
        "metrics of another program; logs and metrics of vLLM, SGLang and llama.cpp",
    ),
    (
        "Counter(name='vllm:spec_decode_num_drafts', labels={}, value=6)\n",
        "is of vLLM's LLM.get_metrics()",
    ),
    ("n_draft   = 16\nn_predict = 70\nn_drafted = 90\nn_accept  = 60\n", "llama.cpp's example"),
    ("Traceback (most recent call last):\n  File x\n", "a stack trace"),
    (
        "GET / 200\nGET / 404\n",
        "no line of vLLM, SGLang or llama.cpp about drafts; it begins with 'GET",
    ),
    ("[2026-11-25 07:00:00] INFO ready\n", "no line of vLLM, SGLang or llama.cpp"),
    ("[1, 2]\n", "no line of vLLM"),
    ('{"a": 1}\n', "no line of vLLM"),
]


@pytest.mark.parametrize(("record", "says"), RECORDS)
def test_a_record_of_another_tool(record: Any, says: str) -> None:
    for text in (json.dumps(record), json.dumps(record, indent=2), f"{json.dumps(record)}\n" * 3):
        found = refused(text)
        assert says in found
        assert any(
            next_step in found for next_step in ("import the", "specctl collect", "--cost-model")
        )


@pytest.mark.parametrize(("text", "says"), TEXTS)
def test_a_text_of_another_tool(text: str, says: str) -> None:
    assert says in refused(text)
