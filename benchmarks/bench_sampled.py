"""Sampled drafts beside point-mass chains and trees: what the sampler, the tree and a margin give.

All rows are of one run: the same prompts under every policy, at T = 0 and T = 1. MARS stands on the
EAGLE-3 head, AdaSD on the small drafter, where transformers' own assisted generation runs too, its
confidence threshold moved by a ROC curve after every round. Answers are kept in `--runs`.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from specctl.collect.prompts import Prompt, load_prompts
from specctl.embedded import embedded_path
from specctl.runtime.conversations import Conversation, DecodeSettings, next_request
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.requests import Sampling
from specctl.runtime.words import resolve_policy
from specctl.stats import ratio_of_ratios, ratio_of_sums
from specctl.train.paired import Answers, Plan, RunFolder, run_prompts

CHAIN, TREE = "chain:num_draft_tokens=5", "eagle2:depth=5:top_k=8:num_tokens=24"
STOP = "adasd_stop:between=rejected:min_samples=1"
NEAR = "adasd_accept:min_samples=1"
CONFIDENCE = "confidence:threshold=0.4"
ASSISTED = "transformers' assisted generation"
MARS = {
    "chain": CHAIN,
    "chain, sampled drafts": f"{CHAIN}+ratio",
    "chain, sound at .9": f"{CHAIN}+mars:theta=0.9",
    "tree": TREE,
    "tree, sound at .9": f"{TREE}+mars:theta=0.9",
}
ADASD = {
    "chain": CHAIN,
    "chain, sampled drafts": f"{CHAIN}+ratio",
    "confidence .4": CONFIDENCE,
    "confidence .4, sampled drafts": f"{CONFIDENCE}+ratio",
    "gen-only (paper start)": STOP,
    "gen-only, sampled drafts": f"{STOP}+ratio",
    "verify-only (paper start)": f"{CHAIN}+{NEAR}",
    "AdaSD (paper start)": f"{STOP}+{NEAR}",
}
SHARES = {
    "sampler: drafts drawn, p/q": ("chain, sampled drafts", "chain"),
    "tree": ("tree", "chain"),
    "tree over sampled drafts": ("tree", "chain, sampled drafts"),
    "margin: sound, chain": ("chain, sound at .9", "chain"),
    "margin: sound, tree": ("tree, sound at .9", "tree"),
    "stop: gen-only": ("gen-only (paper start)", "chain"),
    "stop: gen-only, drafts drawn": ("gen-only, sampled drafts", "chain, sampled drafts"),
    "acceptance: verify-only": ("verify-only (paper start)", "chain"),
    "acceptance over sampled drafts": ("verify-only (paper start)", "chain, sampled drafts"),
    "AdaSD over sampled drafts": ("AdaSD (paper start)", "chain, sampled drafts"),
    "AdaSD over assisted generation": ("AdaSD (paper start)", ASSISTED),
}
Sums = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Tokens behind the first one and target calls, by prompt."""


