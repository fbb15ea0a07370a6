#!/usr/bin/env python3
"""A policy that keeps up with its traffic: vLLM serves an alias, the traffic changes, an alarm
rings, the policy is fitted again, the alias is moved. The server runs on all the while.

    python examples/drift_loop.py          the packaged pair; vLLM's CPU build will do

In earnest the first half runs once, `specctl drift` from cron, and `specctl recalibrate` when it
exits with 9. Options of your own for vLLM go into VLLM_OPTIONS. CLOCK is the cost model to tune
for: by default a large accelerator's, as the steps of this pair on a CPU say little.
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from serving import NUM_TOKENS, need_vllm, specctl, vllm

from specctl.embedded import PROMPTS, embedded_path

OUT = Path(os.environ.get("OUT") or tempfile.mkdtemp())
NAME, ALARM, MOST_DRAFTS = "embedded+eagle3@cpu:demo", 9, 8
DEPLOYED = f"{OUT}/registry/{NAME}@prod"
target = str(embedded_path("target"))
load = ("--for", "vllm", "--batch-size", 8, "--held-out", 0.5)
load += ("--cost-model", os.environ.get("CLOCK", "line"))
need_vllm(otherwise="")

# The traffic: texts to continue, later questions with short answers, each in any order.
rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
random.Random(0).shuffle(rows)
usual = [row for row in rows if row["category"] in ("code", "prose")]
changed = [row for row in rows if row["category"] in ("arithmetic", "strings")]


def log_densely(kind, prompts):
    """A dense log by specctl's own loop, as a replica of the server would make it."""
    given, traces = OUT / f"{kind}.jsonl", OUT / f"dense-{kind}"
    given.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    chains = ("--dense", "--children", 1, "--depth", MOST_DRAFTS, "--max-new-tokens", NUM_TOKENS)
    specctl("collect", given, *chains, "--batch-size", 8, "-o", traces)
    return traces


def is_alarm():
    """Runs `specctl drift` as cron would."""
    time.sleep(1)  # the last rows are written
    watched = ("drift", OUT / "live", "--policy", DEPLOYED, "--reference-prompts", 40)
    return specctl(*watched, "-o", OUT / "drift", allow=(ALARM,)) == ALARM


# 1. Choose a policy for the usual traffic, and publish it under the alias `prod`.
specctl("tune", log_densely("usual", usual[:40]), *load, "-o", OUT / "first")
specctl("registry", "init", "--registry", OUT / "registry")
publish = (OUT / "first" / "policy", NAME, "--alias", "prod", "--registry", OUT / "registry")
specctl("registry", "push", *publish)

# 2. Serve whatever `prod` means, with room for longer drafts, and log the rounds.
log = ("--trace", OUT / "live", "--max-draft-tokens", MOST_DRAFTS)
specctl("export", DEPLOYED, "--to", "vllm", "--target", target, *log, "-o", OUT / "serve")
said = OUT / "vllm.log"
with vllm(OUT / "serve", target, said) as ask:
    # 3. While the traffic is the usual one the alarm keeps quiet, however often one looks.
    for part in (usual[:60], usual[60:]):
        ask(part)
        if is_alarm():
            sys.exit("a false alarm: one in twenty watches may have one")

    # 4. It changes, and the alarm rings within tens of prompts.
    num_changed = 0
    while not is_alarm():
        ask(changed[num_changed : num_changed + 10])
        num_changed += 10
    before = ask(changed[:40])

    # 5. Fit again on recent prompts. What is better takes the alias; vLLM takes it up within 5 s.
    recent = log_densely("recent", changed[:80])
    promote = ("--promote", f"{NAME}@prod", "--registry", OUT / "registry")
    specctl("recalibrate", recent, "--policy", DEPLOYED, *load, *promote, "-o", OUT / "again")
    better = json.loads((OUT / "again" / "recalibration.json").read_text())["is_better"]
    while better and "policy reloaded" not in said.read_text():
        time.sleep(0.5)

    # 6. The same prompts get the same texts, in fewer calls of the target.
    after = ask(changed[:40])
print(f"{sum(map(str.__eq__, before, after))} of {len(after)} texts are the same as before")
specctl("registry", "log", NAME, "--registry", OUT / "registry")
