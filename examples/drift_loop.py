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


def is_alarm(*reference):
    """Runs `specctl drift` as cron would."""
    time.sleep(1)  # the last rows are written
    compared = reference or ("--reference-prompts", 25)
    watched = ("drift", OUT / "live", "--policy", DEPLOYED, *compared, "-o", OUT / "drift")
    return specctl(*watched, allow=(ALARM,)) == ALARM


# 1. Choose a policy for the usual traffic on a dense log, which specctl's own loop makes here
# (docs/vllm.md has vLLM make it), and publish it under the alias `prod`.
(OUT / "usual.jsonl").write_text("".join(json.dumps(row) + "\n" for row in usual[:40]))
chains = ("--dense", "--children", 1, "--depth", MOST_DRAFTS, "--max-new-tokens", NUM_TOKENS)
specctl("collect", OUT / "usual.jsonl", *chains, "--batch-size", 8, "-o", OUT / "usual")
specctl("tune", OUT / "usual", *load, "-o", OUT / "first")
publish = ("--registry", OUT / "registry")
specctl("registry", "init", *publish)
specctl("registry", "push", OUT / "first" / "policy", NAME, "--alias", "prod", *publish)

# 2. Serve whatever `prod` means, with room for longer drafts. Log the rounds, and one request in
# three densely, into live-dense; with more traffic one in a hundred will do.
log = ("--trace", OUT / "live", "--dense-every", 3, "--max-draft-tokens", MOST_DRAFTS)
specctl("export", DEPLOYED, "--to", "vllm", "--target", target, *log, "-o", OUT / "serve")
said = OUT / "vllm.log"
with vllm(OUT / "serve", target, said) as ask:
    # 3. While the traffic is the usual one the alarm keeps quiet, however often one looks.
    for part in (usual[:60], usual[60:]):
        ask(part)
        if is_alarm():
            sys.exit("a false alarm: one in twenty watches may have one")

    # 4. It changes, and the alarm rings within tens of prompts. Traffic goes on.
    num_changed = 0
    while not is_alarm():
        ask(changed[num_changed : num_changed + 15])
        num_changed += 15
    before = ask(changed)

    # 5. Search again on what was logged densely since the change. What is better takes the alias,
    # and vLLM takes it up within 5 s.
    drift = json.loads((OUT / "drift" / "drift.json").read_text())
    recent = f"{OUT}/live-dense@{drift['signals'][0]['since']['finished']}"
    promote = ("--promote", f"{NAME}@prod", *publish)
    specctl("recalibrate", recent, "--policy", DEPLOYED, *load, *promote, "-o", OUT / "again")
    if not json.loads((OUT / "again" / "recalibration.json").read_text())["is_better"]:
        sys.exit("the deployed policy is still as good as any")
    while said.read_text().count("policy reloaded") < 2:  # the first is that of the start
        ask(changed[:8])

    # 6. The same prompts get the same texts, in fewer calls of the target. The new watch has the
    # prompts that the new policy was chosen on as reference.
    after = ask(changed)
    is_alarm("--reference", recent)
print(f"{sum(map(str.__eq__, before, after))} of {len(after)} texts are the same as before")
specctl("registry", "log", NAME, *publish)
