"""Documents of every domain, split into train and held-out, and the rows of tokens made of them."""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .problems import MAKERS, chat_stream, doc_turn, equation, generate, stream
from .tokenizer import encode

SKIPPED_FOLDERS = {
    *("test", "tests", "site-packages", "idlelib", "lib2to3", "turtledemo", "pydoc_data"),
    *("encodings", "__pycache__", "idle_test"),
}
HELD_OUT_SEED, TRAIN_SEED = 977, 11
CODE_CHARS = (80, 2400)  # length of a function that is kept
WEIGHTS = {
    "arithmetic": 4.0,
    "drill": 1.0,
    "strings": 5.0,
    "qa": 1.2,
    "code": 2.2,
    "prose": 0.6,
    "chat": 0.8,
}
"""Of the domains in a mixture."""
CONTIGUOUS = {"code", "prose"}  # a document cut by the row's end goes on in the next row


@dataclass(frozen=True)
class Document:
    """A conversation (`turns`) or plain `text`; `held_out` documents never train anything."""

    domain: str
    text: str = ""
    turns: tuple[tuple[str, str], ...] = ()
    held_out: bool = False

    def render(self) -> str:
        """The text as the tokenizer sees it, special tokens written out."""
        if not self.turns:
            return f"<|bos|>{self.text}<|eos|>"
        said = (f"<|user|>\n{q}<|eos|>\n<|assistant|>\n{a}<|eos|>\n" for q, a in self.turns)
        return "<|bos|>" + "".join(said)

    def question(self) -> str:
        """The first turn, up to where its answer begins."""
        return f"<|bos|><|user|>\n{self.turns[0][0]}<|eos|>\n<|assistant|>\n"


def stdlib_files() -> list[Path]:
    """Source files of the standard library, tests and tools left out, in a stable order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.rglob("*.py"))
    return [p for p in files if not SKIPPED_FOLDERS & set(p.relative_to(root).parts)]


def _functions(path: Path) -> Iterator[tuple[str, str, str]]:
    """(qualified name, dedented source, docstring) of each function, method and class of a file."""
    source = path.read_text(encoding="utf-8", errors="ignore")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            yield f"{path.stem}.{node.name}", code, ast.get_docstring(node) or ""


def stdlib_documents() -> Iterator[Document]:
    """Functions and classes as code, and docstrings as chat; whole files are held out."""
    root, seen = Path(sysconfig.get_paths()["stdlib"]), set()
    for path in stdlib_files():
        name_hash = hashlib.sha256(str(path.relative_to(root)).encode()).hexdigest()
        held_out = int(name_hash, 16) % 20 == 0
        for name, code, docstring in _functions(path):
            if CODE_CHARS[0] <= len(code) <= CODE_CHARS[1] and code not in seen:
                seen.add(code)
                yield Document("code", text=code, held_out=held_out)
            if len(docstring) >= 20 and "._" not in name and len(docstring.split("\n\n")[0]) < 300:
                turns = tuple(doc_turn(name, docstring, TRAIN_SEED))
                yield Document("chat", turns=turns, held_out=held_out)


def text_documents(path: Path) -> Iterator[Document]:
    """Question/answer lines of a `.jsonl` file as chat, other files as prose; a folder's files."""
    if path.is_dir():
        for inner in sorted(p for p in path.rglob("*") if p.is_file()):
            yield from text_documents(inner)
    elif path.suffix == ".jsonl":
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            row = json.loads(line)
            turn = row["question"].strip(), _without_calculator(row["answer"])
            yield Document("qa", turns=(turn,), held_out=number % 60 == 7)
    else:
        yield from _prose(_without_licence(path.read_text(encoding="utf-8-sig")))


def _without_calculator(answer: str) -> str:
    """GSM8K's `<<3+4=7>>` notes removed."""
    return "".join(part.split(">>")[-1] for part in answer.split("<<")).strip()


def _without_licence(text: str) -> str:
    """A Gutenberg book without the notices around it."""
    body = text.split("*** START OF")[-1].split("*** END OF")[0]
    return body.split("***", 1)[-1] if len(body) < len(text) else text


def _prose(text: str, chunk_chars: int = 1200) -> Iterator[Document]:
    """Paragraphs unwrapped and joined to chunks; the last twentieth is held out."""
    paragraphs = [" ".join(p.split()) for p in text.replace("\r", "").split("\n\n") if p.strip()]
    chunks, chunk = [], ""
    for paragraph in paragraphs:
        chunk += paragraph + "\n\n"
        if len(chunk) >= chunk_chars:
            chunks.append(chunk.strip())
            chunk = ""
    last = int(len(chunks) * 0.95)
    yield from (Document("prose", text=c, held_out=i >= last) for i, c in enumerate(chunks))


def held_out_problems(category: str, count: int) -> list[Document]:
    """The problems that validation and the prompt file draw from."""
    problems = generate(category, HELD_OUT_SEED, count)
    return [Document(category, turns=((p.prompt, p.solution),), held_out=True) for p in problems]


