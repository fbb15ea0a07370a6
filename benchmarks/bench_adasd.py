"""AdaSD live: its two parts, alone and together, beside tuned chains and a confidence stop.

For each drafter a quarter of the prompts, all categories, is collected as dense chains: on them the
chain length and the confidence are tuned and `fit adasd` measures its warm start. The others with
checkable answers are decoded under every policy; texts and answers are paired with those of strict
verification. Costs are in target forwards, a drafted level counting `--draft-cost` of one; wall
time of a shared CPU says nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import parser, report

from specctl.collect.dense import collect_dense
from specctl.collect.prompts import Prompt, load_prompts
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, read_chains
from specctl.policy import Chain, EntropyStop, FullTree, JensenShannon, Policy, SignalStop
from specctl.policy.adasd import JensenShannonRule
from specctl.replay.fit_inputs import DISTANCE, prompt_costs, target_steps, tokens_tested
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import load_pair
from specctl.runtime.requests import Sampling
from specctl.stats import split_prompts
from specctl.train.adasd import StopFit, fit_stop
from specctl.train.configs import AdasdConfig
from specctl.train.paired import Answers, Plan, RunFolder, compare_answers, run_prompts

WINDOW = 20
DRAFTERS = {"small": "embedded:small", "EAGLE-3 head": "embedded"}
BASELINE = "chain 5 (the paper's)"


def fitted(pair: Any, prompts: Sequence[Prompt], folder: Path, draft_cost: float) -> StopFit:
    """What the tuning prompts say."""
    shape = FullTree(depth=WINDOW, top_k=1)
    collect_dense(pair, prompts, DecodeSettings(128), folder, shape, batch_size=8, resume=True)
    chains = read_chains(DenseLog.open(TraceSet.open(folder)), extra=(DISTANCE,))
    clock = target_steps(draft_cost)
    return fit_stop(
        tokens_tested(chains, WINDOW),
        lambda policies: prompt_costs(chains, policies, clock),
        AdasdConfig(window=WINDOW, held_out_frac=0.25),
    )


def policies_of(fit: StopFit) -> dict[str, Policy]:
    """Rivals, then AdaSD in the order of the paper's tables."""
    # Of a family the last row is the best one: the paper's chain of 5 stands before it.
    best = {family: value for family, _, value in (row.name.partition(": ") for row in fit.rows)}
    tuned = Chain(num_draft_tokens=int(best["chain"]))
    confident = SignalStop(signal="confidence", threshold=float(best["confidence"]), window=WINDOW)
    paper = EntropyStop(window=WINDOW, between="rejected", min_samples=1)
    warm = {
        "prior_accepted": fit.distance.accepted_mean,
        "prior_rejected": fit.distance.rejected_mean,
        "prior_weight": 8.0,
    }
    five = Chain(num_draft_tokens=5)

    def relaxed(shape: Any, **fields: Any) -> Policy:
        return Policy(shape=shape, acceptance=JensenShannon(**fields))

    return {
        BASELINE: Policy(shape=five),
        f"chain {tuned.num_draft_tokens} (tuned)": Policy(shape=tuned),
        f"confidence {confident.threshold:g} (tuned)": Policy(shape=confident),
        "gen-only (paper, from the first rejection)": Policy(shape=paper),
        "gen-only (settled, 8 samples)": Policy(shape=EntropyStop(window=WINDOW)),
        f"gen-only (fitted: {fit.shape.between}, warm {fit.shape.prior_weight:g})": Policy(
            shape=fit.shape
        ),
        "verify-only (paper)": relaxed(five, min_samples=1),
        "verify-only (warm)": relaxed(five, **warm),
        "AdaSD (paper)": relaxed(paper, min_samples=1),
        "AdaSD (settled, 8 samples)": relaxed(EntropyStop(window=WINDOW)),
        "AdaSD (warm)": relaxed(fit.shape, **warm),
        "AdaSD (warm, clip 0.2)": relaxed(fit.shape, max_threshold=0.2, **warm),
        **{
            f"AdaSD (paper, variant {name})": relaxed(paper, min_samples=1, variant=name)
            for name in "ABC"
        },
    }


@contextmanager
def thresholds_seen() -> Any:
    """Every acceptance threshold that a round was judged by, once warm."""
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
    tuning = [p for p in prompts if p.prompt_id in set(split.held_out)]
    judged = [p for p in prompts if p.prompt_id in set(split.train) and p.answer is not None]
    fit = fitted(pair, tuning, work / "traces", options.draft_cost)
    settings = DecodeSettings(options.max_new_tokens, Sampling(options.temperature))
    plan = Plan(judged, settings, batch_size=8)
    folder = RunFolder.open(work / "runs", plan.header(pair.fingerprint), resume=True)
    done, strict = finished(work / "rows.jsonl"), None
    for name, policy in policies_of(fit).items():
        with thresholds_seen() as seen:
            answers = run_prompts(pair, policy, plan, folder)
        strict = strict or answers
        if name not in done:
            row = row_of(name, strict, answers, options.draft_cost, seen)
            done[name] = {"drafter": drafter, **row}
            with (work / "rows.jsonl").open("a") as file:
                file.write(json.dumps(done[name]) + "\n")
    return [done[name] for name in policies_of(fit)], len(judged)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--draft-cost", type=float, default=0.1, help="of a target forward")
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--name", default="adasd")
    options.add_argument("--drafters", nargs="*", choices=DRAFTERS, help="default: all")
    options.add_argument("--work", type=Path, required=True, help="keeps traces, answers, rows")
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
