"""Identity of models, tokenizers and machines, for fingerprints of traces and artifacts.

No model is loaded, and torch and transformers are imported at first use.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections import Counter
from contextlib import redirect_stderr, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from specctl.contents import utf8_of
from specctl.embedded import embedded_path
from specctl.errors import ModelError, UsageError, did_you_mean, reason_of
from specctl.runtime.gguf import is_gguf, read_fields, tokenizer_of

if TYPE_CHECKING:
    import torch

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

_HUB_WORD = r"\w(?:[\w.-]{0,94}\w)?"
_HUB_ID = re.compile(rf"(?!.*(?:--|\.\.|\.git$)){_HUB_WORD}(?:/{_HUB_WORD})?")
_LFS = b"version https://git-lfs"
_FULL_LIMIT_BYTES = 256 * 2**20
_SAMPLED_BLOCKS, _BLOCK_BYTES = 256, 64 * 2**10


# --------------------------------------------------------------------------- models


def check_device(word: str) -> None:
    """Rejects words that are not a device (UsageError)."""
    names = word.split(",")
    known = re.fullmatch(r"auto|cpu|cuda|cuda:\d+(,cuda:\d+)*", word)
    if known is None or len(set(names)) < len(names):
        raise UsageError(
            f"--device {word} is none of auto, cpu, cuda, cuda:N and a list of different GPUs, "
            "cuda:0,cuda:1"
        )


def check_model(name: str) -> None:
    """Rejects a name that is no part of the embedded pair (UsageError), or no folder, GGUF file or
    hub id (ModelError)."""
    if _here(name, "target") is None and not _HUB_ID.fullmatch(name):
        raise ModelError(
            f"model {name!r} is {'a file' if Path(name).is_file() else 'no folder here'}, no "
            "GGUF file (NAME.gguf), no hub id (owner/name) and not embedded",
            hint="check the path",
        )


def _here(name: str, embedded_default: str) -> Path | None:
    """A folder or GGUF file, given by its path or as part of the embedded pair."""
    kind, _, part = name.partition(":")
    if kind == "embedded":
        return embedded_path(part or embedded_default)
    return Path(name) if Path(name).is_dir() or is_gguf(Path(name)) else None


def local_folder(name: str, *, embedded_default: str) -> Path | None:
    """A model's folder or GGUF file on this machine, without the network; None if it is not here.

    Of a hub id that is in the cache, weights may be missing.
    """
    if here := _here(name, embedded_default):
        return here
    from huggingface_hub import try_to_load_from_cache

    config = None
    with suppress(ValueError):  # no name of the hub
        config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def config_from_hub(name: str) -> Path:
    """The folder of a hub id's config.json, which alone is fetched.

    Raises:
        ModelError: no hub id, or the hub does not give it.
    """
    check_model(name)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json")).parent
    except Exception as error:  # of the hub, HTTP, the OS or validation
        why, fix = _why_not_fetched(name, error)
        raise ModelError(f"{name} is {why}", hint=fix) from error


def model_folder(
    name: str, *, embedded_default: str, revision: str | None = None, cache: str | None = None
) -> Path:
    """Resolves `embedded`, `embedded:NAME`, a folder, a GGUF file, or a hub id (downloaded or
    cached).

    Args:
        revision: of a hub id, by default the newest. cache: download folder, by default the hub's.
    """
    check_model(name)
    if here := _here(name, embedded_default):
        return here
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    fetch = partial(snapshot_download, name, revision=revision, cache_dir=cache)
    try:
        folder = Path(fetch(allow_patterns=patterns))
        if not weight_files(folder):  # official EAGLE-3 heads
            folder = Path(fetch(allow_patterns=[*patterns, "pytorch_model*.bin"]))
        return folder
    except Exception as error:  # of the hub, HTTP, the OS or validation
        why, fix = _why_not_fetched(name, error)
        raise ModelError(
            f"model {name!r} is no folder here and, as a hub id, {why}",
            hint=did_you_mean(name, ["embedded"], fix),
        ) from error


def _why_not_fetched(name: str, error: Exception) -> tuple[str, str]:
    """The reason why a hub id cannot be fetched, and the next step."""
    from huggingface_hub import errors

    fetch = f"hf download {name}"
    if os.environ.get("HF_HUB_OFFLINE"):
        found = "not in the hub's cache, and HF_HUB_OFFLINE is set"
        return found, f"unset HF_HUB_OFFLINE, or fetch it first: HF_HUB_OFFLINE=0 {fetch}"
    log_in = "log in: hf auth login"
    for kind, found, fix in (
        (errors.GatedRepoError, "gated", f"accept its terms on its page, and {log_in}"),
        (errors.RepositoryNotFoundError, "not known to the hub", f"check the name, or {log_in}"),
        (errors.RevisionNotFoundError, "without that revision", "check the revision"),
        (errors.HFValidationError, "not valid", "check the name"),
    ):
        if isinstance(error, kind):
            return found, fix
    if isinstance(error, OSError) and error.errno:
        return f"not to be stored: {reason_of(error)}", "free space, or correct permissions"
    copy = f"fetch it where the hub answers, {fetch} --local-dir FOLDER, and give that folder"
    return f"not in its cache, and the hub does not answer ({type(error).__name__})", copy


def weights_digest(folder: Path) -> str:
    """`sha256:<hex>` of a checkpoint: its config and its weight files, or the GGUF file.

    Files up to 256 MiB are read whole. Of larger ones the size and 256 evenly spread blocks of
    64 KiB are read, which takes seconds instead of minutes; retraining changes nearly every block.
    """
    if is_gguf(folder):
        return f"sha256:{_file_digest(folder).hex()}"
    digest, files = hashlib.sha256(_canonical_config(folder)), weight_files(folder)
    if not files:
        raise ModelError(
            f"model folder {folder} has no weights, .safetensors or pytorch_model.bin, among "
            f"{_names_in(folder)}",
            hint="download its weights too, or save the model with save_pretrained",
        )
    for path in files:
        digest.update(path.name.encode())
        digest.update(_file_digest(path))
    return f"sha256:{digest.hexdigest()}"


def _names_in(folder: Path) -> str:
    return ", ".join(sorted(os.listdir(folder))[:6]) or "nothing"


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint: GGUF, safetensors, else torch's own format."""
    if is_gguf(folder):
        return [folder]
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def config_digest(folder: Path) -> str:
    """`sha256:<hex>` of a checkpoint's config alone, equal for retrained weights."""
    return "sha256:" + hashlib.sha256(_canonical_config(folder)).hexdigest()


