"""Relaxed acceptance on problems with checkable answers: speed, divergence, accuracy, contract.

Answers are kept in `--runs`, so an interrupted run goes on where it was. Besides the packaged
problems it asks held-out ones of the same generator (never trained on) and, with `--gsm8k`, the
first problems of a GSM8K file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import parser, report
from specctl.collect.prompts import Prompt, load_prompts
from specctl.policy.mars import Mars
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.policy_spec import resolve_policy
from specctl.runtime.requests import Sampling
from specctl.train.certify import certify, sweep
from specctl.train.configs import THETAS, Contract, MarsConfig
from specctl.train.mars import MARS
from specctl.train.paired import (
    Answers,
    Plan,
    RunFolder,
    compare_answers,
    losses_of,
    run_prompts,
    strict_twin,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

SHAPE = "eagle2:depth=6:top_k=8:num_tokens=24"
PACKAGED = {"arithmetic": 70, "strings": 50}
"""Problems of the held-out stream that stand in the package."""


def held_out_problems(num_each: int) -> list[Prompt]:
    """Problems of the generator's held-out stream behind those of the package."""
    from embedded_pair.corpus import HELD_OUT_SEED
    from embedded_pair.problems import generate

    found = []
    for category, first in PACKAGED.items():
        problems = generate(category, HELD_OUT_SEED, first + num_each)[first:]
        found += [
            Prompt(f"{category}-h{i:04d}", category, (p.prompt,), p.answer)
            for i, p in enumerate(problems)
        ]
    return found


def asked_prompts(options: argparse.Namespace) -> list[Prompt]:
    prompts = [prompt for prompt in load_prompts(options.prompts) if prompt.answer is not None]
    prompts += held_out_problems(options.num_problems // 2)
    if options.gsm8k:
        rows = islice(load_prompts(options.gsm8k), options.num_gsm8k)
        prompts += [
            replace(prompt, prompt_id=f"gsm8k-{i:03d}", category="gsm8k")
            for i, prompt in enumerate(rows)
        ]
    return prompts


def row(
    system: str, theta: float, group: str, strict: Answers, relaxed: Answers, **more: Any
) -> dict[str, Any]:
    seen = compare_answers(strict, relaxed)
    return {
        "system": system,
        "theta": theta,
        "prompts": group,
        "n": seen.num_prompts,
        "tokens_per_call": seen.tokens_per_call.value,
        "over_strict": seen.speedup.text(".3f"),
        "accuracy": seen.accuracy,
        "strict_accuracy": seen.strict_accuracy,
        "recovery_percent": seen.recovery.text(".1%"),
        "lost": seen.lost,
        "gained": seen.gained,
        "texts_changed": seen.diverged.value,
        "median_first_change": seen.median_divergence,
        "relaxed_per_100": seen.relaxed_per_100,
        **more,
    }


def groups(strict: Answers) -> dict[str, list[tuple[str, int]]]:
    """All prompts, those that the target can solve, and each category."""
    names = sorted({answer.category for answer in strict.values()})
    of = {name: [k for k, answer in strict.items() if answer.category == name] for name in names}
    problems = [key for name in PACKAGED for key in of.get(name, ())]
    return {"all": list(strict), "problems": problems, **of}


def greedy_rows(pair: Pair, plan: Plan, folder: RunFolder, form: str) -> list[dict[str, Any]]:
    """A sweep, with the contract over each group of prompts alone."""
    denied = tuple(sorted(pair.target.tokenizer.all_special_ids))
    config = MarsConfig(form=form, thetas=THETAS[form], deny_token_ids=denied, contract=Contract())
    found = sweep(MARS, pair, resolve_policy(SHAPE).policy, plan, config, folder)
    rows = []
    for name, keys in groups(found.strict).items():
        strict, *relaxed = (
            {key: part[key] for key in keys} for part in (found.strict, *found.relaxed)
        )
        losses = [losses_of(strict, answers, config.contract.kind) for answers in relaxed]
        trials = certify(losses, config.contract).trials
        for theta, answers, trial in zip(config.thetas, relaxed, trials, strict=True):
            verdict = {"p_value": trial.p_value, "certified": trial.certified}
            rows.append(row(f"greedy {form}", theta, name, strict, answers, **verdict))
    return rows


def sampled_rows(pair: Pair, plan: Plan, folder: RunFolder) -> list[dict[str, Any]]:
    """At a temperature, relaxing and not."""
    base = resolve_policy(SHAPE).policy
    strict = run_prompts(pair, strict_twin(base), plan, folder)
    rows = []
    for theta in (1.0, 0.9):
        policy = base.model_copy(update={"acceptance": Mars(theta=theta)})
        relaxed = run_prompts(pair, policy, plan, folder)
        name = f"T={plan.settings.sampling.temperature:g} sound"
        rows.append(row(name, theta, "all", strict, relaxed, p_value=None, certified=None))
    return rows


def opened(pair: Pair, plan: Plan, place: Path) -> RunFolder:
    return RunFolder.open(place, plan.header(pair.fingerprint), resume=True)


def measured(options: argparse.Namespace) -> Sequence[dict[str, Any]]:
    pair = load_pair("embedded", "embedded", device=options.device, dtype=options.dtype)
    prompts, rows = asked_prompts(options), []
    greedy = Plan(prompts, DecodeSettings(options.max_new_tokens), batch_size=8)
    for form in options.forms.split(","):
        rows += greedy_rows(pair, greedy, opened(pair, greedy, options.runs / "greedy"), form)
    if options.temperature:
        few = [prompt for prompt in prompts if prompt.category != "gsm8k"][: options.num_sampled]
        settings = DecodeSettings(options.max_new_tokens, Sampling(options.temperature))
        sampled = Plan(few, settings, batch_size=8)
        rows += sampled_rows(pair, sampled, opened(pair, sampled, options.runs / "sampled"))
    return rows


def main() -> None:
    wanted = parser(__doc__ or "")
    wanted.add_argument("--runs", type=Path, required=True, help="folder that keeps answers")
    wanted.add_argument("--gsm8k", help="GSM8K file; default: none")
    wanted.add_argument("--num-gsm8k", type=int, default=300)
    wanted.add_argument("--num-problems", type=int, default=780, help="held-out problems")
    wanted.add_argument("--forms", default="ratio", help="comma-separated")
    wanted.add_argument("--temperature", type=float, default=0.0, help="0 leaves sampling out")
    wanted.add_argument("--num-sampled", type=int, default=120)
    wanted.set_defaults(max_new_tokens=128)
    options = wanted.parse_args()
    torch.set_num_threads(options.threads)
    rows = measured(options)
    note = (
        f"embedded pair, {SHAPE}, {options.dtype}, {options.device}, up to "
        f"{options.max_new_tokens} new tokens; contract: binary loss at most 0.02 at confidence "
        "0.9 over each group of prompts alone; the pair is a fixture, no claim about large models"
    )
    report("mars", rows, options, note)


if __name__ == "__main__":
    main()
