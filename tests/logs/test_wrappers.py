"""Logs of every engine in every wrapper give the same figures as bare."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specctl.logs.sources import Source
from specctl.logs.wrappers import engine_lines
from tests.logs.import_cases import (
    ROUNDS,
    figures,
    imported,
    llamacpp_log,
    refused,
    sglang_log,
    vllm_figures,
    vllm_log,
)

Lines = list[str]
gzipped = partial(gzip.compress, mtime=0)  # tests are named by these bytes
Z = "2026-09-22T09:34:10.412345678Z"
CYAN, OFF = "\x1b[1;36m", "\x1b[0;0m"


def each(form: str) -> Callable[[Lines], Lines]:
    """A wrapper that puts each line in a form; {n} is its number."""
    return lambda lines: [form.format(line=one, n=n) for n, one in enumerate(lines, start=1)]


def as_json(record: Callable[[str, int], Any], **dump: Any) -> Callable[[Lines], Lines]:
    return lambda lines: [json.dumps(record(one, n), **dump) for n, one in enumerate(lines)]


def parts(lines: Lines, size: int, form: str, last: str) -> Lines:
    found = []
    for line in lines:
        cut = [line[k : k + size] for k in range(0, len(line), size)]
        found += [form.format(line=one) for one in cut[:-1]] + [last.format(line=cut[-1])]
    return found


def folded(lines: Lines, width: int) -> Lines:
    return [line[k : k + width] for line in lines for k in range(0, len(line), width)]


def folded_at_blanks(lines: Lines) -> Lines:
    found = []
    for line in lines:
        own = [""]
        for word in line.split(" "):
            if len(own[-1]) + len(word) > 76:
                own.append("")
            own[-1] += f"{word} "
        found += [part.rstrip() for part in own]
    return found


WRAPPERS: dict[str, Callable[[Lines], Lines]] = {
    "colours": each(f"{CYAN}{{line}}{OFF}"),
    "colours inside": lambda lines: [
        line.replace(")", f"){OFF}").replace("(", f"{CYAN}(") for line in lines
    ],
    "colours of cat -v": each("^[[36m{line}^[[0m"),
    "colours of rsyslog": each("Sep 22 09:34:10 node7 vllm: #033[36m{line}#033[0m"),
    "docker -t": each(Z + " {line}"),
    "docker json-file": as_json(
        lambda line, n: {"log": line + "\n", "stream": "stderr", "time": Z}
    ),
    "docker json-file, compact": as_json(
        lambda line, n: {"log": line + "\n", "stream": "stderr", "time": Z}, separators=(",", ":")
    ),
    "docker compose": each("vllm-1  | {line}"),
    "docker compose v1, times": each("vllm_1  | " + Z + " {line}"),
    "CRI": each(Z + " stderr F {line}"),
    "CRI with an offset": each("2026-09-22T11:34:10.412345678+02:00 stdout F {line}"),
    "CRI in parts": lambda lines: parts(lines, 48, Z + " stderr P {line}", Z + " stderr F {line}"),
    "CRI in parts of a mark": lambda lines: parts(
        lines, 11, Z + " stderr P {line}", Z + " stderr F {line}"
    ),
    "CRI with names": each("[pod/vllm-0/server] " + Z + " stderr F {line}"),
    "CRI of JSON": lambda lines: each(Z + " stderr F {line}")(
        as_json(lambda line, n: {"message": line})(lines)
    ),
    "kubectl --prefix": each("[pod/vllm-7d9f8b-abcde/server] {line}"),
    "kubectl --timestamps": each(Z + " {line}"),
    "stern": each("vllm-7d9f8b-abcde server {line}"),
    "journald": each("Sep 22 09:34:10 node7 vllm[4242]: {line}"),
    "journald, ISO": each("2026-09-22T09:34:10+0200 node7 vllm[4242]: {line}"),
    "journald, JSON": as_json(
        lambda line, n: {
            "__REALTIME_TIMESTAMP": "17",
            "_PID": "42",
            "_HOSTNAME": "n",
            "MESSAGE": line,
        }
    ),
    "journald, bytes": as_json(
        lambda line, n: {"_PID": "42", "MESSAGE": [*f"{CYAN}{line}".encode()]}
    ),
    "syslog": each("<30>1 2026-09-22T09:34:10Z node7 vllm 4242 - - {line}"),
    "JSON logger": as_json(lambda line, n: {"levelname": "INFO", "message": line, "process": 7}),
    "JSON logger, msg": as_json(lambda line, n: {"level": "info", "msg": line, "ts": 1.7e9 + n}),
    "llama.cpp --log-jsonl": as_json(
        lambda line, n: {
            "type": "log",
            "time": 13_994_928 + n,
            "level": "info",
            "msg": line + "\n",
        },
        separators=(",", ":"),
    ),
    "JSON logger, event": as_json(lambda line, n: {"event": line, "timestamp": Z}),
    "JSON in JSON": as_json(
        lambda line, n: {"log": json.dumps({"message": line}) + "\n", "stream": "stderr", "time": Z}
    ),
    "JSON behind a prefix": lambda lines: each("vllm-1  | {line}")(
        as_json(lambda line, n: {"message": line})(lines)
    ),
    "ECS": as_json(lambda line, n: {"@timestamp": Z, "log.level": "info", "message": line}),
    "fluent-bit": as_json(
        lambda line, n: {"log": line, "kubernetes": {"pod_name": "v-0", "container_name": "c"}}
    ),
    "Google Cloud": as_json(
        lambda line, n: {"textPayload": line, "resource": {"labels": {"pod_name": "v-0"}}}
    ),
    "Google Cloud, printed": as_json(
        lambda line, n: {"textPayload": line, "timestamp": Z}, indent=2
    ),
    "Google Cloud, jsonPayload": as_json(lambda line, n: {"jsonPayload": {"message": line}}),
    "Loki": as_json(lambda line, n: {"labels": {"app": "vllm"}, "line": line, "timestamp": Z}),
    "Splunk": as_json(lambda line, n: {"result": {"_raw": line, "message": line}}),
    "logfmt": lambda lines: [f'time="{Z}" level=info msg="{line}"' for line in lines],
    "CSV": lambda lines: ["date,message", *(f'{Z},"{line}"' for line in lines)],
    "Ray": each("(SGLangEngine pid=3111) {line}"),
    "Ray with an address": each("(EngineActor pid=3111, ip=10.0.0.7) {line}"),
    "Ray behind a job": each(
        "[2025-12-18T16:24:00+08:00] job-a1-worker-0 >> (Engine pid=3) {line}"
    ),
    "srun -l": each("0: {line}"),
    "mpirun": each("[1,0]<stderr>: {line}"),
    "torchrun": each("[default0]:{line}"),
    "supervisord": each("2026-09-22 09:34:10,412 DEBG 'vllm' stderr output: {line}"),
    "grep of files": each("logs/serve.log:{n}:{line}"),
    "grep -n": each("{n}:{line}"),
    "grep -h, context": each("{n}-{line}"),
    "tail -f of files": lambda lines: ["==> serve.log <==", *lines],
    "quoted": each("> {line}"),
    "Markdown": lambda lines: ["```", *lines, "```"],
    "blank lines": each("{line}\n"),
    "hard blanks": lambda lines: [line.replace(", ", ",\xa0") for line in lines],
    "padded": each("{line}      "),
    "prompts of a shell": lambda lines: [
        "root@n:/# docker logs vllm | tail -4",
        *lines,
        "root@n:/#",
    ],
    "accesses": lambda lines: [
        part
        for line in lines
        for part in ('INFO:     1.2.3.4:5 - "POST /v1/completions" 200 OK', line)
    ],
    "a progress bar": lambda lines: [f"Loading: 100%|####| 4/4\r{line}" for line in lines],
    "broken bytes elsewhere": lambda lines: ["caf\udce9", *lines],
}
BYTES: dict[str, Callable[[str], bytes]] = {
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "BOM": lambda text: text.encode("utf-8-sig"),
    "UTF-16 of PowerShell": lambda text: text.encode("utf-16"),
    "gzip": lambda text: gzipped(text.encode()),
    "bzip2": lambda text: bz2.compress(text.encode()),
    "xz": lambda text: lzma.compress(text.encode()),
}
FOLDS: dict[str, Callable[[Lines], Lines]] = {
    "80 columns": lambda lines: folded(lines, 80),
    "61 columns": lambda lines: folded(lines, 61),
    "at blanks": folded_at_blanks,
}
LOGS = {"vllm": vllm_log(), "sglang": sglang_log(), "llamacpp": llamacpp_log()}
COUNTED = {
    "vllm": {
        "num_rounds": 12,
        "num_accepted_tokens": 16,
        "marginal_prob": [8 / 12, 5 / 12, 3 / 12],
    },
    "sglang": {"num_intervals": 3, "num_draft_tokens_per_round": 3},
    "llamacpp": {"num_rounds": 27, "num_accepted_tokens": 59, "num_draft_tokens": 80},
}


def same(engine: str, content: str | bytes) -> dict[str, Any]:
    found, bare = imported(content), imported("\n".join(LOGS[engine]))
    assert found["engine"] == engine
    names = {*COUNTED[engine], "mean_acceptance_length_range", "mean_of_interval_means", "settings"}
    assert {n: found.get(n) for n in names} == {n: bare.get(n) for n in names}
    assert COUNTED[engine].items() <= found.items()
    assert not found["left_out"]
    return found


@pytest.mark.parametrize("engine", LOGS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_log_in_a_wrapper(engine: str, wrapper: str) -> None:
    text = "\n".join(WRAPPERS[wrapper](LOGS[engine])) + "\n"
    same(engine, text.encode(errors="surrogateescape"))


@pytest.mark.parametrize("engine", LOGS)
@pytest.mark.parametrize("form", BYTES)
def test_a_log_in_other_bytes(engine: str, form: str) -> None:
    same(engine, BYTES[form]("\n".join(LOGS[engine]) + "\n"))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("fold", FOLDS)
def test_folded_lines_are_joined(engine: str, fold: str) -> None:
    lines = [
        line for line in LOGS[engine] if "Avg prompt" not in line and "server_args" not in line
    ]
    found, bare = figures("\n".join(FOLDS[fold](lines))), figures("\n".join(lines))
    for name in ("num_rounds", "marginal_prob", "mean_of_interval_means"):
        assert found.get(name) == bare.get(name)


def test_two_interleaved_streams_of_parts() -> None:
    own = parts(vllm_log(), 48, Z + " stderr P {line}", Z + " stderr F {line}")
    other = parts(
        ["GET /health 200 OK, which is a long line of an access log"] * 60,
        20,
        Z + " stdout P {line}",
        Z + " stdout F {line}",
    )
    mixed = [line for pair in zip(own, other[: len(own)], strict=False) for line in pair]
    assert figures("\n".join(mixed))["num_rounds"] == 12


def test_parts_whose_rest_grep_left_out() -> None:
    own = parts(vllm_log(), 150, Z + " stderr P {line}", Z + " stderr F {line}")
    begun = [line for line in own if "SpecDecoding" in line]
    assert "is cut off or split: its end is missing, like 2 more" in refused("\n".join(begun))


@pytest.mark.parametrize(
    ("before", "process", "time"),
    [
        ("(APIServer pid=7) INFO 11-24 05:00:10 [m.py:1] ", "APIServer pid=7", "11-24 05:00:10"),
        ("INFO 11-24 05:00:10 [metrics.py:120] ", "", "11-24 05:00:10"),
        ("(ApiServer_1 pid=9) INFO 11-24 05:00:10 ", "ApiServer_1 pid=9", "11-24 05:00:10"),
        ("[2026-11-25 07:00:05 DP1 TP0] ", "DP1 TP0", "2026-11-25 07:00:05"),
        ("[2026-11-25 07:00:05.123 TP0] ", "TP0", "2026-11-25 07:00:05"),
        (
            "(E pid=3, ip=10.0.0.7) [2026-11-25 07:00:05] ",
            "E pid=3, ip=10.0.0.7",
            "2026-11-25 07:00:05",
        ),
        ("[pod/v-0/main] (APIServer pid=1) INFO ", "v-0/main APIServer pid=1", ""),
        ("vllm-7d9f8b-abcde server (APIServer pid=1) ", "vllm-7d9f8b-abcde APIServer pid=1", ""),
        ("vllm-1  | ", "vllm-1", ""),
        ("Sep 22 09:34:10 node7 vllm[42]: ", "vllm[42]", "Sep 22 09:34:10"),
        (Z + " stderr F (A pid=1) ", "A pid=1", Z),
    ],
)
def test_process_and_time(before: str, process: str, time: str) -> None:
    line = f"{before}{vllm_figures((1, 2))}\n"
    [found] = engine_lines(Source("log", line.encode()))
    assert (found.process, found.time) == (process, time)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"PAR1rest", "is no text: it is a Parquet file; give the server's log or metrics"),
        (gzipped(b"a line\n" * 99)[:-20], "is compressed, and ends early or is damaged; copy it"),
        (gzipped(b"a line\n" * 99)[:30] + b"\xff" * 30, "is compressed, and ends early or is dam"),
        (b"", "is empty; give the log of a server"),
        (b"\n \n", "is empty"),
    ],
)
def test_files_that_are_no_text(content: bytes, says: str) -> None:
    assert says in refused(content)


def test_a_missing_file(tmp_path: Path) -> None:
    assert "cannot be read: no such file or folder; check the path" in refused(tmp_path / "a.log")
    assert "a folder" in refused(tmp_path)


@pytest.mark.parametrize("engine", LOGS)
@pytest.mark.parametrize(
    "echo",
    [
        "INFO 11-24 05:00:00 [logger.py:67] Received request cmpl-1: prompt: 'why is {}', x: 1",
        "[2026-11-25 07:00:01] Receive: obj=GenerateReqInput(rid='1', text='why is {}')",
        '{{"messages": [{{"role": "user", "content": "why is {}"}}], "stream": true}}',
    ],
)
def test_a_request_that_quotes_a_log_is_no_line_of_it(engine: str, echo: str) -> None:
    quoted = [echo.format(line) for line in LOGS[engine]]
    same(engine, "\n".join([*quoted, *LOGS[engine]]))


def test_joined_lines_are_read_apart() -> None:
    """Two processes that write at once may lose a line end."""
    first, second = (f"(A pid={n}) INFO 11-24 05:00:10 {vllm_figures(ROUNDS[n])}" for n in (0, 1))
    assert figures(first + second)["num_rounds"] == len(ROUNDS[0]) + len(ROUNDS[1])


def test_lines_printed_twice_count_once() -> None:
    """A logger with two handlers, and a file joined twice; engines may print the same at once."""
    lines = vllm_log()
    for doubled in ([one for line in lines for one in (line, line)], lines * 2):
        found = imported("\n".join(doubled))
        assert found["num_rounds"] == 12
        assert [one["lines"] for one in found["left_out"]] == [3]
    both: Sequence[str] = [
        line.replace("Engine 000", f"Engine {n:03d}") for n in (0, 1) for line in lines
    ]
    assert figures("\n".join(both))["num_rounds"] == 24
