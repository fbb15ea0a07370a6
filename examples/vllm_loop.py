#!/usr/bin/env python3
"""The loop with vLLM: log what its drafter would offer, choose, serve the choice.

    python examples/vllm_loop.py                       the packaged pair; vLLM's CPU build will do
    python examples/vllm_loop.py TARGET DRAFTER        your models, 32 of the packaged prompts

Options of your own for `vllm serve` go into VLLM_OPTIONS, e.g. "--max-model-len 4096". With a
server that is running anyway, do step 1, restart it as printed, and let your users send step 2.
"""

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from specctl.embedded import PROMPTS, embedded_path

OUT = Path(os.environ.get("OUT") or tempfile.mkdtemp())
NUM_PROMPTS, NUM_TOKENS = int(os.environ.get("NUM_PROMPTS", 32)), 32
target, drafter = sys.argv[1:] or (str(embedded_path("target")), "embedded")

if find_spec("vllm") is None:
    sys.exit(
        "vllm is not installed here: install vLLM 0.32.0 beside specctl (`make engines` sets up "
        "its CPU build in .venv-engines), or log with `specctl collect --dense` instead"
    )


def specctl(*words: object) -> None:
    """Runs a command as one would type it; a refusal ends the example with its exit code."""
    print("$ specctl", *words, flush=True)
    if code := subprocess.call(["specctl", *map(str, words)]):
        sys.exit(code)


# 1. A dense log: behind every token 5 draft tokens are noted and none verified. The export prints
# the command that is run below; its files hold the drafter's settings and the plugin's.
plan, served_by = "chain:num_draft_tokens=5", ("--to", "vllm", "--target", target)
specctl(
    "export",
    plan,
    *served_by,
    "--drafter",
    drafter,
    "--trace",
    OUT / "traces",
    "--dense",
    "-o",
    OUT / "log",
)

# 2. Serve, as vLLM's users do, and send prompts from eight clients.
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{probe.getsockname()[1]}"
# What `vllm serve` runs; that command itself does not start in the CPU build of another name.
command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", target]
command += ["--served-model-name", "target", "--port", url.rpartition(":")[2]]
command += ["--speculative-config", (OUT / "log" / "speculative-config.json").read_text()]
command += ["--no-async-scheduling", "--shutdown-timeout", "10"]  # as the export prints
command += shlex.split(os.environ.get("VLLM_OPTIONS", ""))
plugin = {"SPECCTL_VLLM": str(OUT / "log" / "specctl-vllm.json"), "VLLM_USE_V2_MODEL_RUNNER": "0"}


def ask(row: dict) -> str:
    """The server's text for a prompt: an answer in a chat, or of raw text its continuation."""
    if row.get("raw"):
        route, asked = "completions", {"prompt": row["prompt"]}
    else:
        asked = {"messages": [{"role": "user", "content": row["prompt"]}]}
        route = "chat/completions"
    body = {"model": "target", "max_tokens": NUM_TOKENS, "temperature": 0, **asked}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/{route}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        [choice] = json.load(answer)["choices"]
    return choice["text"] if row.get("raw") else choice["message"]["content"]


def is_up() -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    except OSError:
        return False


every = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
prompts = every[:: len(every) // NUM_PROMPTS][:NUM_PROMPTS]
with (OUT / "vllm.log").open("w") as log:
    server = subprocess.Popen(command, env={**os.environ, **plugin}, stdout=log, stderr=log)
try:
    while not is_up():
        if server.poll() is not None:
            sys.exit(
                f"vLLM ended; the end of {OUT / 'vllm.log'}:\n{Path(log.name).read_text()[-2000:]}"
            )
        time.sleep(0.5)
    with ThreadPoolExecutor(8) as clients:
        texts = list(clients.map(ask, prompts))
finally:
    server.terminate()  # the log's last rows are written as it ends
    server.wait()
print(f"vLLM served {len(texts)} prompts; the first answer begins {texts[0][:40]!r}")
specctl("show", OUT / "traces")

# 3. Choose among what vLLM runs. Its own clock is better: docs/vllm.md, `profile --from`.
specctl(
    "profile",
    "--quick",
    "--batch-sizes",
    "1,8",
    "--contexts",
    64,
    "--verified-tokens",
    "1,8",
    "--widths",
    "1,4",
    "--target",
    target,
    "--drafter",
    drafter,
    "-o",
    OUT / "cost.json",
)
specctl(
    "tune",
    OUT / "traces",
    "--for",
    "vllm",
    "--cost-model",
    OUT / "cost.json",
    "--batch-size",
    8,
    "--held-out",
    0.5,
    "--family",
    "confidence",
    "-o",
    OUT / "tuned",
)

# 4. Serve the choice: the last lines are the command to start vLLM with.
specctl("export", OUT / "tuned" / "tune.json", "--to", "vllm", "-o", OUT / "serve")
