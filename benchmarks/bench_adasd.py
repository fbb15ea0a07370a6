"""AdaSD live: its two parts, alone and together, beside tuned chains and a confidence stop.

For each drafter three quarters of the prompts with checkable answers are decoded under every
policy; texts and answers are paired with those of strict verification. Costs are in target
forwards, a drafted level counting `--draft-cost` of one; wall time of a shared CPU says nothing
here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import parser, report

from specctl.collect.prompts import load_prompts
from specctl.policy import Chain, EntropyStop, JensenShannon, Policy, SignalStop
from specctl.policy.adasd import JensenShannonRule
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import load_pair
from specctl.runtime.requests import Sampling
from specctl.stats import split_prompts
from specctl.train.paired import Answers, Plan, RunFolder, compare_answers, run_prompts

WINDOW = 20
DRAFTERS = {"small": "embedded:small", "EAGLE-3 head": "embedded"}
BASELINE = "chain 5 (the paper's)"
TUNED = {"small": (3, 0.5), "EAGLE-3 head": (5, 0.5)}
"""Length of a chain and bar of confidence: best by replay of the prompts that are not judged."""


def policies_of(drafter: str) -> dict[str, Policy]:
    """Rivals, then AdaSD in the order of the paper's tables."""
    length, least = TUNED[drafter]
    tuned = Chain(num_draft_tokens=length)
    confident = SignalStop(signal="confidence", threshold=least, window=WINDOW)
    paper = EntropyStop(window=WINDOW, between="rejected", min_samples=1)
    five = Chain(num_draft_tokens=5)

    def relaxed(shape: Any, **fields: Any) -> Policy:
        return Policy(shape=shape, acceptance=JensenShannon(**fields))

    return {
        BASELINE: Policy(shape=five),
        f"chain {length} (tuned)": Policy(shape=tuned),
        f"confidence {least:g} (tuned)": Policy(shape=confident),
        "gen-only (paper, from the first rejection)": Policy(shape=paper),
        "gen-only (settled, 8 samples)": Policy(shape=EntropyStop(window=WINDOW)),
        "verify-only (paper)": relaxed(five, min_samples=1),
        "AdaSD (paper)": relaxed(paper, min_samples=1),
        "AdaSD (settled, 8 samples)": relaxed(EntropyStop(window=WINDOW)),
        **{
            f"AdaSD (paper, variant {name})": relaxed(paper, min_samples=1, variant=name)
            for name in "ABC"
        },
    }


@contextmanager
def thresholds_seen() -> Any:
    """Every acceptance threshold that a round was judged by, from enough samples on."""
    seen: list[float] = []
    own = JensenShannonRule.threshold

    def watched(self: JensenShannonRule, memory: torch.Tensor) -> torch.Tensor:
        found = own(self, memory)
        seen.extend(value for value in found.tolist() if value)
        return found

    JensenShannonRule.threshold = watched
    try:
        yield seen
    finally:
        JensenShannonRule.threshold = own


def row_of(
    name: str, strict: Answers, answers: Answers, draft_cost: float, seen: Sequence[float]
) -> dict[str, Any]:
    compared = compare_answers(strict, answers)
    calls, levels = (
        sum(getattr(a, n) for a in answers.values()) for n in ("calls", "drafted_levels")
    )
    tokens = sum(len(a.token_ids) - 1 for a in answers.values())
    per_token = (calls + draft_cost * levels) / tokens
    base = sum(a.calls + draft_cost * a.drafted_levels for a in strict.values())
    base /= sum(len(a.token_ids) - 1 for a in strict.values())
    return {
        "system": name,
        "calls": calls,
        "tokens/call": tokens / calls,
        "drafted/call": levels / calls,
        "accepted/drafted": (tokens / calls - 1) / (levels / calls),
        "cost/token": per_token,
        "x chain 5": base / per_token,
        "threshold": sum(seen) / len(seen) if seen else None,
        "relaxed/100": compared.relaxed_per_100,
        "changed": compared.diverged.value,
        "accuracy": compared.accuracy,
        "difference": compared.difference.text(".3f"),
        "lost": compared.lost,
        "gained": compared.gained,
    }


def finished(place: Path) -> dict[str, dict[str, Any]]:
    """Rows of an earlier run that was interrupted, by policy."""
    if not place.exists():
        return {}
    rows = (json.loads(line) for line in place.read_text("utf-8").splitlines())
    return {row["system"]: row for row in rows}


def rows_for(drafter: str, options: Any, work: Path) -> tuple[list[dict[str, Any]], int]:
    pair = load_pair("embedded", DRAFTERS[drafter], device=options.device, dtype=options.dtype)
    prompts = load_prompts(options.prompts)
    split = split_prompts([p.prompt_id for p in prompts], held_out_frac=0.25, seed=1)
    judged = [p for p in prompts if p.prompt_id in set(split.train) and p.answer is not None]
    settings = DecodeSettings(options.max_new_tokens, Sampling(options.temperature))
    plan = Plan(judged, settings, batch_size=8)
    folder = RunFolder.open(work / "runs", plan.header(pair.fingerprint), resume=True)
    done, strict = finished(work / "rows.jsonl"), None
    for name, policy in policies_of(drafter).items():
        with thresholds_seen() as seen:
            answers = run_prompts(pair, policy, plan, folder)
        strict = strict or answers
        if name not in done:
            row = row_of(name, strict, answers, options.draft_cost, seen)
            done[name] = {"drafter": drafter, **row}
            with (work / "rows.jsonl").open("a") as file:
                file.write(json.dumps(done[name]) + "\n")
    return [done[name] for name in policies_of(drafter)], len(judged)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--draft-cost", type=float, default=0.1, help="of a target forward")
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--name", default="adasd")
    options.add_argument("--drafters", nargs="*", choices=DRAFTERS, help="default: all")
    options.add_argument("--work", type=Path, required=True, help="keeps answers, rows")
    options.set_defaults(max_new_tokens=128)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    rows: list[dict[str, Any]] = []
    for drafter in given.drafters or DRAFTERS:
        found, num_prompts = rows_for(drafter, given, given.work / drafter.replace(" ", "-"))
        rows += found
    note = (
        f"AdaSD on the embedded pair (a fixture, no claim about large models): {num_prompts} "
        f"held-out prompts with checkable answers, {given.max_new_tokens} new tokens, temperature "
        f"{given.temperature:g}; costs in target forwards, a drafted level {given.draft_cost:g}"
    )
    report(given.name, rows, given, note)


if __name__ == "__main__":
    main()
