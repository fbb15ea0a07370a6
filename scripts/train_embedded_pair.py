"""Trains the embedded pair.

corpus -> tokenizer -> target -> text -> head -> small -> export -> evaluate

    python -m scripts.train_embedded_pair --work-dir work-pair --text gsm8k.jsonl --text book.txt
    python -m scripts.train_embedded_pair --work-dir work-pair --stage head

Every stage reads the files of the stages before it in the work folder and goes on where it was
stopped. The head is trained by `scripts.train_eagle3`, as for any other target.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.embedded_pair import corpus, models, publish, tokenizer
from scripts.train_eagle3 import __main__ as eagle3
from scripts.train_eagle3 import features, own_text, training
from specctl import Decoder

SMALL_SHAPE = {"layers": 2, "hidden": 128, "intermediate": 352, "heads": 2, "kv_heads": 2}
SHARES = {"arithmetic": 0.25, "strings": 0.17, "qa": 0.16, "code": 0.2, "prose": 0.1, "chat": 0.12}
"""Of the domains in the prompts of the target's own text."""
CORPUS_FRAC = 0.25  # share of the drafters' rows that are documents and no text of the target
MAX_PROMPT_TOKENS, MAX_NEW_TOKENS, ROW_TOKENS = 220, 128, 256
BATCH_ROWS, LONG_FRAC = 16, 0.15  # the last steps run at twice the length and half the rows


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--stage", choices=(*STAGES, "all"), default="all", help="one stage, or all in order")
    add("--work-dir", type=Path, default=Path("work-pair"), help="checkpoints and logs")
    add("--out", type=Path, default=Path("specctl/embedded"), help="where export writes")
    add("--text", type=Path, action="append", default=[], help="folder, .jsonl or text to train on")
    add("--target-steps", type=int, default=2140, help="updates of 4096 tokens")
    add("--num-prompts", type=int, default=12_800, help="that the target continues")
    add("--head-steps", type=int, default=1080, help="updates of the draft head")
    add("--small-steps", type=int, default=400, help="updates of the small drafter")
    add("--seed", type=int, default=11)
    add("--threads", type=int, default=1)
    return parser.parse_args()


class Workplace:
    """The files of a work folder, and what earlier stages left in them."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.folder = given, given.work_dir
        self.corpus = corpus.finite_documents(given.text)

    def tokenizer(self) -> Any:
        return PreTrainedTokenizerFast.from_pretrained(self.folder / "tokenizer")

    def model(self, name: str, **shape: int) -> Any:
        """The target or the small drafter with the weights of its checkpoint, frozen."""
        model = LlamaForCausalLM(models.target_config(**shape))
        model.load_state_dict(torch.load(self.folder / f"{name}.pt", weights_only=True)["model"])
        return model.eval().requires_grad_(requires_grad=False)

    def mixture(self, seed: int) -> corpus.Mixture:
        return corpus.Mixture(self.tokenizer(), self.corpus, seed)

    def run_eagle3(self, stage: str) -> None:
        """A stage of `scripts.train_eagle3` on this folder's text."""
        pair = self.given
        words = f"--draft-vocab 2048 --intermediate-size 704 --rows {BATCH_ROWS} --data ."
        words += f" --steps {pair.head_steps} --seed {pair.seed + 5} --threads {pair.threads}"
        folders = [
            "--target",
            str(self.folder / "export" / "target"),
            "--work-dir",
            str(self.folder),
        ]
        given = eagle3.parse_arguments([*words.split(), *folders])
        eagle3.STAGES[stage](eagle3.Workplace(given))


def run_tokenizer(place: Workplace) -> None:
    """Trains the tokenizer on every domain's training documents."""
    documents = [d for found in place.corpus.values() for d in found if not d.held_out]
    for category in corpus.MAKERS:
        documents += islice(corpus.problem_documents(category), 8000)
    texts = (d.text or " ".join(f"{q}\n{a}" for q, a in d.turns) for d in documents)
    tokenizer.train_tokenizer(texts).save_pretrained(place.folder / "tokenizer")