def hub_revision(folder: Path) -> str | None:
    """The commit of a checkpoint in the hub's cache (`snapshots/<commit>`); None elsewhere."""
    place = folder.absolute().parent if is_gguf(folder) else folder.absolute()
    is_snapshot = place.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", place.name)
    return place.name if is_snapshot else None


def tokenizer_digest(tokenizer: Any) -> str:
    """`sha256:<hex>` of the mapping from text to ids, without the chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        described: Any = sorted(tokenizer.get_vocab().items())
    else:
        described = json.loads(backend.to_str())
        for volatile in ("truncation", "padding"):
            described.pop(volatile, None)
    text = json.dumps(described, sort_keys=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _canonical_config(folder: Path) -> bytes:
    """The config without the fields that loading rewrites; a GGUF file's without the tokenizer."""
    if is_gguf(folder):
        fields = read_fields(folder)
        parts = ("general.architecture", "general.file_type", f"{fields['general.architecture']}.")
        config = {name: of for name, of in fields.items() if name.startswith(parts)}
    else:
        config = read_config(folder / "config.json")
    kept = {k: v for k, v in config.items() if k not in ("_name_or_path", "transformers_version")}
    return json.dumps(kept, sort_keys=True).encode()


def read_config(path: Path) -> dict[str, Any]:
    """A model's `config.json`; `ModelError` unless it is a JSON object."""
    cause: Exception | None = None
    try:
        config = json.loads(utf8_of(path, ModelError, "restore the file").decode())
        found = type(config).__name__
    except FileNotFoundError as error:
        if path.is_symlink():  # of the hub's cache
            raise ModelError(f"{path} is gone", hint="download the model again") from error
        folder, files = path.parent, sorted(path.parent.glob("*.gguf"))
        fix = f"give its file {files[0]}" if files else "give a folder with config.json and weights"
        problem = f"model folder {folder} has no config.json, but {_names_in(folder)}"
        raise ModelError(problem, hint=fix) from error
    except (OSError, ValueError) as error:
        config, found, cause = None, reason_of(error), error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is no JSON object: {found}", hint="restore the file") from cause
    return config


