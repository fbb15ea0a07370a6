"""Documents of every domain, each with its chat or plain form, split into train and held-out."""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from .arithmetic import equation
from .chat import chat_stream, doc_turn
from .problems import generate, stream

SKIPPED_FOLDERS = {
    "test",
    "tests",
    "site-packages",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "pydoc_data",
    "encodings",
    "__pycache__",
    "idle_test",
}
HELD_OUT_SEED, TRAIN_SEED = 977, 11
CODE_CHARS = (80, 2400)  # length of a function that is kept
Turns = list[tuple[str, str]]


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

    def prompt(self, frac: float = 0.3) -> str:
        """What a generation starts from: the first question, or the head of a plain text."""
        if self.turns:
            return f"<|bos|><|user|>\n{self.turns[0][0]}<|eos|>\n<|assistant|>\n"
        return "<|bos|>" + self.text[: min(600, max(60, int(len(self.text) * frac)))].rstrip()


def _is_held_out(key: str, one_in: int) -> bool:
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % one_in == 0


def stdlib_files() -> list[Path]:
    """Source files of the standard library, tests and tools left out, in a stable order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [
        p
        for p in sorted(root.rglob("*.py"))
        if not SKIPPED_FOLDERS & set(p.relative_to(root).parts)
    ]


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
        held_out = _is_held_out(str(path.relative_to(root)), 20)
        for name, code, docstring in _functions(path):
            if CODE_CHARS[0] <= len(code) <= CODE_CHARS[1] and code not in seen:
                seen.add(code)
                yield Document("code", text=code, held_out=held_out)
            if len(docstring) >= 20 and "._" not in name and len(docstring.split("\n\n")[0]) < 300:
                yield Document(
                    "chat", turns=tuple(doc_turn(name, docstring, TRAIN_SEED)), held_out=held_out
                )


def text_documents(path: Path) -> Iterator[Document]:
    """Question/answer lines of a `.jsonl` file as chat, other files as prose; a folder's files."""
    if path.is_dir():
        for inner in sorted(p for p in path.rglob("*") if p.is_file()):
            yield from text_documents(inner)
    elif path.suffix == ".jsonl":
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            row = json.loads(line)
            answer = _without_calculator(row["answer"])
            yield Document(
                "qa", turns=((row["question"].strip(), answer),), held_out=number % 60 == 7
            )
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
    documents = [*stdlib_documents(), *(d for path in texts for d in text_documents(path))]
    for document in documents:
        by_domain.setdefault(document.domain, []).append(document)
    by_domain["chat"] += [
        Document("chat", turns=tuple(t)) for t in islice(chat_stream(TRAIN_SEED), 3000)
    ]
    by_domain["chat"] += [
        Document("chat", turns=tuple(t), held_out=True)
        for t in islice(chat_stream(HELD_OUT_SEED), 60)
    ]
    return {domain: _deduplicated(found) for domain, found in by_domain.items()}


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
