"""Trains the embedded pair: the target from scratch, its EAGLE-3 head and the small drafter.

    python -m scripts.train_embedded_pair --work-dir work-pair --text gsm8k.jsonl --text book.txt
    python -m scripts.train_embedded_pair --work-dir work-pair --stage head

Shapes and tokenizer are those of the packaged pair. Every stage reads the files of the stages
before it and goes on where it was stopped; features and head are those of
`scripts.train_eagle3`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.embedded_pair import corpus
from scripts.train_eagle3 import __main__ as eagle3
from scripts.train_eagle3 import evaluation, own_text, training
from scripts.train_eagle3.features import FeatureRows, Place
from scripts.train_eagle3.prompts import chat_ids, read_lines
from specctl.embedded import EMBEDDED, PROMPTS

TARGET_BATCH = (8, 512)  # rows, tokens of a row
QUESTION_WEIGHT = 0.25  # of questions, whose names and numbers nobody can predict
USER_ID, ASSISTANT_ID = 2, 3
SHARES = {"arithmetic": 0.25, "strings": 0.17, "qa": 0.16, "code": 0.2, "prose": 0.1, "chat": 0.12}
"""Of the domains in the prompts of the target's own text."""
MAX_PROMPT_TOKENS = 220


def parse_arguments() -> argparse.Namespace:
    """The command line: the arguments of the head's trainer and those of the pair."""
    parser = eagle3.new_parser(__doc__, STAGES)
    add = parser.add_argument
    add("--out", type=Path, default=Path("specctl/embedded"), help="where publish writes")
    add("--text", type=Path, action="append", default=[], help=".jsonl or book to train on")
    add("--target-steps", type=int, default=2140, help="updates of 4096 tokens")
    add("--num-prompts", type=int, default=12_800, help="that the target continues")
    add("--small-steps", type=int, default=400, help="updates of the small drafter")
    parser.set_defaults(
        work_dir=Path("work-pair"),
        num_tokens=1 << 40,  # every prompt is continued
        max_new_tokens=128,
        steps=1080,
        rows=16,
        draft_vocab=2560,
        intermediate_size=704,
    )
    given = parser.parse_args()
    given.target, given.text = given.work_dir / "target", tuple(given.text)
    return given


def train(
    place: eagle3.Workplace,
    name: str,
    schedule: training.Schedule,
    batches: Iterable[tuple[Tensor, Tensor]],
    held_out: Sequence[tuple[Tensor, Tensor]],
) -> None:
    """Trains a model of a packaged one's shape on token ids `[B, T]` and the weights of tokens."""
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(EMBEDDED[name]))

    def loss_of(_: int, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        ids, weights = batch[0], batch[1][:, 1:]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids, use_cache=False).logits[:, :-1]
        losses = F.cross_entropy(logits.float().mT, ids[:, 1:], reduction="none")
        return (losses * weights).sum() / weights.sum(), {"num_tokens": ids.numel()}

    @torch.no_grad()
    def evaluate(step: int) -> dict[str, Any]:
        losses = [float(loss_of(step, batch)[0]) for batch in held_out]
        return {"loss": sum(losses) / len(losses)} if losses else {}

    training.run(model, schedule, batches, loss_of, place.folder / f"{name}.pt", evaluate)
    model.to(torch.bfloat16).save_pretrained(place.folder / name)


def run_target(place: eagle3.Workplace) -> None:
    """Trains the target on documents of every domain; questions weigh `QUESTION_WEIGHT`."""
    weights = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(EMBEDDED["target"], place.given.target, ignore=weights, dirs_exist_ok=True)

    def weighted(ids: Tensor) -> tuple[Tensor, Tensor]:
        turns = (ids == USER_ID).int() - (ids == ASSISTANT_ID).int()
        return ids, torch.where(turns.cumsum(1) == 1, QUESTION_WEIGHT, 1.0)

    batches, held_out = (
        map(weighted, corpus.batches(place.tokenizer, documents, place.given.seed, *TARGET_BATCH))
        for documents in corpus.read_documents(place.given.text)
    )
    schedule = training.Schedule(place.given.target_steps)
    train(place, "target", schedule, batches, list(islice(held_out, 8)))


def run_text(place: eagle3.Workplace) -> None:
    """Text of the target on prompts of every domain."""
    given, encode = place.given, place.tokenizer.encode
    rng, (documents, _) = Random(f"generate/{given.seed}"), corpus.read_documents(given.text)
    streams = {name: corpus.endless(found, given.seed + 1) for name, found in documents.items()}
    weights, found = [SHARES[domain] for domain in streams], []
    for domain in rng.choices(list(streams), weights, k=given.num_prompts):
        document = next(streams[domain])
        if document.question:
            ids = chat_ids(place.tokenizer, document.question)
        else:  # a random head of the text
            whole = encode(document.render(), add_special_tokens=False)
            ids = tuple(whole[: max(8, int(len(whole) * rng.uniform(0.05, 0.7)))])
        found.append(own_text.Row(domain, ids[:MAX_PROMPT_TOKENS]))
    place.write_text(found)


def run_small(place: eagle3.Workplace) -> None:
    """Trains the small drafter on the target's answers."""
    rows = FeatureRows(place.features(place.target()), place.train_numbers())

    def weighted(places: list[Place]) -> tuple[Tensor, Tensor]:
        example = rows.example(places)
        return example.token_ids, example.is_answer.float()

    schedule = training.Schedule(place.given.small_steps, decay_frac=0.7)
    batches = map(weighted, rows.batches(place.given.rows, place.given.seed))
    train(place, "small", schedule, batches, [])


def run_publish(place: eagle3.Workplace) -> None:
    """Writes the pair into the package, and how it was made and what it is into `record.json`."""
    given, out = place.given, place.given.out
    corpus.check_unseen(PROMPTS, corpus.read_documents(given.text)[0])
    made = (given.target, place.trained_head(), place.folder / "small")
    for name, folder in zip(EMBEDDED, made, strict=True):
        shutil.rmtree(out / name, ignore_errors=True)
        shutil.copytree(folder, out / name)
    logs = {
        name: read_lines(place.folder / f"{name}.jsonl") for name in ("target", "head", "small")
    }
    prompts, rows = read_lines(PROMPTS), place.rows()
    record = {
        "seed": given.seed,
        "sources": {path.name: sha256(path.read_bytes()).hexdigest() for path in given.text},
        "text": {"num_rows": len(rows), "num_tokens": sum(len(row.answer_ids) for row in rows)},
        "last_of_logs": {name: log[-2:] for name, log in logs.items()},
        "torch": torch.__version__,
        "evaluation": {
            name: evaluation.acceptance(out / "target", out / name, prompts)
            for name in ("eagle3", "small")
        },
    }
    (out / "record.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


ORDER = (run_target, run_text, eagle3.run_features, eagle3.run_head, run_small, run_publish)
STAGES = {stage.__name__.removeprefix("run_"): stage for stage in ORDER}


if __name__ == "__main__":
    eagle3.run_stages(parse_arguments(), STAGES)