def _file_digest(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            if file.read(len(_LFS)) == _LFS:
                problem = f"{path} is a pointer of Git LFS, not the weights"
                raise ModelError(problem, hint="fetch them: git lfs pull")
            file.seek(0)
            if size <= _FULL_LIMIT_BYTES:
                digest.update(file.read())
            else:
                for block in range(_SAMPLED_BLOCKS):
                    file.seek(block * (size - _BLOCK_BYTES) // (_SAMPLED_BLOCKS - 1))
                    digest.update(file.read(_BLOCK_BYTES))
    except OSError as error:  # also a link of the hub's cache to a file that was deleted
        problem = f"{path} cannot be read: {reason_of(error)}"
        raise ModelError(problem, hint="download the model again") from error
    return digest.digest()


def hardware_name(*devices: torch.device) -> str:
    """The name of the GPU, several as `2 x NAME`, or of the processor."""
    if devices[0].type == "cuda":
        import torch

        found = Counter(map(torch.cuda.get_device_name, devices))
        return " + ".join(name if n == 1 else f"{n} x {name}" for name, n in found.items())
    return processor_name()


def processor_name() -> str:
    """The processor's name, or its architecture outside Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# --------------------------------------------------------------------------- transformers


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return tokenizer_of(folder) if is_gguf(folder) else quietly(AutoTokenizer, folder)


def quietly(factory: Any, folder: Path, **options: Any) -> Any:
    """Loads a folder or file by a factory of transformers without progress bars and reports."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its loading report is many lines
    try:
        if not is_gguf(folder):
            return factory.from_pretrained(folder, local_files_only=True, **options)
        # Files beside it would be preferred: the folder given is empty.
        with TemporaryDirectory() as empty, redirect_stderr(StringIO()):
            file = str(folder.absolute())
            return factory.from_pretrained(empty, gguf_file=file, local_files_only=True, **options)
    except Exception as error:  # a checkpoint's code may raise anything
        why, fix = _why_unloadable(factory.__name__, folder, error)
        raise ModelError(f"model {folder} {why}", hint=fix) from error
    finally:
        logging.set_verbosity(verbosity)


_TOKENIZER_FILE = re.compile(r"(tokenizer|vocab|merges|tekken|special_tokens).*|.*\.model")


def _why_unloadable(factory: str, folder: Path, error: Exception) -> tuple[str, str]:
    """The reason why transformers cannot load a folder, and the next step."""
    import transformers

    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    config = folder / "config.json"
    kind = read_config(config).get("model_type") if config.is_file() else None
    if factory == "AutoTokenizer" and not any(map(_TOKENIZER_FILE.fullmatch, names)):
        fault = f"has no tokenizer, such as tokenizer.json, among {_names_in(folder)}"
        return fault, "save it there with save_pretrained"
    if kind is not None and kind not in transformers.CONFIG_MAPPING:
        fault = f"is of model_type {kind!r}, unknown to transformers {transformers.__version__}"
        return fault, "update transformers; a checkpoint's own code is never run"
    if len(weight_files(folder)) > 1 and not any(name.endswith(".index.json") for name in names):
        return "has weights in several files and no index of them", "download *.index.json too"
    if isinstance(error, ImportError) and error.name:
        return f"needs {error.name}", f"install {error.name}"
    show = f"from transformers import {factory} as A; A.from_pretrained({str(folder)!r})"
    return (
        f"cannot be loaded by transformers {transformers.__version__}: a file is damaged or does "
        f"not fit the others ({type(error).__name__})",
        f'save or download it again; python -c "{show}" shows more',
    )


def first_line(error: Exception) -> str:
    """The first line of an error's message, at most 200 characters."""
    return str(error).strip().partition("\n")[0][:200]
