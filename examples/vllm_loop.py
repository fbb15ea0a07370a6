#!/usr/bin/env python3
"""The loop with vLLM: log what its drafter would offer, choose, serve the choice.

    python examples/vllm_loop.py                       the packaged pair; vLLM's CPU build will do
    python examples/vllm_loop.py TARGET DRAFTER        your models, on packaged prompts

Options of your own for vLLM go into VLLM_OPTIONS, e.g. "--max-model-len 4096". With a server that
is running anyway, do step 1, restart it with what is printed, and let your users do step 2.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from serving import need_vllm, specctl, vllm

from specctl.embedded import PROMPTS, embedded_path

OUT = Path(os.environ.get("OUT") or tempfile.mkdtemp())
NUM_PROMPTS = int(os.environ.get("NUM_PROMPTS", 32))
target, drafter = sys.argv[1:] or (str(embedded_path("target")), "embedded")
need_vllm(otherwise=", or log with `specctl collect --dense` instead")

# 1. A dense log: behind every token 5 draft tokens are noted and none verified. The export prints
# the command that is run below; its files hold the drafter's settings and the plugin's.
pair, log = ("--target", target, "--drafter", drafter), ("--trace", OUT / "traces", "--dense")
specctl("export", "chain:5", "--to", "vllm", *pair, *log, "-o", OUT / "log")

# 2. Serve it, and send prompts from eight clients.
rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
chat = [row for row in rows if not row.get("raw")]  # the others are texts to continue
prompts = [chat[i * len(chat) // NUM_PROMPTS] for i in range(NUM_PROMPTS)]
with vllm(OUT / "log", target, OUT / "vllm.log") as ask:
    texts = ask(prompts)
print(f"vLLM served {len(texts)} prompts; the first answer begins {texts[0][:40]!r}")
specctl("show", OUT / "traces")

# 3. Choose among what vLLM runs. Its own clock is better: docs/vllm.md, `profile --from`. A clock
# from a busy machine fails its own check (exit 11): no verdict rests on it without --force.
few = ("--quick", "--batch-sizes", "1,8", "--contexts", 64, "--widths", "1,4")
clock = ("--verified-tokens", "1,8", *pair, "-o", OUT / "cost.json")
force = ("--force",) if specctl("profile", *few, *clock, allow=(11,)) else ()
load = ("--for", "vllm", "--batch-size", 8, "--cost-model", OUT / "cost.json", *force)
families = ("--family", "confidence", "--held-out", 0.5)
specctl("tune", OUT / "traces", *load, *families, "-o", OUT / "tuned")

# 4. Serve the choice: the last lines are the command to start vLLM with.
specctl("export", OUT / "tuned" / "tune.json", "--to", "vllm", "-o", OUT / "serve")