def problem_documents(category: str, seed: int = TRAIN_SEED) -> Iterator[Document]:
    """Training problems without end, none of them a held-out prompt."""
    taken = {d.turns[0][0] for d in held_out_problems(category, 2000)}
    fresh = (p for p in stream(category, seed) if p.prompt not in taken)
    return (Document(category, turns=((p.prompt, p.solution),)) for p in fresh)


def drill_documents(seed: int = TRAIN_SEED) -> Iterator[Document]:
    """Plain lists of worked equations, without end."""
    rng = Random(f"drill/{seed}")
    while True:
        yield Document("drill", text="\n".join(equation(rng) + "." for _ in range(12)))


def finite_documents(texts: list[Path]) -> dict[str, list[Document]]:
    """Everything that is read rather than generated, by domain, train and held-out together."""
    by_domain: dict[str, list[Document]] = {}
    for document in chain(stdlib_documents(), *map(text_documents, texts)):
        by_domain.setdefault(document.domain, []).append(document)
    for seed, number in ((TRAIN_SEED, 3000), (HELD_OUT_SEED, 60)):
        held_out = seed == HELD_OUT_SEED
        chats = islice(chat_stream(seed), number)
        by_domain["chat"] += [Document("chat", turns=tuple(t), held_out=held_out) for t in chats]
    return {domain: _deduplicated(found) for domain, found in by_domain.items()}


def check_unseen(prompts: Path, finite: dict[str, list[Document]]) -> None:
    """Refuses a prompt of a prompt file that a training document holds."""
    train = [d for found in finite.values() for d in found if not d.held_out]
    questions, text = {q for d in train for q, _ in d.turns}, "\n".join(d.text for d in train)
    rows = map(json.loads, prompts.read_text("utf-8").splitlines())
    known = [p for row in rows if (p := row["prompt"]) in questions or p in text]
    if known:
        raise ValueError(f"prompts that training saw: {known}")


def _deduplicated(documents: list[Document]) -> list[Document]:
    """Training documents distinct from each other; held-out ones that also train are dropped."""
    train = {d.render(): d for d in documents if not d.held_out}
    held = {d.render(): d for d in documents if d.held_out and d.render() not in train}
    kept = [*train.values(), *held.values()]
    Random(TRAIN_SEED).shuffle(kept)
    return kept


def endless(documents: list[Document], seed: int) -> Iterator[Document]:
    """The training documents again and again, reshuffled every time."""
    train, rng = [d for d in documents if not d.held_out], Random(seed)
    while train:
        rng.shuffle(train)
        yield from train


def domains(finite: dict[str, list[Document]], seed: int) -> dict[str, Iterator[Document]]:
    """Endless training documents by domain."""
    streams = {domain: endless(found, seed) for domain, found in finite.items()}
    return streams | {category: problem_documents(category, seed) for category in MAKERS}


@dataclass
class Stream:
    """Endless tokens of one domain."""

    documents: Iterator[Document]
    tokenizer: PreTrainedTokenizerFast
    is_contiguous: bool
    left: list[int] = field(default_factory=list)

    def row(self, length: int) -> list[int]:
        """The next `length` tokens; starts a document unless the domain is contiguous."""
        tokens = self.left if self.is_contiguous else []
        while len(tokens) < length:
            tokens = tokens + encode(self.tokenizer, next(self.documents).render())
        self.left = tokens[length:]
        return tokens[:length]


class Mixture:
    """Batches `[rows, length]` of token ids, each row from one domain."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, finite: dict[str, list[Document]], seed: int
    ) -> None:
        sources = {**domains(finite, seed), "drill": drill_documents(seed)}
        self.streams = {d: Stream(s, tokenizer, d in CONTIGUOUS) for d, s in sources.items()}
        self.weights = [WEIGHTS[domain] for domain in self.streams]
        self.rng = Random(seed)

    def batch(self, rows: int, length: int) -> Tensor:
        """Token ids [rows, length] i64."""
        chosen = self.rng.choices(list(self.streams), self.weights, k=rows)
        return torch.tensor([self.streams[domain].row(length) for domain in chosen])


def validation_rows(
    tokenizer: PreTrainedTokenizerFast, finite: dict[str, list[Document]], rows: int, length: int
) -> dict[str, Tensor]:
    """Held-out token ids by domain, [<= rows, length] i64."""
    held = {domain: [d for d in found if d.held_out] for domain, found in finite.items()}
    held |= {category: held_out_problems(category, 300) for category in MAKERS}
    packed = {}
    for domain, documents in held.items():
        tokens = (t for d in documents for t in encode(tokenizer, d.render()))
        flat = list(islice(tokens, rows * length))
        packed[domain] = torch.tensor(flat[: len(flat) // length * length]).view(-1, length)
    return packed
