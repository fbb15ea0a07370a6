"""vLLM as the examples start it: with what `specctl export` wrote, and clients that ask it."""

import importlib.util
import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

NUM_TOKENS, NUM_CLIENTS = 32, 8


def need_vllm(otherwise):
    """Ends the example where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        sys.exit(
            "vllm is not installed here: install vLLM 0.32.0 or 0.33.0 beside specctl "
            f"(`make engines` sets up its CPU build in .venv-engines){otherwise}"
        )


def specctl(*words, allow=()):
    """Runs a command as one would type it; a refusal ends the example with its exit code."""
    print("$ specctl", *words, flush=True)
    code = subprocess.call(["specctl", *map(str, words)])
    if code and code not in allow:
        sys.exit(code)
    return code


@contextmanager
def vllm(exported, target, said):
    """Starts a server with the files of an export, by the module behind `vllm serve`, which the CPU
    build lacks, and writes what it says to `said`. Gives a function by which eight clients send
    rows of a prompt file; its texts are in their order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    options = {
        "--model": target,
        "--served-model-name": "target",
        "--port": url.rpartition(":")[2],
        "--speculative-config": (exported / "speculative-config.json").read_text(),
        "--shutdown-timeout": "10",  # as printed; else the log's last second is lost
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--no-async-scheduling"]
    command += [word for option in options.items() for word in option]
    command += shlex.split(os.environ.get("VLLM_OPTIONS", ""))
    plugin = {"SPECCTL_VLLM": str(exported / "specctl-vllm.json"), "VLLM_USE_V2_MODEL_RUNNER": "0"}
    with said.open("w") as out:
        server = subprocess.Popen(command, env={**os.environ, **plugin}, stdout=out, stderr=out)

    def is_up():
        try:
            return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
        except OSError:
            return False

    def ask(row):
        text, body = row["prompt"], {"model": "target", "max_tokens": NUM_TOKENS, "temperature": 0}
        if row.get("raw"):  # a text to continue
            path, body = "completions", {**body, "prompt": text}
        else:
            path = "chat/completions"
            body["messages"] = [{"role": "user", "content": text}]
        request = urllib.request.Request(f"{url}/v1/{path}", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=600) as answer:
            choice = json.load(answer)["choices"][0]
        return choice["text"] if row.get("raw") else choice["message"]["content"]

    def ask_all(prompts):
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            return list(clients.map(ask, prompts))

    try:
        while not is_up():
            if server.poll() is not None:
                sys.exit(f"vLLM ended; the end of {said}:\n{said.read_text()[-2000:]}")
            time.sleep(0.5)
        yield ask_all
    finally:
        server.terminate()
        server.wait()
