"""The error tree. Each error is one sentence, with a hint for the next step.

Exit codes: 2 options, 3 artifacts, 4 data, 5 models, 6 places, 7 registries, 8 engines, 10 memory,
11 clocks, 70 a bug; docs/cli.md has those of each type. A command ended by Ctrl-C exits with 130,
one ended by SIGTERM with 143, after keeping what is finished.
"""

from __future__ import annotations

import copyreg
import errno
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from json import JSONDecodeError
from typing import Any

MAX_CHARS = 800
"""Limit for each part of an error: two paths, a digest and some words fit."""


def shown(text: str, *, max_chars: int = MAX_CHARS) -> str:
    """Escapes unprintable characters, and shortens text to `max_chars`. Idempotent.

    Long text loses its middle, so that a path keeps its file name.
    """
    escaped = (c if c.isprintable() else ascii(c)[1:-1] for c in _cut(text, max_chars))
    return _cut("".join(escaped), max_chars)


def one_line(text: str) -> str:
    """`shown` with runs of white space as one space: messages of libraries have several lines."""
    return shown(" ".join(_cut(text, 2 * MAX_CHARS).split()))


_REASONS = {
    errno.ENOENT: "no such file or folder",
    errno.EISDIR: "a folder",
    errno.ENOTDIR: "a path that leads through a file",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.ENOSPC: "no space left",
}


def reason_of(error: Exception) -> str:
    """The reason why a file cannot be read or written, in a few words.

    Args:
        error: of the operating system, of a decoder of text or JSON, or of specctl.
    """
    if isinstance(error, OSError):
        theirs = error.strerror or type(error).__name__
        return _REASONS.get(error.errno or 0, theirs)
    if isinstance(error, JSONDecodeError):
        return f"text that is no JSON from line {error.lineno}, column {error.colno} on"
    if isinstance(error, UnicodeDecodeError):
        return f"byte 0x{error.object[error.start]:02x}, which is not UTF-8"
    return error.line if isinstance(error, SpecctlError) else str(error)


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """The hint for an unknown word: a similar known word, or `otherwise`."""
    names = {name.lower(): name for name in known}
    close = [names[name] for name in get_close_matches(word.lower(), names, n=1)]
    return f"did you mean {close[0]}?" if close else otherwise


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    tail = max_chars // 3
    return f"{text[: max_chars - tail - 1]}…{text[-tail:]}"


# --------------------------------------------------------------------------- the tree


FLAGS = ("allow_lossy", "allow_mismatch", "all_prompts", "by_category", "force", "in_order")
_DECODING = ("target", "drafter", "policy", "device", "dtype", "decisions", "batch_size", "seed")
_SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p")
_REPLAY = ("cost_model", "baseline", "engine", "tpot_limit_ms", "max_positions")
ARGUMENTS = (*FLAGS, *_DECODING, *_SAMPLING, *_REPLAY, "expect", "reason")
"""Options that functions and records of docs/python-api.md take by the same name."""
_OPTION = re.compile(r"specctl [a-z].*?(?=, |[;`]|$)|--([a-z][a-z-]*)")


def _in_python(text: str) -> str:
    """Options as arguments of Python: `--top-k` is `top_k`, `--allow-lossy` is `allow_lossy=True`.
    Commands stay as they are, and so do options of verbs alone."""

    def name(found: re.Match[str]) -> str:
        word = (found[1] or "").replace("-", "_")
        return f"{word}=True" if word in FLAGS else word if word in ARGUMENTS else found[0]

    return _OPTION.sub(name, text)


class SpecctlError(Exception):
    """Base of all errors: one printable line and an `exit_code`.

    As text, in a traceback too, it names arguments as Python does; `line` and the fields name them
    as the command line does.

    Args:
        message: a sentence that names the file, line, field or option.
        hint: the next step, if the message does not say it.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message, self.hint = one_line(message), one_line(hint)
        super().__init__(self.line)

    def __str__(self) -> str:
        return _in_python(self.line)

    def __reduce__(self) -> Any:
        """Pickles the fields, which `Exception` would not."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]

    @property
    def line(self) -> str:
        """Message and hint."""
        return f"{self.message}; {self.hint}" if self.hint else self.message


class RecordError(SpecctlError, ValueError):
    """A record with a wrong field; on the command line a bug, as files and options are told by
    their own errors."""


class UsageError(SpecctlError):
    """Options that contradict each other or are out of range."""

    exit_code = 2


def check_choice(option: str, word: str, known: Collection[str]) -> None:
    """Raises `UsageError` unless a word is known; the hint names a similar one."""
    if word not in known:
        fix = did_you_mean(word, known, "name one of them")
        raise UsageError(f"{option} {word!r} is none of {', '.join(known)}", hint=fix)


class LossyPolicyError(UsageError):
    """A lossy policy was given to a run that promises the target's own text."""


