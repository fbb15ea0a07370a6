"""Metrics of engines, in every form that Prometheus gives them, and windows between scrapes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.logs.import_cases import (
    COUNTERS,
    figures,
    imported,
    refused,
    scrape,
    scrape_sglang,
    taus,
)

# --------------------------------------------------------------------------- counters


def without(start: str, *instead: str) -> list[str]:
    return [line for line in COUNTERS if not line.startswith(start)] + list(instead)


def samples(text: str) -> list[tuple[str, dict[str, str], str]]:
    found = re.findall(r"^(\S+?)\{(.*)\} (\S+)$", text, re.MULTILINE)
    return [
        (name, dict(re.findall(r'(\w+)="(.*?)"', labels)), value) for name, labels, value in found
    ]


def api(text: str, kind: str = "vector", values: int = 1) -> str:
    rows = [
        {"metric": {"__name__": name, **labels}}
        | (
            {"value": [1.79e9, value]}
            if kind == "vector"
            else {"values": [[1.79e9 + n, str(float(value) * n)] for n in range(1, values + 1)]}
        )
        for name, labels, value in samples(text)
        if "created" not in name
    ]
    return json.dumps({"status": "success", "data": {"resultType": kind, "result": rows}})


def victoria(text: str) -> str:
    rows = [
        {"metric": {"__name__": name, **labels}, "values": [float(value)], "timestamps": [1]}
        for name, labels, value in samples(text)
    ]
    return "\n".join(map(json.dumps, rows))


FORMS: dict[str, Callable[[str], str]] = {
    "a scrape": lambda text: text,
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "/federate": lambda text: re.sub(r"(\} \S+)$", r"\1 1790000000123", text, flags=re.MULTILINE),
    "OpenMetrics": lambda text: text + "# EOF\n",
    "OpenMetrics, times": lambda text: re.sub(
        r"(\} \S+)$", r"\1 1.79e+09", text, flags=re.MULTILINE
    ),
    "OpenMetrics, exemplars": lambda text: re.sub(
        r"(\} \S+)$", r'\1 # {trace_id="ab"} 1.0 1.79e9', text, flags=re.MULTILINE
    ),
    "no _total": lambda text: text.replace("_total", ""),
    "Ray": lambda text: text.replace("vllm:", "ray_vllm_"),
    "Ray before": lambda text: text.replace("vllm:", "ray_vllm:"),
    "OpenTelemetry": lambda text: text.replace("vllm:", "vllm_"),
    "grep of files": lambda text: "".join(f"m.prom:{line}\n" for line in text.splitlines()),
    "grep -n": lambda text: "".join(f"{n}:{line}\n" for n, line in enumerate(text.splitlines())),
    "indented": lambda text: "".join(f"    {line}\n" for line in text.splitlines()),
    "a trailing comma of labels": lambda text: text.replace("} ", ",} "),
    "blanks in labels": lambda text: (
        text.replace('",', '", ').replace("{", "{ ").replace("}", " }")
    ),
    "labels of a job": lambda text: text.replace("{", '{instance="10.0.0.1:8000",job="vllm",'),
    "exponents": lambda text: re.sub(r"(\d+)\.0$", r"\1e+00", text, flags=re.MULTILINE),
    "promtool": lambda text: re.sub(
        r"(\}) (\S+)$", r"\1 => \2 @[1790000000.1]", text, flags=re.MULTILINE
    ),
    "other metrics": lambda text: (
        text + 'vllm:e2e_request_latency_seconds_bucket{le="0.3"} 4\n'
        "vllm:kv_cache_usage_perc{} NaN\nvllm:request_success_total 7\nnode_load1 0.2\n"
    ),
    "a cut line of other metrics": lambda text: (
        text + 'vllm:time_to_first_token_seconds_bucket{le="0'
    ),
    "the API, vector": api,
    "the API, printed": lambda text: json.dumps(json.loads(api(text)), indent=1),
    "the API, matrix of one": lambda text: api(text, "matrix"),
    "VictoriaMetrics": victoria,
}


@pytest.mark.parametrize("form", FORMS)
def test_counters_in_every_form(form: str) -> None:
    found = imported(FORMS[form](scrape()))
    assert found["format"] == "vllm-prometheus"
    [(model, own)] = found["models"].items()
    assert (model, own["num_rounds"], own["num_engines"]) == ("m", 10, 1)
    assert own["marginal_prob"] == [0.7, 0.4, 0.1]
    assert own["conditional_prob"] == [0.7, pytest.approx(4 / 7), 0.25]
    assert np.array(taus(own)) == pytest.approx(np.array([[1.7] * 2, [2.1] * 2, [2.2] * 2]))
    assert own["counted"] == "counted since the server's start"


@pytest.mark.parametrize("stem", ["llamacpp:", "llamacpp_"])
def test_llama_cpp_counts_alike(stem: str) -> None:
    found = imported(scrape(stem=stem, labels='a="b"'))
    assert found["format"] == "llamacpp-prometheus"
    assert figures(scrape(stem=stem, labels='a="b"'))["marginal_prob"] == [0.7, 0.4, 0.1]


def test_engines_servers_and_models() -> None:
    """Engines of one model add up, models stand apart."""
    text = "".join(
        scrape(labels=f'engine="{engine}",model_name="{model}"', created=None)
        for engine, model in (("0", "m"), ("1", "m"), ("0", 'odd \\"name\\", {x}'))
    )
    found = imported(text)["models"]
    assert {name: (own["num_rounds"], own["num_engines"]) for name, own in found.items()} == {
        "m": (20, 2),
        'odd \\"name\\", {x}': (10, 1),
    }
    federated = "".join(
        scrape(labels=f'instance="h{n}:8000",model_name="m"', created=None) for n in range(3)
    )
    assert figures(federated)["num_engines"] == 3


def test_servers_without_a_model_s_name_stand_apart() -> None:
    """llama.cpp's on a page of /federate: each may serve another model."""
    labels = [f'instance="h{n}:8080",job="llama"' for n in range(2)]
    pages = [scrape(stem="llamacpp:", labels=own, created=None) for own in labels]
    found = imported("".join(pages))["models"]
    assert {name: (own["num_rounds"], own["num_engines"]) for name, own in found.items()} == {
        "h0:8080": (10, 1),
        "h1:8080": (10, 1),
    }


