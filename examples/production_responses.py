#!/usr/bin/env python3
"""A production log: what would drafting have done on texts that were already served?

    python examples/production_responses.py                       the packaged pair, half a minute
    python examples/production_responses.py LOG TARGET DRAFTER    your log of chat completions

LOG is JSON lines of {"request": ..., "response": ...} in the shape of OpenAI's chat completions, as
proxies and servers log them. Nothing is generated: the drafter drafts along the texts that users
got. Lossless drafting never changes a text, so its calls and accepted tokens follow exactly.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from specctl.embedded import PROMPTS

OUT = Path(os.environ.get("OUT") or tempfile.mkdtemp())
NUM_PROMPTS, NUM_TOKENS = os.environ.get("NUM_PROMPTS", "16"), os.environ.get("NUM_TOKENS", "32")


def specctl(*words: object) -> None:
    """Runs a command as one would type it; a refusal ends the example with its exit code."""
    print("$ specctl", *words, flush=True)
    if code := subprocess.call(["specctl", *map(str, words)]):
        sys.exit(code)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def stand_in() -> Path:
    """A log for those who have none: texts of the packaged pair, in the shape above."""
    chat = [row for row in lines_of(PROMPTS) if not row.get("raw")]
    (OUT / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    words = ("--limit", NUM_PROMPTS, "--max-new-tokens", NUM_TOKENS, "-o", OUT / "served")
    specctl("run", OUT / "prompts.jsonl", "--compare", "chain", *words)
    questions = {row["id"]: row["prompt"] for row in chat}
    with (OUT / "log.jsonl").open("w") as stream:
        for served in lines_of(OUT / "served" / "chain.jsonl"):
            asked = {"role": "user", "content": questions[served["prompt_id"]]}
            reply = {"role": "assistant", "content": served["texts"][0]}
            ended = "stop" if served["finish_reasons"] == ["eos"] else "length"
            choice = {"message": reply, "finish_reason": ended}
            record = {"request": {"messages": [asked]}, "response": {"choices": [choice]}}
            print(json.dumps(record), file=stream)
    return OUT / "log.jsonl"


def converted(record: dict) -> dict | None:
    """A record as specctl reads it: the user's turns, and the text that answered each.

    None where a system message steers the texts: files of prompts have no place for it.
    """
    [choice] = record["response"]["choices"]
    messages = [*record["request"]["messages"], choice["message"]]
    roles = [message["role"] for message in messages]
    if roles != ["user", "assistant"] * (len(messages) // 2):
        return None
    texts = [message["content"] for message in messages]
    return {"turns": texts[::2], "response": texts[1::2], "eos": choice["finish_reason"] == "stop"}


log, target, drafter = sys.argv[1:] or (stand_in(), "embedded", "embedded")
records = [converted(record) for record in lines_of(Path(log))]
kept = [record for record in records if record]
print(f"{len(kept)} of {len(records)} records have user and assistant turns alone")

# One file is both: its turns are the prompts, its responses the texts to draft along.
both = OUT / "responses.jsonl"
both.write_text("".join(json.dumps(record) + "\n" for record in kept))
models = ("--target", target, "--drafter", drafter)
trees = ("--dense", "--depth", 6, "--children", 4)  # what may be replayed: depth 6, 4 children
load = ("--batch-size", 4, "--max-new-tokens", NUM_TOKENS)
specctl("collect", both, "--responses", both, *models, *trees, *load, "-o", OUT / "traces")

chains = ("-p", "chain:2", "-p", "chain:5")
specctl("replay", OUT / "traces", "-p", "ar", *chains, "-p", "eagle2:depth=4:top_k=4:num_tokens=16")
print(f"The log is {OUT / 'traces'}; `specctl tune` finds the fastest setting on it.")
