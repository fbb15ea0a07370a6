"""Our loop beside what a user would use instead: transformers' generate, plain and assisted.

All systems decode every prompt in one run, prompt by prompt in rotating order, so that drift of
the machine hits all of them alike. Rates are Σ tokens / Σ time. Greedy; all texts must be equal.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from common import parser, report, write
from transformers import AutoModelForCausalLM, PreTrainedModel

from specctl.collect.prompts import load_prompts
from specctl.policy import Policy
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import Conversation, DecodeSettings, next_request
from specctl.runtime.identity import model_folder
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.requests import Request
from specctl.runtime.words import resolve_policy

SPECS = ("chain:num_draft_tokens=4", "eagle2:depth=4:top_k=4:num_tokens=12", "eagle2")
Generate = Callable[[Request], tuple[list[int], int]]


@dataclass
class System:
    """One way to decode: tokens and target calls of a request, and what they cost so far."""

    name: str
    generate: Generate
    seconds: float = 0.0
    num_tokens: int = 0
    calls: int = 0
    texts: list[list[int]] = field(default_factory=list)

    def decode(self, request: Request) -> None:
        start = time.perf_counter()
        tokens, calls = self.generate(request)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start
        self.num_tokens += len(tokens)
        self.calls += calls
        self.texts.append(tokens)

    def forget(self) -> None:
        self.seconds, self.num_tokens, self.calls, self.texts = 0.0, 0, 0, []


def ours(pair: Pair, spec: str, room: int) -> Generate:
    """Our loop under a policy, one request at a time; calls exclude the prompt's forward."""
    policy: Policy = resolve_policy(spec, pair.fingerprint).policy
    loop = Decoder(pair, policy).loop_for(room)

    def generate(request: Request) -> tuple[list[int], int]:
        [done] = loop.run([request])
        return list(done.token_ids), done.metrics.calls

    return generate


def transformers_generate(
    model: PreTrainedModel, eos_ids: tuple[int, ...], helper: PreTrainedModel | None
) -> Generate:
    """transformers' `generate`; calls are the target's forwards less the one over the prompt."""
    counter = [0]
    original = model.forward

    def counted(*args: object, **options: object) -> object:
        counter[0] += 1
        return original(*args, **options)

    def generate(request: Request) -> tuple[list[int], int]:
        model.forward, counter[0] = counted, 0
        ids = torch.tensor([request.prompt_ids], device=model.device)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=helper,
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=list(eos_ids),
            pad_token_id=eos_ids[0],
        )
        model.forward = original
        return output[0, ids.shape[1] :].tolist(), counter[0] - 1

    return generate


def plain_model(name: str, options: argparse.Namespace) -> PreTrainedModel:
    """An embedded model as transformers itself loads it."""
    folder = model_folder(name, embedded_default="target")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype))
    return model.to(options.device).eval()


def assistant(num_tokens: int, threshold: float, options: argparse.Namespace) -> PreTrainedModel:
    """The small model with transformers' own knobs set on it."""
    model = plain_model("embedded:small", options)
    settings = model.generation_config
    settings.num_assistant_tokens = num_tokens
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = threshold
    return model


def requests_of(pair: Pair, options: argparse.Namespace) -> list[Request]:
    """First turns of evenly spread prompts, so that all categories take part."""
    prompts = load_prompts(options.prompts)
    step = max(1, len(prompts) // options.num_prompts)
    settings = DecodeSettings(options.max_new_tokens)
    tokenizer = pair.target.tokenizer
    chosen = prompts[::step][: options.num_prompts]
    return [next_request(tokenizer, Conversation(prompt), settings) for prompt in chosen]


def build_systems(options: argparse.Namespace) -> tuple[list[System], list[Request]]:
    def loaded(drafter: str) -> Pair:
        """A pair of its own for every loop: one loop at a time holds a model's memory."""
        name = f"embedded:{drafter}"
        return load_pair("embedded", name, device=options.device, dtype=options.dtype)

    first = loaded("small")
    requests = requests_of(first, options)
    room = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    model, eos = plain_model("embedded:target", options), first.target.eos_ids
    theirs = {
        "transformers plain": None,
        "transformers assisted, 4 fixed": assistant(4, 0.0, options),
        "transformers assisted, defaults": assistant(20, 0.4, options),
    }
    systems = [System(name, transformers_generate(model, eos, a)) for name, a in theirs.items()]
    systems.append(System("specctl ar", ours(first, "ar", room)))
    systems += [
        System(f"specctl {spec}, {name}", ours(loaded(name), spec, room))
        for name in ("small", "eagle3")
        for spec in SPECS
    ]
    return systems, requests


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    torch.set_num_threads(options.threads)
    systems, requests = build_systems(options)
    for system in systems:
        system.decode(requests[0])  # warm-up
        system.forget()
    for turn, request in enumerate(requests):
        start = turn % len(systems)
        for system in systems[start:] + systems[:start]:
            system.decode(request)
        write("decode", rows_of(systems), options, note(options, turn + 1))
    report("decode", rows_of(systems), options, note(options, len(requests)))


def rows_of(systems: list[System]) -> list[dict[str, object]]:
    base = systems[0]
    return [
        {
            "system": system.name,
            "tokens_per_s": system.num_tokens / system.seconds,
            "speedup": base.seconds / base.num_tokens * system.num_tokens / system.seconds,
            "calls": system.calls,
            "tokens_per_call": system.num_tokens / max(1, system.calls),
            "ms_per_call": 1e3 * system.seconds / max(1, system.calls),
            "equal": system.texts == base.texts,
        }
        for system in systems
    ]


def note(options: argparse.Namespace, num_prompts: int) -> str:
    return (
        f"embedded pair, {options.dtype}, {options.device}, {options.threads} threads, "
        f"{num_prompts} prompts x {options.max_new_tokens} new tokens, greedy, batch 1; "
        "speedup over transformers plain"
    )


if __name__ == "__main__":
    main()