def test_counters_of_several_lengths_are_marked() -> None:
    found = figures(scrape(*without("num_draft_tokens", "num_draft_tokens 25")))
    assert not found["fixed_length_sweep"]["is_exact"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (scrape(*without("num_drafts", "num_drafts NaN")), "line 8: .*NaN, no finite number"),
        (scrape(*without("num_drafts", "num_drafts +Inf")), r"line 8: .*\+Inf"),
        (scrape(*without("num_drafts", "num_drafts -1")), "line 8: .*-1"),
        (scrape(*without("num_drafts", "num_drafts 10.5")), "10.5, no count"),
        (scrape(*without("num_drafts", "num_drafts 1e300")), "no count"),
        (scrape(*COUNTERS, "num_drafts 10.0"), "line 9: .*line 3 again, so these are two scrapes"),
        (scrape() * 2, "two scrapes; save each as a file; `specctl import BEFORE AFTER`"),
        (scrape(*COUNTERS, "per_pos x 1"), "line 9: .*position"),
        (scrape(*COUNTERS, 'per_pos "x 1'), "line 9: .*no whole sample"),
        (scrape(created=None)[:-60], "positions do not add up"),
        (scrape(created=None)[:-5], "line 8: .*no whole sample"),
        (scrape(*without("per_pos 1")), "positions have a gap"),
        (scrape(*without("per_pos 2")), "positions do not add up"),
        (scrape(*without("num_accepted_tokens")), "a counter is missing"),
        (scrape(*without("per_pos 0", "per_pos 0 2")), "a position is accepted more often"),
        (scrape(*without("num_accepted_tokens", "num_accepted_tokens 13")), "add up"),
        (scrape(*without("num_draft_tokens", "num_draft_tokens 11")), "more tokens are accepted"),
        (scrape("num_drafts 0"), "counts no drafts yet; scrape once"),
        (scrape("efficiency 0.5", suffix=""), "metrics of a vLLM before 0.9"),
        (scrape("num_emitted_tokens 5"), "metrics of a vLLM before 0.9"),
        (scrape("num_rejected 5"), r"no vllm:spec_decode_num_drafts \(of drafts: .*num_rejected"),
        ("vllm:num_requests_running 0\n", "has metrics of vLLM and no vllm:spec_decode_num_drafts"),
        (
            "llamacpp:prompt_tokens_total 31\n",
            "of llama.cpp and no llamacpp:spec_dec.*before September",
        ),
        ("sglang:num_running_reqs 3\n", "of SGLang and no sglang:spec_verify_calls"),
        (scrape() + scrape_sglang(), "has metrics of sglang and vllm"),
        (api(scrape()).replace("__name__", "name"), "or it is of an expression such as rate"),
        (
            '{"status":"success","data":{"resultType":"vector","result":[]}}',
            "its query found none",
        ),
        (
            '{"status":"error","error":"bad_data: parse"}',
            "Prometheus answers with an error: bad_data",
        ),
        (api(scrape()).replace('"metric"', '"metrc"', 1), "no whole answer of Prometheus' API"),
        (api(scrape()).replace('"10.0"', '"x"', 1), "no whole answer of Prometheus' API"),
        (
            scrape(*COUNTERS[:3], created=None)[:-3],
            "line 5: this sample is the last and has no line",
        ),
        (scrape_sglang()[:100], "has comments on metrics and no sample; scrape again"),
        (api('node_load1{a="b"} 1\n'), "has no series of an engine: .*; query the counters"),
    ],
)
def test_metrics_that_are_refused(text: str, says: str) -> None:
    assert re.search(says, refused(text))


