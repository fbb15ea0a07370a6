"""Trains the embedded pair.

corpus -> tokenizer -> target -> generate -> head -> small -> export -> evaluate

    python scripts/train_embedded_pair.py --work-dir work-pair --text gsm8k.jsonl --text book.txt
    python scripts/train_embedded_pair.py --work-dir work-pair --stage head --resume --seed 12

Every stage reads the files of the stages before it in the work folder, so one can be run alone.
`embedded_pair.head` and `embedded_pair.own_text` know nothing of this pair: they train a head for
any Llama, on any device.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from embedded_pair import corpus, head, own_text, publish, tokenizer, training  # noqa: E402

INTERMEDIATE = 704
SMALL_SHAPE = {"layers": 2, "hidden": 128, "intermediate": 352, "heads": 2, "kv_heads": 2}
SHARES = {"arithmetic": 0.25, "strings": 0.17, "qa": 0.16, "code": 0.2, "prose": 0.1, "chat": 0.12}
"""Of the domains in the prompts of the target's own text."""
SELF_FRAC = 0.75  # share of the drafters' batches made of that text
BATCH, MAX_PROMPT_TOKENS, MAX_NEW_TOKENS = 64, 220, 128


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
    add("--generate-batches", type=int, default=200, help="batches of 64 continuations")
    add("--head-steps", type=int, default=1080, help="updates of the draft head")
    add("--small-steps", type=int, default=400, help="updates of the small drafter")
    add("--resume", action="store_true", help="go on from the checkpoint; best with another seed")
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

    def trained(self, name: str, model: nn.Module) -> Any:
        """The model with the weights of a checkpoint, frozen."""
        saved = torch.load(self.folder / f"{name}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        return model.eval().requires_grad_(requires_grad=False)

    def target(self) -> Any:
        return self.trained("target", LlamaForCausalLM(training.target_config()))

    def samples(self) -> list[own_text.Sample]:
        """All text of the target so far."""
        files = sorted((self.folder / "generated").glob("*.pt"))
        rows = (row for file in files for row in torch.load(file, weights_only=True))
        return [own_text.Sample(tuple(ids), num_prompt) for ids, num_prompt in rows]

    def mixture(self, seed: int) -> corpus.Mixture:
        return corpus.Mixture(self.tokenizer(), self.corpus, seed)

    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, chosen once."""
        path = self.folder / "draft_ids.pt"
        if not path.exists():
            others = self.mixture(self.given.seed + 5).batch(2000, 256)
            torch.save(own_text.draft_vocabulary(self.samples(), others, training.VOCAB_SIZE), path)
        return torch.load(path, weights_only=True)


class DrafterRows:
    """Batches of the target's own text, or of the corpus where there is none or by chance."""

    def __init__(self, place: Workplace, seed: int) -> None:
        samples = place.samples()
        self.mixture = place.mixture(seed)
        self.own = own_text.SampleRows(samples, seed) if samples else None
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Token ids `[rows, length]` and where text of interest stands, bool."""
        if self.own is not None and float(torch.rand((), generator=self.generator)) < SELF_FRAC:
            return self.own.batch(rows, length)
        ids = self.mixture.batch(rows, length)
        return ids, torch.ones_like(ids, dtype=torch.bool)


def run_tokenizer(place: Workplace) -> None:
    """Trains the tokenizer on every domain's training documents."""
    documents = [d for found in place.corpus.values() for d in found if not d.held_out]
    for category in corpus.MAKERS:
        documents += islice(corpus.problem_documents(category), 8000)
    texts = (d.text or " ".join(f"{q}\n{a}" for q, a in d.turns) for d in documents)
    tokenizer.train_tokenizer(texts).save_pretrained(place.folder / "tokenizer")


def run_target(place: Workplace) -> None:
    """Trains the target."""
    model = LlamaForCausalLM(training.target_config())
    schedule = training.Schedule(place.given.target_steps)
    mixture = place.mixture(place.given.seed)
    held_out = corpus.validation_rows(place.tokenizer(), place.corpus, 24, 256)
    training.run(
        model,
        schedule,
        lambda step: (training.training_loss(model, mixture.batch(*schedule.shape(step))), {}),
        place.folder / "target.pt",
        is_resumed=place.given.resume,
        evaluate=lambda: training.validation_losses(model, held_out),
    )


def run_generate(place: Workplace) -> None:
    """Adds files of the target's own text, a batch of one domain each, every other one greedy."""
    folder = place.folder / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    first = len(list(folder.iterdir()))
    seed, target, encoder = place.given.seed + first, place.target(), place.tokenizer()
    rng, streams = random.Random(f"generate/{seed}"), corpus.domains(place.corpus, seed + 1)
    shares = {domain: SHARES[domain] for domain in streams}
    target = target.to(torch.bfloat16)
    for number in range(first, first + place.given.generate_batches):
        [domain] = rng.choices(list(shares), list(shares.values()))
        documents = islice(streams[domain], BATCH)
        prompts = sorted((prompt_ids(encoder, document, rng) for document in documents), key=len)
        found = own_text.continued(target, prompts, MAX_NEW_TOKENS, sampled=number % 2 == 1)
        torch.save([(s.token_ids, s.num_prompt) for s in found], folder / f"{number:05d}.pt")


def prompt_ids(encoder: Any, document: corpus.Document, rng: random.Random) -> list[int]:
    """The first question of a conversation, or a random head of a plain text."""
    if document.turns:
        return tokenizer.encode(encoder, document.question())[:MAX_PROMPT_TOKENS]
    ids = tokenizer.encode(encoder, document.render())[:-1]
    return ids[: max(8, min(MAX_PROMPT_TOKENS, int(len(ids) * rng.uniform(0.05, 0.7))))]


def run_head(place: Workplace) -> None:
    """Trains the EAGLE-3 head; the log also has the top-1 agreement of each unrolled step."""
    target, rows = place.target(), DrafterRows(place, place.given.seed + 5)
    drafter = head.new_head(target, place.draft_ids(), INTERMEDIATE)
    schedule = training.Schedule(place.given.head_steps)

    def loss_at(step: int) -> tuple[Tensor, dict[str, Any]]:
        ids, marks = rows.batch(*schedule.shape(step))
        slots = head.choose_slots(marks, rows.generator)
        loss, agreements = head.head_loss(drafter, head.annotate(target, drafter, ids), slots)
        return loss, {"agreement": [round(one, 3) for one in agreements]}

    path = place.folder / "head.pt"
    training.run(drafter, schedule, loss_at, path, is_resumed=place.given.resume)


def run_small(place: Workplace) -> None:
    """Trains the small drafter."""
    target, rows = place.target(), DrafterRows(place, place.given.seed + 9)
    small = LlamaForCausalLM(training.target_config(**SMALL_SHAPE))
    schedule = training.Schedule(place.given.small_steps, decay_frac=0.7)
    training.run(
        small,
        schedule,
        lambda step: (head.small_loss(small, target, rows.batch(*schedule.shape(step))[0]), {}),
        place.folder / "small.pt",
        is_resumed=place.given.resume,
    )


def run_export(place: Workplace) -> None:
    """Writes the three folders into the package, whose prompts training must not have seen."""
    out, export, target = place.given.out, place.folder / "export", place.target()
    if (out / "prompts.jsonl").exists():
        corpus.check_unseen(out / "prompts.jsonl", place.corpus)
    drafter = place.trained("head", head.new_head(target, place.draft_ids(), INTERMEDIATE))
    drafter.set_vocabulary(drafter.d2t)
    head.save_head(drafter.to(torch.bfloat16), export / "eagle3")
    publish.write_model(target, export / "target")
    publish.write_tokenizer(place.tokenizer(), export / "target")
    small = place.trained("small", LlamaForCausalLM(training.target_config(**SMALL_SHAPE)))
    publish.write_model(small, export / "small")
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
    samples, prompts = place.samples(), out / "prompts.jsonl"
    held_out = corpus.validation_rows(place.tokenizer(), place.corpus, 24, 256)
    num_tokens = sum(len(s.token_ids) - s.num_prompt for s in samples)
    record = {
        "seed": place.given.seed,
        "sources": publish.source_records(place.given.text),
        "stages": stages,
        "generated": {"num_texts": len(samples), "num_tokens": num_tokens},
        "versions": publish.versions(),
        "evaluation": {
            "packaged_prompts": publish.evaluate(out / "target", out / "eagle3", prompts),
            "packaged_prompts_small": publish.evaluate(out / "target", out / "small", prompts),
            "validation_loss_nats": training.validation_losses(place.target(), held_out),
        },
    }
    text = json.dumps(record, indent=2, sort_keys=True)
    (out / "record.json").write_text(text + "\n", encoding="utf-8")


ORDER = (run_tokenizer, run_target, run_generate, run_head, run_small, run_export, run_evaluate)
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
