"""One function a stage; each reads and writes files of the work folder."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from specctl.runtime.eagle3 import load_eagle3, save_eagle3

from .batches import Mixture, validation_rows
from .corpus import Document, finite_documents, problem_documents
from .drafters import MixedRows, train_head, train_small
from .evaluate import evaluate_pair, read_eval_file, read_prompts, runtime_acceptance
from .export import copy_pair, source_records, versions, write_model, write_record, write_tokenizer
from .generate import Sample, training_samples
from .head import new_head
from .prompts import write_prompts
from .target import Schedule, run, target_config, training_loss, validation_losses
from .tokenizer import load_tokenizer, train_tokenizer

COVERAGE = 0.995  # of generated tokens that the draft vocabulary holds
SMALL_SHAPE = {"layers": 2, "hidden": 128, "intermediate": 352, "heads": 2, "kv_heads": 2}


def _corpus(arguments: Namespace) -> dict[str, list[Document]]:
    return finite_documents(arguments.text)


def _tokenizer(arguments: Namespace) -> PreTrainedTokenizerFast:
    return load_tokenizer(arguments.work_dir / "tokenizer")


def trained(path: Path, model: torch.nn.Module) -> torch.nn.Module:
    """`model` with the weights of a checkpoint, frozen."""
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    return model.eval().requires_grad_(requires_grad=False)


def load_target(arguments: Namespace) -> LlamaForCausalLM:
    """The target as its latest checkpoint has it."""
    return trained(arguments.work_dir / "target.pt", LlamaForCausalLM(target_config()))


def run_tokenizer(arguments: Namespace) -> None:
    """Trains the tokenizer on every domain's training documents."""
    finite = _corpus(arguments)
    documents = [d for found in finite.values() for d in found if not d.held_out]
    for category in ("arithmetic", "strings"):
        documents += islice(problem_documents(category), 8000)
    texts = (d.text or " ".join(f"{q}\n{a}" for q, a in d.turns) for d in documents)
    train_tokenizer(texts).save_pretrained(arguments.work_dir / "tokenizer")


def run_target(arguments: Namespace) -> None:
    """Trains the target and saves it as a checkpoint in the work folder."""
    tokenizer, finite = _tokenizer(arguments), _corpus(arguments)
    model, schedule = LlamaForCausalLM(target_config()), Schedule(arguments.target_steps)
    held_out = validation_rows(tokenizer, finite)

    def losses(first: int) -> Iterator[Callable[[], Tensor]]:
        mixture = Mixture(tokenizer, finite, arguments.seed + first)
        for step in range(first, schedule.num_steps):
            batch = mixture.batch(*schedule.shape(step))
            yield lambda batch=batch: training_loss(model, batch)

    run(
        model,
        schedule,
        losses,
        checkpoint=arguments.work_dir / "target.pt",
        log=arguments.work_dir / "target.jsonl",
        is_resumed=arguments.resume,
        evaluate=lambda: validation_losses(model, held_out),
    )


def run_generate(arguments: Namespace) -> None:
    """Adds files of the target's own text, one a batch; their number goes on from what is there."""
    folder = arguments.work_dir / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    first = len(list(folder.iterdir()))
    target = load_target(arguments).to(torch.bfloat16)
    batches = training_samples(
        target,
        _tokenizer(arguments),
        _corpus(arguments),
        num_batches=arguments.generate_batches,
        seed=arguments.seed + first,
    )
    for number, samples in enumerate(batches, start=first):
        rows = [(s.domain, s.token_ids, s.num_prompt) for s in samples]
        torch.save(rows, folder / f"{number:05d}.pt")


def load_samples(arguments: Namespace) -> list[Sample]:
    """All generated text so far."""
    files = sorted((arguments.work_dir / "generated").glob("*.pt"))
    return [Sample(*row) for file in files for row in torch.load(file, weights_only=True)]


def _counts(batches: Tensor) -> Tensor:
    return torch.bincount(batches.flatten(), minlength=target_config().vocab_size)


def draft_vocabulary(samples: list[Sample], corpus_rows: Tensor) -> tuple[Tensor, float]:
    """Sorted target ids: the most frequent, in multiples of 256, and their coverage."""
    own = _counts(torch.tensor([t for s in samples for t in s.token_ids[s.num_prompt :]] or [0]))
    # Corpus counts only break ties among tokens that the target hardly ever writes.
    order = (own + 1e-3 * _counts(corpus_rows)).argsort(descending=True)
    covered = own[order].cumsum(0) / own.sum()
    size = next(n for n in range(256, len(order) + 1, 256) if covered[n - 1] >= COVERAGE)
    size = max(size, 2048)
    return order[:size].sort().values, float(covered[size - 1])


def _rows(arguments: Namespace, samples: list[Sample], seed: int) -> MixedRows:
    mixture = Mixture(_tokenizer(arguments), _corpus(arguments), seed)
    return MixedRows(mixture, samples, seed)


