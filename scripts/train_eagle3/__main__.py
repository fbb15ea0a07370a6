"""Trains an EAGLE-3 head for a Llama-type target on text that the target wrote itself.

    python -m scripts.train_eagle3 --target DIR --data DIR --work-dir work-head

The stages text, features, head, evaluate and publish run in this order; each reads the files of
the stages before it and goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specctl import Decoder
from specctl.runtime.identity import load_tokenizer, quietly

from . import card, evaluation, features, head, own_text, prompts, training

Stages = Mapping[str, Callable[["Workplace"], None]]
CARD = ("draft_vocab", "intermediate_size", "steps", "rows", "slot_frac", "soft_frac", "seed")


def new_parser(text: str | None, stages: Iterable[str]) -> argparse.ArgumentParser:
    """A command line of the stages, with the arguments that the trainers of all pairs share."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--stage", choices=(*stages, "all"), default="all", help="one stage, or all in order")
    add("--work-dir", type=Path, default=Path("work-head"), help="text, features, checkpoints, log")
    add("--num-tokens", type=int, default=1_000_000, help="of the target's own text")
    add("--max-new-tokens", type=int, default=256, help="of an answer")
    add("--answers", type=Path, help="file of a published head, whose answers are taken")
    add("--max-length", type=int, default=576, help="tokens of a row; what is beyond is cut off")
    add("--steps", type=int, default=3000, help="updates of the head")
    add("--rows", type=int, default=24, help="answers in an update")
    add("--slot-frac", type=float, default=0.5, help="share of an answer's slots in an update")
    add("--soft-frac", type=float, default=0.25, help="of the target's distribution in the label")
    add("--draft-vocab", type=int, default=8192, help="size of the draft vocabulary")
    add("--intermediate-size", type=int, default=1536, help="width of the head's MLP")
    add("--layers", type=int, nargs=3, help="target layers whose inputs are fused")
    add("--train-tokens", type=int, default=1 << 60, help="at most, of the own text")
    add("--name", default="head", help="of the checkpoint and its log in the work folder")
    add("--keep-every", type=int, default=600, help="steps between heads that are kept")
    add("--seed", type=int, default=11)
    add("--threads", type=int, default=2)
    add("--device", default="cpu")
    return parser


class Workplace:
    """The files of a work folder, and what earlier stages left in them."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.folder = given, given.work_dir
        self.folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.given.target)

    def target(self) -> Any:
        model = quietly(AutoModelForCausalLM, self.given.target, dtype=torch.bfloat16)
        return model.eval().requires_grad_(requires_grad=False).to(self.given.device)

    def rows(self) -> list[own_text.Row]:
        """All text of the target so far."""
        return own_text.read_rows(self.folder / "own_text.jsonl")

    def write_text(self, found: Sequence[own_text.Row]) -> None:
        """Text of the target that continues the prompts."""
        given, path = self.given, self.folder / "own_text.jsonl"
        if given.answers:
            own_text.append_rows(path, own_text.read_answers(given.answers, found))
        decoder = Decoder.from_pretrained(
            str(given.target), policy="ar", device=given.device, dtype="bfloat16", batch_size=64
        )
        own_text.write_rows(decoder, found, path, given.max_new_tokens, given.num_tokens)

    def train_numbers(self) -> list[int]:
        """Numbers of the rows to train on: none that is held out."""
        found, num_left = [], self.given.train_tokens
        for number, row in enumerate(self.rows()):
            if num_left > 0 and not evaluation.is_held_out(row):
                found.append(number)
                num_left -= len(row.answer_ids)
        return found

    def draft_ids(self, vocab_size: int) -> Tensor:
        """Sorted target ids of the draft vocabulary, from the text that the head first saw."""
        path, given = self.folder / f"{self.given.name}-draft-ids.json", self.given
        if not path.exists():
            rows = self.rows()
            seen = [rows[i] for i in self.train_numbers()]
            ids = own_text.draft_ids(seen, vocab_size, given.draft_vocab)
            path.write_text(json.dumps(ids.tolist()))
        return torch.tensor(json.loads(path.read_text()))

    def layers(self, target: Any) -> tuple[int, ...]:
        """The target layers whose inputs are fused; by default those that serving engines take."""
        num = target.config.num_hidden_layers
        return tuple(self.given.layers or (2, num // 2, num - 3))

    def features(self, target: Any) -> Path:
        return self.folder / ("features-" + "-".join(map(str, self.layers(target))))

    def trained_head(self, num_steps: int | None = None) -> Path:
        """The folder of a head that training kept, by default the last one."""
        return self.folder / f"{self.given.name}-{num_steps or self.given.steps}"

    def new_head(self, target: Any) -> Any:
        ids, given = self.draft_ids(target.config.vocab_size), self.given
        size, layers = given.intermediate_size, self.layers(target)
        return head.new_head(target, ids.to(given.device), size, layers).to(given.device)


def run_text(place: Workplace) -> None:
    """Answers of the target to the prompts of the data sets."""
    place.write_text(prompts.chat_prompts(place.given.data, place.tokenizer))


def run_features(place: Workplace) -> None:
    """The target's states at every slot of its text."""
    target = place.target()
    folder, length = place.features(target), place.given.max_length
    features.write_features(target, place.rows(), place.layers(target), folder, length)


