"""Loading a pair: target, tokenizer and drafter, from folders or from the hub."""

from __future__ import annotations

import logging
import os
import re
import sys
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specctl.artifacts.compatibility import Expectation
from specctl.artifacts.manifest import Domain, PairFingerprint, Range
from specctl.embedded import embedded_path
from specctl.errors import (
    CheckpointKeyError,
    ModelConfigError,
    ModelError,
    UsageError,
    VocabularyMismatchError,
    did_you_mean,
    reason_of,
)
from specctl.runtime.attention import ATTENTION
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.drafter import Drafter, Eagle3Drafter, SmallModelDrafter
from specctl.runtime.eagle3 import load_eagle3
from specctl.runtime.identity import (
    check_device,
    check_dtype,
    check_model,
    config_digest,
    first_line,
    hardware_name,
    hub_revision,
    load_tokenizer,
    quietly,
    read_config,
    tokenizer_digest,
    weight_files,
    weights_digest,
)

log = logging.getLogger("specctl.models")
NO_DIGEST = "sha256:" + 64 * "0"
"""Stands for "no drafter" in a fingerprint."""
Devices = tuple[torch.device, ...]
"""Devices of a model, the first for tokens and logits."""
_WORKLOAD = re.compile(r"[a-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Target:
    """The model whose text is emitted, its tokenizer and their identity."""

    name: str  # as the user gave it
    folder: Path  # of the checkpoint
    model: CachedModel
    tokenizer: Any
    eos_ids: tuple[int, ...]  # tokens that end a text
    digest: str  # of config and weights
    tokenizer_digest: str  # of the mapping from text to ids


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, if it has one."""

    target: Target
    drafter: Drafter | None
    drafter_name: str  # `none` without a drafter
    drafter_digest: str  # of config and weights; zeros without a drafter
    drafter_folder: Path | None = None  # of the drafter's checkpoint

    def __repr__(self) -> str:
        model = self.target.model
        dtype = str(model.dtype).removeprefix("torch.")
        return f"Pair({self.target.name!r}, {self.drafter_name!r}, {dtype} on {model.device})"

    @property
    def fingerprint(self) -> PairFingerprint:
        """The fingerprint that traces and artifacts of this pair carry."""
        return PairFingerprint(
            target_digest=self.target.digest,
            drafter_digest=self.drafter_digest,
            tokenizer_digest=self.target.tokenizer_digest,
            target=self.target.name,
            drafter=self.drafter_name,
        )


def load_pair(
    target: str, drafter: str | None, *, device: str = "auto", dtype: str = "auto"
) -> Pair:
    """Loads both models in one dtype, on one device or the target's layers spread over several.

    Args:
        target: folder, hub id, or `embedded`.
        drafter: folder or hub id of an EAGLE-3 head or of a small model with the target's
            tokenizer, `embedded` (the head), `embedded:small`, or None.
        device: `auto` (CUDA if present), `cpu`, `cuda`, `cuda:1`; or `cuda:0,cuda:1`, which spreads
            the target's layers and puts all else on the first.
        dtype: `auto` (float32 on the CPU, bfloat16 on CUDA) or a name of `DTYPES`.

    Raises:
        ModelError, UsageError: see `specctl.errors`.
    """
    devices = parse_devices(device)
    number = parse_dtype(dtype, devices[0])
    loaded = load_target(target, devices, number)
    if drafter is None:
        return Pair(loaded, None, "none", NO_DIGEST)
    folder = model_folder(drafter, embedded_default="eagle3")
    digest = weights_digest(folder)
    return Pair(loaded, load_drafter(folder, loaded, devices[0], number), drafter, digest, folder)


def load_target(name: str, devices: Devices, dtype: torch.dtype) -> Target:
    """Loads a decoder-only checkpoint and its tokenizer."""
    folder = model_folder(name, embedded_default="target")
    digest = weights_digest(folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.model_max_length = sys.maxsize  # the loop checks lengths; its warning would be noise
    model = CachedModel(_causal_lm(folder, devices, dtype))
    eos = getattr(model.model.generation_config, "eos_token_id", None)
    eos = tokenizer.eos_token_id if eos is None else eos
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    return Target(name, folder, model, tokenizer, eos_ids, digest, tokenizer_digest(tokenizer))


def load_drafter(folder: Path, target: Target, device: torch.device, dtype: torch.dtype) -> Drafter:
    """Loads an EAGLE-3 head or a small model, as `config.json` says."""
    if is_eagle3(folder):
        embedding: Any = target.model.model.get_input_embeddings().weight
        config = target.model.config
        head = load_eagle3(
            folder, target_embedding=embedding, target_config=config, device=device, dtype=dtype
        )
        return Eagle3Drafter(head, head.config.resolve_aux_layers(config.num_hidden_layers))
    model = CachedModel(_causal_lm(folder, (device,), dtype))
    check_vocabulary(folder, model, target)
    return SmallModelDrafter(model, min(model.vocab_size, target.model.vocab_size))


def is_eagle3(folder: Path) -> bool:
    """Whether a checkpoint is an EAGLE-3 head, in the official layout or that of speculators."""
    config = read_config(folder / "config.json")
    words = [*config.get("architectures", []), config.get("speculators_model_type", "")]
    return any("eagle3" in word.lower() for word in words) or "draft_vocab_size" in config


def check_vocabulary(folder: Path, model: CachedModel, target: Target) -> None:
    """Rejects a drafter with another tokenizer than the target's.

    A drafter without a tokenizer passes if the vocabulary sizes agree. With equal tokenizers the
    sizes may differ, as models of one family pad their vocabularies differently.
    """
    ours = target.tokenizer_digest
    has_tokenizer = (folder / "tokenizer_config.json").exists()
    theirs = tokenizer_digest(load_tokenizer(folder)) if has_tokenizer else None
    same_size = model.vocab_size == target.model.vocab_size
    if (theirs or ours) != ours or (theirs is None and not same_size):
        raise VocabularyMismatchError(
            f"drafter {folder} has another tokenizer, of {model.vocab_size} tokens, than the "
            f"target, of {target.model.vocab_size}",
            hint="use a drafter of the same model family",
        )


def model_folder(
    name: str, *, embedded_default: str, revision: str | None = None, cache: str | None = None
) -> Path:
    """Resolves `embedded`, `embedded:NAME`, a folder, or a hub id (downloaded or cached).

    Args:
        revision: of a hub id, by default the newest. cache: download folder, by default the hub's.
    """
    check_model(name)
    if name == "embedded" or name.startswith("embedded:"):
        return embedded_path(name.partition(":")[2] or embedded_default)
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    fetch = partial(snapshot_download, name, revision=revision, cache_dir=cache)
    try:
        folder = Path(fetch(allow_patterns=patterns))
        if not weight_files(folder):  # official EAGLE-3 heads
            folder = Path(fetch(allow_patterns=[*patterns, "pytorch_model*.bin"]))
        return folder
    except Exception as error:  # of the hub, HTTP, the OS or validation
        raise ModelError(
            f"model {name!r} is no folder, not embedded, and no hub id that is in the cache "
            f"or can be fetched: {_why_not_fetched(error)}",
            hint=did_you_mean(name, ["embedded"], "check the name, or download the model first"),
        ) from error


def _why_not_fetched(error: Exception) -> str:
    """The hub's refusal in our words."""
    from huggingface_hub import errors

    if os.environ.get("HF_HUB_OFFLINE"):
        return "none in the cache, and HF_HUB_OFFLINE is set"
    for kind, words in (
        (errors.GatedRepoError, "the model is gated; log in"),
        (errors.RepositoryNotFoundError, "no model of that name that this user may read"),
        (errors.RevisionNotFoundError, "no such revision"),
        (errors.HFValidationError, "not a valid hub id"),
        (errors.LocalEntryNotFoundError, "none in the cache, and no answer from the hub"),
    ):
        if isinstance(error, kind):
            return words
    if isinstance(error, OSError) and error.errno:
        return reason_of(error)
    return f"none in the cache, and no answer from the hub ({type(error).__name__})"


def parse_devices(device: str) -> Devices:
    """Torch devices of a word; `UsageError` for GPUs that this machine lacks."""
    if device == "auto":
        return (torch.device("cuda" if torch.cuda.is_available() else "cpu"),)
    check_device(device)
    found = tuple(map(torch.device, device.split(",")))
    num_there = torch.cuda.device_count()
    if any(one.type == "cuda" and (one.index or 0) >= num_there for one in found):
        raise UsageError(
            f"--device {device}: this machine has {num_there} CUDA devices",
            hint="use --device cpu, or install a CUDA build of torch",
        )
    return found


def parse_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    check_dtype(dtype)
    found: torch.dtype = getattr(torch, dtype)
    return found


def check_loadable(folder: Path, devices: Devices) -> None:
    """Rejects, before reading weights, models that cannot be loaded on these devices."""
    names = ", ".join(map(str, devices))
    if len(devices) > 1 and find_spec("accelerate") is None:
        raise ModelConfigError(
            f"model {folder} on {names} needs the package accelerate, which spreads the layers",
            hint="pip install 'specctl[split]'",
        )
    quantised = read_config(folder / "config.json").get("quantization_config")
    if quantised is not None:
        method = str(quantised.get("quant_method", "unknown"))
        try:
            from transformers.quantizers.auto import AutoHfQuantizer

            AutoHfQuantizer.from_config(quantised, pre_quantized=True).validate_environment(
                device_map={"": devices[0]}
            )
        except Exception as error:  # quantisers raise anything
            raise ModelConfigError(
                f"quantised model {folder}: transformers cannot load {method} weights on "
                f"{names}: {type(error).__name__}: {first_line(error)}",
                hint="install it, or use a checkpoint that is not quantised",
            ) from error
    if devices[0].type == "cuda":
        size_bytes = sum(path.stat().st_size for path in weight_files(folder))
        total_bytes = sum(torch.cuda.mem_get_info(device)[1] for device in devices)
        if size_bytes > total_bytes:
            raise ModelConfigError(
                f"model {folder} has {size_bytes / 1e9:.0f} GB of weights, and {names} has "
                f"{total_bytes / 1e9:.0f} GB of memory",
                hint="spread the target's layers over more GPUs (--device cuda:0,cuda:1), or "
                "use a quantised or smaller checkpoint",
            )


def _causal_lm(folder: Path, devices: Devices, dtype: torch.dtype) -> PreTrainedModel:
    check_loadable(folder, devices)
    config = read_config(folder / "config.json")
    kinds = config.get("architectures") or []
    if kinds and not any(
        re.search("CausalLM|LMHead|ConditionalGeneration", kind) for kind in kinds
    ):
        raise ModelConfigError(
            f"model {folder} generates no text (...ForCausalLM): {', '.join(kinds)}",
            hint="choose a decoder-only checkpoint",
        )
    is_quantised, placed = "quantization_config" in config, dict[str, Any]()
    if len(devices) > 1:  # equal shares of the weights, so that caches have equal room
        limits = {device.index: torch.cuda.mem_get_info(device)[0] for device in devices}
        placed = {"device_map": "balanced", "max_memory": limits}
    elif is_quantised:
        placed = {"device_map": {"": devices[0]}}
    model, loading = quietly(
        AutoModelForCausalLM,
        folder,
        dtype=dtype,
        attn_implementation=ATTENTION,
        output_loading_info=True,
        **placed,
    )
    if "disk" in getattr(model, "hf_device_map", {}).values():
        raise ModelConfigError(
            f"model {folder}: {sum(v == 'disk' for v in model.hf_device_map.values())} parts "
            f"do not fit the free memory of {', '.join(map(str, devices))}",
            hint="end other work on the GPUs, or name more of them",
        )
    missing = sorted(loading["missing_keys"])
    if missing:  # transformers fills them with random numbers and only warns
        raise CheckpointKeyError(
            f"checkpoint {folder} lacks tensor {missing[0]} ({len(missing)} missing in all)",
            hint="download or save the checkpoint again",
        )
    loaded: PreTrainedModel = model.eval() if placed else model.to(devices[0]).eval()
    return loaded


# --------------------------------------------------------------------------- where it holds


def pair_domain(
    pair: Pair, *, batch_size: int | None = None, workload: str | None = None
) -> Domain:
    """The domain of evidence gathered with a loaded pair on this machine.

    Args:
        batch_size: requests that share a round; None where rounds are not shared.
        workload: the user's word for the prompts.

    Raises:
        UsageError: a workload that is not a short word of [a-z0-9._-].
    """
    model = pair.target.model
    return domain_at(
        pair.target.folder, pair.drafter_folder, model.dtype, model.devices, batch_size, workload
    )


def domain_at(
    target: Path,
    drafter: Path | None,
    dtype: torch.dtype,
    devices: Devices,
    batch_size: int | None = None,
    workload: str | None = None,
) -> Domain:
    """As `pair_domain`, for models in two folders."""
    if workload is not None and not _WORKLOAD.fullmatch(workload):
        raise UsageError(
            f"workload {ascii(workload)[:80]} is no short word of [a-z0-9._-], such as chat"
        )
    return Domain(
        target_config_digest=config_digest(target),
        target_revision=hub_revision(target),
        drafter_config_digest=None if drafter is None else config_digest(drafter),
        drafter_revision=None if drafter is None else hub_revision(drafter),
        dtype=str(dtype).removeprefix("torch."),
        hardware=(hardware_name(*devices),),
        batch_size=None if batch_size is None else Range(low=batch_size, high=batch_size),
        workload=workload,
    )


def expectation(pair: Pair, batch_size: int, *, allow_mismatch: bool) -> Expectation:
    """Requirements on artifacts that run on a loaded pair, on this machine, at a batch size.

    Args:
        allow_mismatch: accept lossless policies of another domain, with a warning for each.
    """
    domain = pair_domain(pair, batch_size=batch_size)
    return Expectation(pair.fingerprint, domain, allow_mismatch)
