#!/usr/bin/env python3
"""The loop with vLLM: log what its drafter would offer, choose, serve the choice.

    python examples/vllm_loop.py                       the packaged pair; vLLM's CPU build will do
    python examples/vllm_loop.py TARGET DRAFTER        your models, on packaged prompts

Options of your own for vLLM go into VLLM_OPTIONS, e.g. "--max-model-len 4096". With a server that
is running anyway, do step 1, restart it with what is printed, and let your users do step 2.
"""

import importlib.util
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from specctl.embedded import PROMPTS, embedded_path

OUT = Path(os.environ.get("OUT") or tempfile.mkdtemp())
NUM_PROMPTS, NUM_TOKENS = int(os.environ.get("NUM_PROMPTS", 32)), 32
target, drafter = sys.argv[1:] or (str(embedded_path("target")), "embedded")

if importlib.util.find_spec("vllm") is None:
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
pair, log = ("--target", target, "--drafter", drafter), ("--trace", OUT / "traces", "--dense")
specctl("export", "chain:num_draft_tokens=5", "--to", "vllm", *pair, *log, "-o", OUT / "log")

# 2. Serve it, by the module behind `vllm serve`, which the CPU build lacks, and send prompts from
# eight clients.
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{probe.getsockname()[1]}"
options = {
    "--model": target,
    "--served-model-name": "target",
    "--port": url.rpartition(":")[2],
    "--speculative-config": (OUT / "log" / "speculative-config.json").read_text(),
    "--shutdown-timeout": "10",  # as printed; else the log's last second is lost
}
command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--no-async-scheduling"]
command += [word for option in options.items() for word in option]
command += shlex.split(os.environ.get("VLLM_OPTIONS", ""))
plugin = {"SPECCTL_VLLM": str(OUT / "log" / "specctl-vllm.json"), "VLLM_USE_V2_MODEL_RUNNER": "0"}


def ask(prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    body = {"model": "target", "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def is_up() -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    except OSError:
        return False


rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
chat = [row["prompt"] for row in rows if not row.get("raw")]  # the others are texts to continue
prompts = [chat[i * len(chat) // NUM_PROMPTS] for i in range(NUM_PROMPTS)]
said = OUT / "vllm.log"
with said.open("w") as out:
    server = subprocess.Popen(command, env={**os.environ, **plugin}, stdout=out, stderr=out)
try:
    while not is_up():
        if server.poll() is not None:
            sys.exit(f"vLLM ended; the end of {said}:\n{said.read_text()[-2000:]}")
        time.sleep(0.5)
    with ThreadPoolExecutor(8) as clients:
        texts = list(clients.map(ask, prompts))
finally:
    server.terminate()
    server.wait()
print(f"vLLM served {len(texts)} prompts; the first answer begins {texts[0][:40]!r}")
specctl("show", OUT / "traces")

# 3. Choose among what vLLM runs. Its own clock is better: docs/vllm.md, `profile --from`.
few = ("--quick", "--batch-sizes", "1,8", "--contexts", 64, "--widths", "1,4")
specctl("profile", *few, "--verified-tokens", "1,8", *pair, "-o", OUT / "cost.json")
load = ("--for", "vllm", "--batch-size", 8, "--cost-model", OUT / "cost.json")
families = ("--family", "confidence", "--held-out", 0.5)
specctl("tune", OUT / "traces", *load, *families, "-o", OUT / "tuned")

# 4. Serve the choice: the last lines are the command to start vLLM with.
specctl("export", OUT / "tuned" / "tune.json", "--to", "vllm", "-o", OUT / "serve")