def run_target(place: Workplace) -> None:
    """Trains the target, and writes it as a folder that the next stages load."""
    model, num_steps = LlamaForCausalLM(models.target_config()), place.given.target_steps
    mixture = place.mixture(place.given.seed)
    held_out = corpus.validation_rows(place.tokenizer(), place.corpus, 24, 256)

    def loss_at(step: int) -> tuple[Tensor, dict[str, Any]]:
        factor = 2 if step >= num_steps * (1 - LONG_FRAC) else 1
        ids = mixture.batch(BATCH_ROWS // factor, ROW_TOKENS * factor)
        return models.training_loss(model, ids), {"num_tokens": ids.numel()}

    training.run(
        model,
        training.Schedule(num_steps),
        loss_at,
        place.folder / "target.pt",
        lambda _: models.validation_losses(model, held_out),
    )
    publish.write_model(place.model("target"), place.folder / "export" / "target")
    publish.write_tokenizer(place.tokenizer(), place.folder / "export" / "target")


def run_text(place: Workplace) -> None:
    """Text of the target on prompts of every domain, and documents of the corpus among it."""
    seed, encoder, given = place.given.seed, place.tokenizer(), place.given
    rng, streams = random.Random(f"generate/{seed}"), corpus.domains(place.corpus, seed + 1)
    shares = {domain: SHARES[domain] for domain in streams}
    chosen = rng.choices(list(shares), list(shares.values()), k=given.num_prompts)
    found = [
        own_text.Prompt(domain, prompt_ids(encoder, next(streams[domain]), rng))
        for domain in chosen
    ]
    path, target = place.folder / "own_text.jsonl", place.folder / "export" / "target"
    decoder = Decoder.from_pretrained(str(target), policy="ar", dtype="bfloat16", batch_size=64)
    own_text.write_rows(decoder, found, path, MAX_NEW_TOKENS, 1 << 60)
    num_documents = int(given.num_prompts * CORPUS_FRAC / (1 - CORPUS_FRAC))
    ids = place.mixture(seed + 5).batch(num_documents, ROW_TOKENS).tolist()
    rows = [own_text.Row("corpus", tuple(row[:1]), tuple(row[1:])) for row in ids]
    own_text.append_rows(path, rows)


def prompt_ids(encoder: Any, document: corpus.Document, rng: random.Random) -> tuple[int, ...]:
    """The first question of a conversation, or a random head of a plain text."""
    if document.turns:
        return tuple(tokenizer.encode(encoder, document.question())[:MAX_PROMPT_TOKENS])
    ids = tokenizer.encode(encoder, document.render())[:-1]
    return tuple(ids[: max(8, min(MAX_PROMPT_TOKENS, int(len(ids) * rng.uniform(0.05, 0.7))))])


def run_head(place: Workplace) -> None:
    """Trains the EAGLE-3 head."""
    for stage in ("features", "head", "export"):
        place.run_eagle3(stage)


def run_small(place: Workplace) -> None:
    """Trains the small drafter on the same rows."""
    small = LlamaForCausalLM(models.target_config(**SMALL_SHAPE))
    unembedding = place.model("target").get_output_embeddings().weight.to(torch.bfloat16)
    [folder] = place.folder.glob("features-*")
    rows = features.FeatureRows(folder, range(1 << 30))
    batches = rows.batches(BATCH_ROWS, place.given.seed + 9)

    def loss_at(step: int) -> tuple[Tensor, dict[str, Any]]:
        example = next(batches)
        loss = models.small_loss(small, example, unembedding)
        return loss, {"num_tokens": int(example.is_answer.sum())}

    schedule = training.Schedule(place.given.small_steps, decay_frac=0.7)
    training.run(small, schedule, loss_at, place.folder / "small.pt")


def run_export(place: Workplace) -> None:
    """Writes the three folders into the package, whose prompts training must not have seen."""
    out, export = place.given.out, place.folder / "export"
    if (out / "prompts.jsonl").exists():
        corpus.check_unseen(out / "prompts.jsonl", place.corpus)
    publish.write_model(place.model("small", **SMALL_SHAPE), export / "small")
    shutil.copytree(place.folder / "head-export", export / "eagle3", dirs_exist_ok=True)
    for name in ("target", "eagle3", "small"):
        shutil.rmtree(out / name, ignore_errors=True)
        shutil.copytree(export / name, out / name)


def run_evaluate(place: Workplace) -> None:
    """Measures the exported pair and writes `record.json`: how it was made, and what it is."""
    out, stages = place.given.out, {}
    for stage in ("target", "head", "small"):
        saved = torch.load(place.folder / f"{stage}.pt", weights_only=True)
        lines = map(json.loads, (place.folder / f"{stage}.jsonl").read_text().splitlines())
        losses = [row["loss"] for row in lines if "loss" in row]
        stages[stage] = saved["progress"] | {"training_loss_nats": losses[-1]}
    rows, prompts = own_text.read_rows(place.folder / "own_text.jsonl"), out / "prompts.jsonl"
    held_out = corpus.validation_rows(place.tokenizer(), place.corpus, 24, 256)
    own = [row for row in rows if row.source != "corpus"]
    record = {
        "seed": place.given.seed,
        "sources": publish.source_records(place.given.text),
        "stages": stages,
        "generated": {
            "num_texts": len(own),
            "num_tokens": sum(len(row.answer_ids) for row in own),
        },
        "versions": publish.versions(),
        "evaluation": {
            "packaged_prompts": publish.evaluate(out / "target", out / "eagle3", prompts),
            "packaged_prompts_small": publish.evaluate(out / "target", out / "small", prompts),
            "validation_loss_nats": models.validation_losses(place.model("target"), held_out),
        },
    }
    text = json.dumps(record, indent=2, sort_keys=True)
    (out / "record.json").write_text(text + "\n", encoding="utf-8")


ORDER = (run_tokenizer, run_target, run_text, run_head, run_small, run_export, run_evaluate)
STAGES = {stage.__name__.removeprefix("run_"): stage for stage in ORDER}


def main() -> None:
    """Runs the chosen stages."""
    given = parse_arguments()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    place = Workplace(given)
    for stage in STAGES if given.stage == "all" else (given.stage,):
        STAGES[stage](place)


if __name__ == "__main__":
    main()
