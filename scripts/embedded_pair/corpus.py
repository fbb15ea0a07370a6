"""Documents of every domain, for training or held out, and the rows of tokens made of them."""

from __future__ import annotations

import ast
import re
import sysconfig
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, cycle, islice, product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.train_eagle3.own_text import number_of
from scripts.train_eagle3.prompts import read_lines

from .problems import SAID, generate, stream

SKIPPED_FOLDERS = {"test", "tests", "site-packages", "idlelib", "lib2to3", "encodings"}
HELD_OUT_SEED, TRAIN_SEED, HELD_OUT_FRAC = 977, 11, 0.05
NUM_PROBLEMS, NUM_HELD_OUT_PROBLEMS, NUM_CHATS = 40_000, 2_000, 3_000
CODE_CHARS, PROSE_CHARS = (80, 2400), 1200  # length of a function that is kept, of a passage
WEIGHTS = {"arithmetic": 4.0, "strings": 5.0, "qa": 1.2, "code": 2.2, "prose": 0.6, "chat": 0.8}
"""Of the domains in a mixture."""


class Document(NamedTuple):
    """Plain text, or the answer to a `question`."""

    domain: str
    text: str
    question: str = ""

    def render(self) -> str:
        """The text as the tokenizer sees it, special tokens written out."""
        if not self.question:
            return f"<|bos|>{self.text}<|eos|>"
        return f"<|bos|><|user|>\n{self.question}<|eos|>\n<|assistant|>\n{self.text}<|eos|>\n"


@cache
def read_documents(texts: tuple[Path, ...]) -> list[dict[str, list[Document]]]:
    """By domain: documents that train, and those that are held out, the 20th part."""
    rest = (chat_documents(), *map(problem_documents, SAID["kinds"]), *map(text_documents, texts))
    found: list[dict[str, list[Document]]] = [defaultdict(list), defaultdict(list)]
    for document in chain(stdlib_documents(), *rest):
        is_held_out = number_of(document.question or document.text) < HELD_OUT_FRAC
        found[is_held_out][document.domain].append(document)
    return found


def stdlib_documents() -> Iterator[Document]:
    """Functions and classes of the standard library as code, their docstrings as chat."""
    root, seen = Path(sysconfig.get_paths()["stdlib"]), set()
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS & set(path.relative_to(root).parts):
            continue
        source = path.read_text("utf-8", errors="ignore")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if CODE_CHARS[0] <= len(code) <= CODE_CHARS[1] and code not in seen:
                seen.add(code)
                yield Document("code", code)
            name, docstring = f"{path.stem}.{node.name}", ast.get_docstring(node) or ""
            first = " ".join(docstring.split("\n\n")[0].split())
            if 20 <= len(first) < 300 and "._" not in name:
                question = Random(f"doc/{name}").choice(SAID["doc"]).format(name)
                yield Document("chat", first, question)


def chat_documents() -> Iterator[Document]:
    """Short questions with their answers, again and again."""
    found = []
    for asks, answer, facts in SAID["chat"]:
        for ask, (subject, fact) in product(asks, facts.items()):
            found.append(Document("chat", answer.format(subject, fact), ask.format(subject)))
    return islice(cycle(found), NUM_CHATS)


def problem_documents(category: str) -> Iterator[Document]:
    """Problems, of which none is one of the first held-out ones: those are the packaged prompts."""
    packaged = {p.prompt for p in generate(category, HELD_OUT_SEED, NUM_HELD_OUT_PROBLEMS)}
    fresh = (p for p in stream(category, TRAIN_SEED) if p.prompt not in packaged)
    return (Document(category, p.solution, p.prompt) for p in islice(fresh, NUM_PROBLEMS))


def text_documents(path: Path) -> Iterator[Document]:
    """Questions and answers of a `.jsonl` file of GSM8K, passages of any other file, of a book from
    Gutenberg without the notices around it."""
    if path.suffix == ".jsonl":
        for row in read_lines(path):
            answer = re.sub("<<.*?>>", "", row["answer"])  # without notes of a calculator
            yield Document("qa", answer, row["question"])
        return
    book = path.read_text("utf-8-sig").split("*** START OF")[-1].split("*** END OF")[0]
    passage = ""
    for paragraph in book.split("\n\n"):
        passage += " ".join(paragraph.split()) + "\n\n"
        if len(passage) >= PROSE_CHARS:
            yield Document("prose", passage.strip())
            passage = ""


def check_unseen(prompts: Path, documents: dict[str, list[Document]]) -> None:
    """Refuses a prompt of a prompt file that a training document holds."""
    train = list(chain(*documents.values()))
    questions = {d.question for d in train}
    text = "\n".join(d.text for d in train if not d.question)
    known = [p for row in read_lines(prompts) if (p := row["prompt"]) in questions or p in text]
    if known:
        raise ValueError(f"prompts that training saw: {known}")


def endless(documents: Sequence[Document], seed: int) -> Iterator[Document]:
    """The documents again and again, reshuffled every time."""
    rng = Random(seed)
    while True:
        yield from rng.sample(documents, len(documents))


def batches(
    tokenizer: Any, documents: dict[str, list[Document]], seed: int, num_rows: int, num_tokens: int
) -> Iterator[Tensor]:
    """Token ids `[num_rows, num_tokens]` without end, each row from documents of one domain, of
    which the row's end cuts the last."""
    rng = Random(seed)
    streams = {domain: endless(found, seed) for domain, found in documents.items()}
    weights = [WEIGHTS[domain] for domain in streams]
    while True:
        rows = []
        for domain in rng.choices(list(streams), weights, k=num_rows):
            tokens: list[int] = []
            while len(tokens) < num_tokens:
                text = next(streams[domain]).render()
                tokens += tokenizer.encode(text, add_special_tokens=False)
            rows.append(tokens[:num_tokens])
        yield torch.tensor(rows)
