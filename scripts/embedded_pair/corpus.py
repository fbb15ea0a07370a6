"""Documents of every domain, for training or held out, and the rows of tokens made of them."""

from __future__ import annotations

import ast
import json
import sysconfig
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from itertools import chain, cycle, islice, product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.train_eagle3.prompts import read_lines

from .problems import SAID, generate, stream

SKIPPED_FOLDERS = {"test", "tests", "site-packages", "idlelib", "lib2to3", "encodings"}
HELD_OUT_SEED, TRAIN_SEED, HELD_OUT_FRAC = 977, 11, 0.05
NUM_PROBLEMS, NUM_HELD_OUT_PROBLEMS, NUM_CHATS = 40_000, 2_000, 3_000
CODE_CHARS, PROSE_CHARS = (80, 2400), 1200  # length of a function that is kept, of a passage
WEIGHTS = {"arithmetic": 4.0, "strings": 5.0, "qa": 1.2, "code": 2.2, "prose": 0.6, "chat": 0.8}
"""Of the domains in a mixture."""
CONTIGUOUS = {"code", "prose"}  # a document cut by the row's end goes on in the next row


class Document(NamedTuple):
    """Plain text, or the answer to a `question`; `held_out` documents never train anything."""

    domain: str
    text: str
    question: str = ""
    held_out: bool = False

    def render(self) -> str:
        """The text as the tokenizer sees it, special tokens written out."""
        if not self.question:
            return f"<|bos|>{self.text}<|eos|>"
        return f"<|bos|><|user|>\n{self.question}<|eos|>\n<|assistant|>\n{self.text}<|eos|>\n"


Documents = Mapping[str, Sequence[Document]]  # by domain


@cache
def read_documents(texts: tuple[Path, ...]) -> tuple[Documents, Documents]:
    """Documents that train, and held-out ones that are none of them."""
    rest = (chat_documents(), *map(problem_documents, SAID["kinds"]), *map(text_documents, texts))
    found: dict[bool, dict[str, list[Document]]] = {b: defaultdict(list) for b in (False, True)}
    for document in chain(stdlib_documents(), *rest):
        found[document.held_out][document.domain].append(document)
    train, held_out = found.values()
    for domain, documents in held_out.items():
        known = {d.render() for d in train[domain]}
        held_out[domain] = [d for d in documents if d.render() not in known]
    return train, held_out


def is_held_out(name: str) -> bool:
    """Whether the document of the name is one of the 20th part that never trains anything."""
    return int.from_bytes(sha256(name.encode()).digest()[:4], "big") / 2**32 < HELD_OUT_FRAC


def stdlib_documents() -> Iterator[Document]:
    """Functions and classes of the standard library as code, docstrings as chat, by whole files."""
    root, seen = Path(sysconfig.get_paths()["stdlib"]), set()
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS & set(path.relative_to(root).parts):
            continue
        source, held_out = path.read_text("utf-8", errors="ignore"), is_held_out(path.name)
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if CODE_CHARS[0] <= len(code) <= CODE_CHARS[1] and code not in seen:
                seen.add(code)
                yield Document("code", code, held_out=held_out)
            name, docstring = f"{path.stem}.{node.name}", ast.get_docstring(node) or ""
            first = " ".join(docstring.split("\n\n")[0].split())
            if 20 <= len(first) < 300 and "._" not in name:
                question = Random(f"doc/{name}").choice(SAID["doc"]).format(name)
                yield Document("chat", first, question, held_out)


def chat_documents() -> Iterator[Document]:
    """Short questions with their answers, again and again."""
    found = []
    for asks, answer, facts in SAID["chat"]:
        for ask, (subject, fact) in product(asks, facts.items()):
            question, text = ask.format(subject), answer.format(subject, fact)
            found.append(Document("chat", text, question, is_held_out(question)))
    return islice(cycle(found), NUM_CHATS)


def problem_documents(category: str) -> Iterator[Document]:
    """Held-out problems, whose first ones are the packaged prompts, and training problems."""
    held_out = generate(category, HELD_OUT_SEED, NUM_HELD_OUT_PROBLEMS)
    prompts = {problem.prompt for problem in held_out}
    fresh = (p for p in stream(category, TRAIN_SEED) if p.prompt not in prompts)
    for problem in (*held_out, *islice(fresh, NUM_PROBLEMS)):
        yield Document(category, problem.solution, problem.prompt, problem.prompt in prompts)


def text_documents(path: Path) -> Iterator[Document]:
    """Questions and answers of a `.jsonl` file of GSM8K, passages of any other file."""
    text = path.read_text("utf-8-sig")
    if path.suffix == ".jsonl":
        for row in map(json.loads, text.splitlines()):
            # Notes of the calculator, <<3+4=7>>, go.
            answer = "".join(part.split(">>")[-1] for part in row["answer"].split("<<"))
            question = row["question"].strip()
            yield Document("qa", answer.strip(), question, is_held_out(question))
        return
    book = text.split("*** START OF")[-1].split("*** END OF")[0]  # Gutenberg's notices go
    passage = ""
    for paragraph in book.split("\n\n"):
        passage += " ".join(paragraph.split()) + "\n\n"
        if len(passage) >= PROSE_CHARS:
            yield Document("prose", passage.strip(), held_out=is_held_out(passage))
            passage = ""


def check_unseen(prompts: Path, documents: Documents) -> None:
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
    tokenizer: Any, documents: Documents, seed: int, num_rows: int, num_tokens: int
) -> Iterator[Tensor]:
    """Token ids `[num_rows, num_tokens]` without end, each row from documents of one domain."""
    rng, left = Random(seed), dict[str, list[int]]()
    streams = {domain: endless(found, seed) for domain, found in documents.items()}
    weights = [WEIGHTS[domain] for domain in streams]
    while True:
        rows = []
        for domain in rng.choices(list(streams), weights, k=num_rows):
            tokens = left.get(domain, [])
            while len(tokens) < num_tokens:
                text = next(streams[domain]).render()
                tokens = tokens + tokenizer.encode(text, add_special_tokens=False)
            left[domain] = tokens[num_tokens:] if domain in CONTIGUOUS else []
            rows.append(tokens[:num_tokens])
        yield torch.tensor(rows)