def run_head(place: Workplace) -> None:
    """Trains the head; the log also has the top-1 agreement of each unrolled step."""
    given, target = place.given, place.target()
    drafter, folder = place.new_head(target), place.features(target)
    unembedding = target.get_output_embeddings().weight.detach()
    head_loss = head.HeadLoss(drafter, unembedding, given.soft_frac)
    del target
    aside = [i for i, row in enumerate(place.rows()) if evaluation.is_held_out(row)]
    held_out = features.FeatureRows(folder, aside)
    train = features.FeatureRows(folder, place.train_numbers())
    print(f"{train.num_tokens:,} tokens of {len(train.places):,} answers", flush=True)

    def loss_of(step: int, places: list[features.Place]) -> tuple[Tensor, dict[str, Any]]:
        example = train.example(places).to(given.device)
        generator = torch.Generator().manual_seed(given.seed + step)
        slots = head.choose_slots(example, given.slot_frac, generator)
        loss, counts = head_loss(example, slots)
        return loss, {"agreement": head.agreement(counts), "num_tokens": slots.numel()}

    def evaluate(num_steps: int) -> dict[str, Any]:
        if num_steps % given.keep_every == 0 or num_steps == given.steps:
            head.save_head(drafter, place.trained_head(num_steps))
        return evaluation.validation(head_loss, held_out, given.device)

    schedule = training.Schedule(given.steps)
    batches, path = train.batches(given.rows, given.seed), place.folder / f"{given.name}.pt"
    training.run(drafter, schedule, batches, loss_of, path, evaluate)


def run_evaluate(place: Workplace) -> None:
    """Acceptance length of each head that training kept, on Spec-Bench prompts that none was
    trained on, by category."""
    given = place.given
    rows = evaluation.bench_rows(given.data / "spec_bench_dev.jsonl", place.tokenizer)
    for folder in sorted(place.folder.glob(f"{given.name}-[0-9]*")):
        if not (folder / "evaluation.json").exists():
            found = json.dumps(evaluation.acceptance(given.target, folder, rows), indent=2)
            (folder / "evaluation.json").write_text(found + "\n")


def run_publish(place: Workplace) -> None:
    """Writes the last head with its model card, `README.md`, and the target's answers."""
    given, rows = place.given, place.rows()
    facts = {"layers": place.layers(place.target())} | {name: getattr(given, name) for name in CARD}
    shutil.copytree(place.trained_head(), given.out, dirs_exist_ok=True)
    trained_on = [rows[number] for number in place.train_numbers()]
    text = card.card(place.folder, given.name, given.target.stem, trained_on, facts)
    (given.out / "README.md").write_text(text, encoding="utf-8")
    own_text.write_answers(rows, given.out / "answers.parquet")


def run_stages(given: argparse.Namespace, stages: Stages) -> None:
    """Runs the chosen stage, or all in order."""
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    place = Workplace(given)
    for name in stages if given.stage == "all" else (given.stage,):
        stages[name](place)


def main() -> None:
    """Trains a head for the target that the command line names."""
    order = (run_text, run_features, run_head, run_evaluate, run_publish)
    stages = {stage.__name__.removeprefix("run_"): stage for stage in order}
    parser = new_parser(__doc__, stages)
    parser.add_argument("--target", type=Path, required=True, help="its folder or GGUF file")
    parser.add_argument("--data", type=Path, required=True, help="folder of the prompts' data sets")
    parser.add_argument("--out", type=Path, default=Path("head"), help="folder of the final head")
    run_stages(parser.parse_args(), stages)


if __name__ == "__main__":
    main()