def asked(options: argparse.Namespace) -> list[Prompt]:
    """Spread over the packaged prompts and the files, so many of each."""
    found = []
    for name in ["embedded", *options.more]:
        loaded = load_prompts(name)
        size = options.num_prompts if name == "embedded" else options.num_more
        spread = loaded[:: max(1, len(loaded) // size)][:size]
        stem = "" if name == "embedded" else f"{Path(name).stem}-"
        found += [replace(one, prompt_id=f"{stem}{one.prompt_id}") for one in spread]
    return found


def sums_of(answers: Answers) -> Sums:
    keys = sorted(answers)
    tokens = np.array([len(answers[key].token_ids) - 1 for key in keys], float)
    return tokens, np.array([answers[key].calls for key in keys], float)


def assisted(pair: Pair, plan: Plan, known: Answers) -> Sums:
    """transformers' own loop, which is given our first tokens; every prompt starts cold."""
    target, assistant = (
        AutoModelForCausalLM.from_pretrained(embedded_path(name), dtype=torch.float32)
        for name in ("target", "small")
    )
    sampling, rounds = plan.settings.sampling, 0
    original = AssistedCandidateGenerator.update_candidate_strategy

    def count(self: Any, *given: Any) -> Any:
        nonlocal rounds
        rounds += 1
        return original(self, *given)

    AssistedCandidateGenerator.update_candidate_strategy = count
    config, by_id = assistant.generation_config, {one.prompt_id: one for one in plan.prompts}
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = 20, "constant"
    tokens, calls = [], []
    for key in sorted(known):
        prompt, config.assistant_confidence_threshold, rounds = by_id[key[0]], 0.4, 0
        request = next_request(pair.target.tokenizer, Conversation(prompt), plan.settings)
        given = torch.tensor([[*request.prompt_ids, known[key].token_ids[0]]])
        torch.manual_seed(0)
        drawn = {"temperature": sampling.temperature, "top_k": 0} if sampling.temperature else {}
        out = target.generate(
            given,
            attention_mask=torch.ones_like(given),
            assistant_model=assistant,
            do_sample=bool(drawn),
            max_new_tokens=plan.settings.max_new_tokens - 1,
            eos_token_id=sorted(pair.target.eos_ids),
            pad_token_id=0,
            **drawn,
        )
        tokens.append(out.shape[1] - given.shape[1])
        calls.append(rounds)
    AssistedCandidateGenerator.update_candidate_strategy = original
    return np.array(tokens, float), np.array(calls, float)


def rows_of(
    drafter: str, temperature: float, policies: dict[str, str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    pair = load_pair("embedded", drafter, device=options.device, dtype=options.dtype)
    settings = DecodeSettings(options.max_new_tokens, Sampling(temperature))
    plan = Plan(asked(options), settings, batch_size=8)
    place = options.runs / f"{drafter.replace(':', '-')}-{temperature:g}"
    folder = RunFolder.open(place, plan.header(pair.fingerprint), resume=True)
    found: dict[str, Sums] = {}
    first: Answers = {}
    for name, spec in policies.items():
        policy = resolve_policy(spec, allow_lossy=True).policy
        answers = run_prompts(pair, policy, plan, folder)
        first = first or answers
        found[name] = sums_of(answers)
        print(f"{drafter} T={temperature:g} {name}", file=sys.stderr, flush=True)
    if drafter == "embedded:small":
        found[ASSISTED] = assisted(pair, plan, first)
    of = {"drafter": drafter, "T": temperature, "n": len(plan.prompts)}
    rows = [
        {**of, "what": name, "tokens_per_call": ratio_of_sums(*sums).text(".3f")}
        for name, sums in found.items()
    ]
    for name, (ours, theirs) in SHARES.items():
        if ours in found and theirs in found:
            share = ratio_of_ratios(found[ours], found[theirs]).text(".3f")
            rows.append({**of, "what": f"{name}: ({ours}) over ({theirs})", "ratio": share})
    return [{"tokens_per_call": "", "ratio": "", **row} for row in rows]


def measured(options: argparse.Namespace) -> Sequence[dict[str, Any]]:
    rows = []
    for drafter, policies in (("embedded", MARS), ("embedded:small", ADASD)):
        for temperature in (1.0, 0.0):
            rows += rows_of(drafter, temperature, policies, options)
    return rows


def main() -> None:
    wanted = parser(__doc__ or "")
    wanted.add_argument("--runs", type=Path, required=True, help="folder that keeps answers")
    wanted.add_argument("--more", nargs="*", default=[], help="prompt files beside the packaged")
    wanted.add_argument("--num-more", type=int, default=20, help="prompts of each file")
    wanted.set_defaults(num_prompts=40)
    options = wanted.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", category=FutureWarning)
    rows = measured(options)
    note = (
        f"embedded target, float32, up to {options.max_new_tokens} new tokens, batches of 8, one "
        "seed a prompt; tokens per target call are sums over prompts, with 95 % intervals over "
        "prompts; ratios are paired; the pair is a fixture, no claim about large models"
    )
    report("sampled", rows, options, note)


if __name__ == "__main__":
    main()