class CodedError(SpecctlError):
    """An error with a code for programs.

    Args:
        code: the broken rule, e.g. `E_DIGEST`.
        field: the file, field or object that breaks it.
        problem: the fault, in words.
        artifact: the field's owner: a folder, a registry's reference or a digest; None if it is
            unknown.
    """

    def __init__(
        self, code: str, field: str, problem: str, *, hint: str = "", artifact: str | None = None
    ) -> None:
        self.code, self.field, self.problem = one_line(code), one_line(field), one_line(problem)
        self.artifact = None if artifact is None else one_line(artifact)
        super().__init__(self._sentence(), hint=hint)

    def name_artifact(self, artifact: str) -> None:
        """Names the field's owner, unless it is named already."""
        if self.artifact is None:
            self.artifact = one_line(artifact)
            self.message = one_line(self._sentence())
            self.args = (self.line,)

    def add(self, fact: str) -> None:
        """Adds a fact before the hint."""
        self.hint = one_line(f"{fact}; {self.hint}" if self.hint else fact)
        self.args = (self.line,)

    def _sentence(self) -> str:
        owner = "" if self.artifact is None else f" of {self.artifact}"
        return f"{self.code} {self.field}{owner}: {self.problem}"


class ArtifactError(CodedError):
    """An artifact that must not be loaded. `code` names the rule of docs/artifact-format.md."""

    exit_code = 3

    def __init__(
        self,
        code: str,
        field: str,
        problem: str,
        *,
        hint: str = "do not load it",
        artifact: str | None = None,
    ) -> None:
        super().__init__(code, field, problem, hint=hint, artifact=artifact)


@contextmanager
def refusals_of(artifact: str | None) -> Iterator[None]:
    """Names this artifact in errors within, unless they name one; None changes nothing."""
    try:
        yield
    except ArtifactError as error:
        if artifact is not None:
            error.name_artifact(artifact)
        raise


class InputError(SpecctlError):
    """Data given to specctl that cannot be used."""

    exit_code = 4


class PromptError(InputError):
    """A prompt source that is missing, empty or of an unknown format."""


class PromptLineError(PromptError):
    """One entry of a file that cannot be used.

    Args:
        place: of the entry, e.g. `line 3`.
        reason: equal for all entries of one kind.
        detail: of this entry.
    """

    def __init__(
        self, path: str, place: str, reason: str, detail: str = "", *, hint: str = ""
    ) -> None:
        self.path, self.place, self.reason, self.detail = path, place, reason, detail
        problem = f"{reason}: {detail}" if detail else reason
        super().__init__(f"{path}, {place}: {problem}", hint=hint)


class PromptTooLongError(PromptError):
    """A prompt that leaves no room for new tokens in the model's context."""


class EvidenceError(InputError):
    """Too little evidence for a promise; the message says how much is needed."""


class TraceError(InputError):
    """A trace folder that cannot be used."""


class TraceSchemaError(TraceError):
    """A trace of another format version, or with other columns."""


class TraceCorruptError(TraceError):
    """A trace file that is damaged: truncated, altered or missing."""


class TraceMismatchError(TraceError):
    """Traces of another model pair, or of another run configuration."""


class TraceEmptyError(TraceError):
    """Too few usable rows for the task."""


class ModelError(SpecctlError):
    """A model or a checkpoint that cannot be used."""

    exit_code = 5


class ModelConfigError(ModelError):
    """A model whose configuration this runtime cannot drive faithfully."""


class CheckpointKeyError(ModelError):
    """A checkpoint with missing or unexpected tensors."""


class CheckpointShapeError(ModelError):
    """A checkpoint whose tensors have another size."""


class VocabularyMismatchError(ModelError):
    """Target and drafter do not share a vocabulary."""


class DeviceMemoryError(ModelError):
    """The device has too little memory; queued and running requests are kept."""


class OutputError(SpecctlError):
    """A file or folder that cannot be written."""

    exit_code = 6


class StoreError(SpecctlError):
    """A shared store, a folder or a bucket, that cannot be reached or refuses access."""

    exit_code = 6


class ClusterError(SpecctlError):
    """A Ray cluster that cannot be reached, or cannot run the job."""

    exit_code = 6


class RegistryError(CodedError):
    """A refusal of a registry. `code` names the rule, e.g. `E_ALIAS_CONFLICT`."""

    exit_code = 7


class EngineError(SpecctlError):
    """A serving engine, or a setting of it, that a policy or a log cannot work with."""

    exit_code = 8


class HostMemoryError(SpecctlError):
    """The machine, or a limit set on the process, has too little memory for the command."""

    exit_code = 10


class ClockError(SpecctlError):
    """A cost model that failed its own check."""

    exit_code = 11


class SetupError(SpecctlError):
    """A machine on which something of specctl does not work, by `doctor`."""

    exit_code = 12


NO_MEMORY = re.compile(
    "bad_alloc|aunch worker thread|[Cc]an(no|')t allocate memory|can't start new thread"
)
"""Texts of memory errors that have other types: Arrow, torch, the system, Python."""


def memory_error_of(error: BaseException) -> HostMemoryError | None:
    """The `HostMemoryError` for any library's memory error; None for other errors."""
    if isinstance(error, HostMemoryError):
        return error
    if not (isinstance(error, MemoryError) or NO_MEMORY.search(str(error))):
        return None
    return HostMemoryError(
        f"out of memory (docs/replay.md, Large sets): {str(error) or type(error).__name__}",
        hint="raise the limit or use a machine with more; else lower --threads or --workers, "
        "and --max-positions",
    )


class InvariantError(SpecctlError):
    """A broken invariant of specctl: a bug, not a mistake of the user."""

    exit_code = 70