# --------------------------------------------------------------------------- windows

LATER = (
    "num_drafts 16",
    "num_draft_tokens 48",
    "num_accepted_tokens 18",
    "per_pos 0 10",
    "per_pos 1 6",
    "per_pos 2 2",
)


@pytest.mark.parametrize("form", ["a scrape", "OpenMetrics", "Ray", "/federate", "the API, vector"])
def test_the_window_between_two_scrapes(form: str) -> None:
    found = imported(FORMS[form](scrape()), FORMS[form](scrape(*LATER)))
    [own] = found["models"].values()
    assert (own["num_rounds"], own["num_accepted_tokens"]) == (6, 6)
    assert own["marginal_prob"] == [0.5, pytest.approx(1 / 3), pytest.approx(1 / 6)]
    assert own["counted"] == "counted from 0 to 1"


def test_a_range_of_the_api_is_a_window() -> None:
    """Values of 1, 2 and 3 times the counters: the window has twice as many."""
    own = figures(api(scrape(), "matrix", 3))
    assert (own["num_rounds"], own["marginal_prob"]) == (20, [0.7, 0.4, 0.1])


STARTED = "process_start_time_seconds 1.7640612e+09\n"


def test_starts_of_other_programs_are_no_restart() -> None:
    others = [STARTED.replace(" ", f' {{job="node"}} {n}') for n in (1, 2)]
    found = imported(others[0] + STARTED + scrape(), others[1] + STARTED + scrape(*LATER))
    assert found["models"]["m"]["num_rounds"] == 6


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (scrape(*LATER), scrape(), "from 18 in 0 to 12 in 1: the later scrape was given first, or "
         "the server restarted between them; try `specctl import 1 0` if 1 is the earlier one, or "
         "import 1 alone"),
        (STARTED + scrape(), STARTED.replace("64", "75") + scrape(*LATER),
         "process_start_time_seconds goes from 1764061200 in 0 to 1775061200 in 1: the server "
         "restarted between them; import 1 alone"),
        (STARTED.replace("64", "75") + scrape(*LATER), STARTED + scrape(), "; import 0 alone"),
        (scrape(*LATER, created=None), scrape(created=None), "goes from 18"),
        (scrape(created=1.7e9), scrape(*LATER, created=1.8e9), "them; import 1 alone"),
        (scrape(), scrape(), "counts no drafts between the scrapes"),
        (scrape(), scrape(*LATER, labels='engine="0",model_name="n"'), "not two scrapes of one"),
        (scrape(), scrape(*LATER[:-1]), "and those of different servers each alone"),
        (scrape(), scrape_sglang(), "not two scrapes of one"),
        (api(scrape(), "matrix", 2), scrape(*LATER), "3 scrapes, and a window has two ends"),
    ],
)  # fmt: skip
def test_scrapes_that_make_no_window(before: str, after: str, says: str) -> None:
    assert says in refused(before, after)