def run_head(arguments: Namespace) -> None:
    """Trains the EAGLE-3 head; `--head-from` starts from an earlier head's weights."""
    target, samples = load_target(arguments), load_samples(arguments)
    rows = _rows(arguments, samples, arguments.seed + 5)
    ids_path = arguments.work_dir / "draft_ids.pt"
    if not ids_path.exists():
        torch.save(draft_vocabulary(samples, rows.mixture.batch(2000, 256))[0], ids_path)
    draft_ids = torch.load(ids_path, weights_only=True)
    head = new_head(target, draft_ids)
    if arguments.head_from is not None:
        start_from(head, torch.load(arguments.head_from, weights_only=True)["model"])
    train_head(
        head,
        target,
        rows,
        Schedule(arguments.head_steps, muon_lr=0.01, adam_lr=1.5e-3, decay_frac=0.7, long_frac=0.2),
        checkpoint=arguments.work_dir / "head.pt",
        log=arguments.work_dir / "head.jsonl",
        is_resumed=arguments.resume,
    )


@torch.no_grad()
def start_from(head: torch.nn.Module, earlier: dict[str, Tensor]) -> None:
    """Takes over an earlier head's weights but the embedding; `lm_head` rows by target id."""
    old_ids = earlier["d2t"] + torch.arange(len(earlier["d2t"]))
    row_of = {int(t): i for i, t in enumerate(old_ids)}
    for name, parameter in head.named_parameters():
        if name == "lm_head.weight":
            pairs = [(i, row_of[t]) for i, t in enumerate(head.target_ids.tolist()) if t in row_of]
            ours, theirs = map(list, zip(*pairs, strict=True))
            parameter[ours] = earlier[name][theirs]
        elif name != "embedding":
            parameter.copy_(earlier[name])


def run_small(arguments: Namespace) -> None:
    """Trains the small drafter."""
    target, samples = load_target(arguments), load_samples(arguments)
    small = LlamaForCausalLM(target_config(**SMALL_SHAPE))
    train_small(
        small,
        target,
        _rows(arguments, samples, arguments.seed + 9),
        Schedule(arguments.small_steps, decay_frac=0.7),
        checkpoint=arguments.work_dir / "small.pt",
        log=arguments.work_dir / "small.jsonl",
        is_resumed=arguments.resume,
    )


def run_export(arguments: Namespace) -> None:
    """Writes the three folders and the prompt file into the package."""
    folder, target = arguments.work_dir / "export", load_target(arguments)
    draft_ids = torch.load(arguments.work_dir / "draft_ids.pt", weights_only=True)
    head = trained(arguments.work_dir / "head.pt", new_head(target, draft_ids))
    head.set_vocabulary(head.d2t)
    save_eagle3(head.to(torch.bfloat16), folder / "eagle3")
    write_model(target, folder / "target")
    write_tokenizer(_tokenizer(arguments), folder / "target")
    small = LlamaForCausalLM(target_config(**SMALL_SHAPE))
    write_model(trained(arguments.work_dir / "small.pt", small), folder / "small")
    train = [d for found in _corpus(arguments).values() for d in found if not d.held_out]
    write_prompts(arguments.out / "prompts.jsonl", train)
    print(f"{copy_pair(arguments.work_dir, arguments.out)} bytes")


def run_evaluate(arguments: Namespace) -> None:
    """Measures the exported pair, as a user would load it, and writes `record.json`."""
    out = arguments.out
    target = LlamaForCausalLM.from_pretrained(out / "target", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(out / "target")
    embedding = target.get_input_embeddings().weight
    head = load_eagle3(out / "eagle3", target_embedding=embedding, target_config=target.config)
    prompts = [p for path in arguments.text_eval for p in read_eval_file(path)]
    results = {
        "packaged_prompts": evaluate_pair(
            target, head, tokenizer, read_prompts(out / "prompts.jsonl")
        ),
        "runtime_mean_acceptance_length": {
            drafter: runtime_acceptance(out / "prompts.jsonl", drafter)
            for drafter in ("embedded", "embedded:small")
        },
        "given_files": evaluate_pair(target, head, tokenizer, prompts) if prompts else {},
        "validation_loss_nats": validation_losses(
            target, validation_rows(tokenizer, _corpus(arguments))
        ),
    }
    write_record(out, training_record(arguments) | {"evaluation": results})


def training_record(arguments: Namespace) -> dict[str, object]:
    """Sources, seed, steps, tokens, times and last losses of every stage."""
    stages = {}
    for stage in ("target", "head", "small"):
        saved = torch.load(arguments.work_dir / f"{stage}.pt", weights_only=True)
        lines = (arguments.work_dir / f"{stage}.jsonl").read_text().splitlines()
        last = [row for line in lines if "loss" in (row := json.loads(line))][-1]
        stages[stage] = saved["progress"] | {"training_loss_nats": last["loss"]}
    samples, history = load_samples(arguments), arguments.work_dir / "history.json"
    return {
        "history": json.loads(history.read_text()) if history.exists() else [],
        "seed": arguments.seed,
        "sources": source_records(arguments.text),
        "stages": stages,
        "generated": {"num_texts": len(samples), "num_tokens": _num_generated(samples)},
        "versions": versions(),
        "settings": {"tree": "6 levels, top_k 8, 48 nodes, greedy", "max_new_tokens": 128},
    }


def _num_generated(samples: list[Sample]) -> int:
    return sum(len(s.token_ids) - s.num_prompt for s in samples)