def test_a_range_with_a_restart_in_it() -> None:
    text = api(scrape(), "matrix", 3).replace('"20.0"', '"40.0"', 1)
    assert "falls within the range, so the server restarted in it" in refused(text)


def test_scrapes_and_logs_do_not_go_together() -> None:
    assert "do not go together" in refused(scrape(), "Decode batch, #running-req: 1")


# --------------------------------------------------------------------------- SGLang


@pytest.mark.parametrize("stem", ["sglang:", "sglang_", "ray_sglang_"])
def test_sglang_counters_by_hand(stem: str) -> None:
    """18,000 tokens, 100 of them from prompts, in 7,000 rounds of three draft tokens."""
    found = figures(scrape_sglang(stem))
    mean = 17900 / 7000
    assert found["mean_acceptance_length_range"] == [mean, mean]
    assert (found["num_rounds"], found["num_draft_tokens_per_round"]) == (7000, 3)
    assert found["last_interval_means"] == [2.4]
    assert taus(found) == [
        [pytest.approx(1 + (mean - 1) / 3), 2.0],
        [pytest.approx(1 + (mean - 1) * 2 / 3), mean],
        [pytest.approx(mean), mean],
    ]
    assert "acceptance by position" in found["not_known"]


@pytest.mark.parametrize(
    ("changes", "depth", "mean", "why"),
    [
        ({"num_aborted_requests": 700}, 3, [17900 / 7000, 18000 / 7000], None),
        ({"spec_verify_calls": None}, 3, [2.4, 2.4], None),
        ({"spec_num_steps": 2.0}, None, [17900 / 7000] * 2, "trees"),
        ({"spec_num_draft_tokens": None}, None, [17900 / 7000] * 2, "is not there"),
    ],
)
def test_sglang_counters_that_say_less(
    changes: dict[str, Any], depth: int | None, mean: list[float], why: str | None
) -> None:
    found = figures(scrape_sglang(**changes))
    assert found["num_draft_tokens_per_round"] == depth
    assert found["mean_acceptance_length_range"] == mean
    assert (found["fixed_length_sweep"] is None) == (depth is None)
    assert why is None or why in found["why_no_sweep"]


def test_sglang_ranks_with_other_draft_lengths() -> None:
    other = 'sglang:spec_num_draft_tokens{model_name="m",dp_rank="1"} 2.0\n'
    assert "changed while" in figures(scrape_sglang() + other)["why_no_sweep"]


def test_a_window_of_sglang() -> None:
    later = scrape_sglang(spec_verify_calls=9000, generation_tokens=20000, num_requests=200)
    found = figures(scrape_sglang(), later)
    assert found["num_rounds"] == 2000
    assert found["mean_acceptance_length_range"] == [4900 / 2000] * 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"spec_accept_length": 0.0, "spec_verify_calls": None},
            "if it then counts none, it does not speculate (--speculative-algorithm)",
        ),
        (
            {"spec_accept_length": None, "spec_verify_calls": None},
            "no sglang:spec_verify_calls",
        ),
        ({"spec_accept_length": "NaN"}, "line 2: sglang:spec_accept_length is NaN"),
        ({"spec_verify_calls": 7000.5}, "line 9: sglang:spec_verify_calls is 7000.5, no count"),
        ({"generation_tokens": 3000}, "less than one a round"),
    ],
)
def test_sglang_counters_that_are_refused(changes: dict[str, Any], says: str) -> None:
    assert says in refused(scrape_sglang(**changes))
