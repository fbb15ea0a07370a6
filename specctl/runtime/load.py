"""Loading a pair: target, tokenizer and drafter, from folders or from the hub."""

from __future__ import annotations

import logging
import re
import shlex
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specctl.artifacts.compatibility import Expectation
from specctl.artifacts.manifest import Domain, PairFingerprint, Range
from specctl.errors import (
    CheckpointKeyError,
    ModelConfigError,
    UsageError,
    VocabularyMismatchError,
    check_choice,
)
from specctl.runtime.attention import ATTENTION
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.checkpoints import WORDS, kind_of
from specctl.runtime.drafter import Drafter, Eagle3Drafter, SmallModelDrafter
from specctl.runtime.eagle3 import load_eagle3
from specctl.runtime.gguf import check_loads, is_gguf, read_fields
from specctl.runtime.identity import (
    Dtype,
    check_device,
    config_digest,
    first_line,
    hardware_name,
    hub_revision,
    load_tokenizer,
    model_folder,
    quietly,
    read_config,
    tokenizer_digest,
    weight_files,
    weights_digest,
)
from specctl.runtime.trial import better_reading

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
    folder: Path  # of the checkpoint, or its GGUF file
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
    notes: tuple[str, ...] = ()  # what was read of the drafter, and what was assumed

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
        target: folder, GGUF file, hub id, or `embedded`.
        drafter: folder or hub id of an EAGLE-3 head or of a small model with the target's
            tokenizer, `embedded` (the head), `embedded:small`, or None.
        device: `auto` (CUDA if present), `cpu`, `cuda`, `cuda:1`; or `cuda:0,cuda:1`, which spreads
            the target's layers and puts all else on the first.
        dtype: `auto` (float32 on the CPU, bfloat16 on CUDA) or another of `identity.Dtype`.

    Raises:
        ModelError, UsageError: see `specctl.errors`.
    """
    devices = parse_devices(device)
    number = parse_dtype(dtype, devices[0])
    folder = None if drafter is None else model_folder(drafter, embedded_default="eagle3")
    if folder is not None:
        _check_runs(folder)
    loaded = load_target(target, devices, number)
    if drafter is None or folder is None:
        return Pair(loaded, None, "none", NO_DIGEST)
    digest = weights_digest(folder)
    found, notes = load_drafter(folder, loaded, devices[0], number)
    return Pair(loaded, found, drafter, digest, folder, notes)


def _check_runs(folder: Path) -> None:
    """Rejects a drafter that only engines run (ModelConfigError)."""
    kind = kind_of(folder)
    if kind == "eagle3" and is_gguf(folder):
        raise ModelConfigError(
            f"drafter {folder} is {WORDS[kind]} as GGUF, and only whole models load so",
            hint="give the head's folder or hub id",
        )
    if kind not in ("eagle3", "draft_model"):
        serve = (
            f"serve it: `specctl export chain:3 --to vllm --drafter "
            f"{shlex.quote(str(folder))}` writes the flags, and `specctl import` reads that "
            "server's log"
        )
        if kind == "mlp_speculator":
            serve = "give another drafter: neither vLLM 0.32 nor SGLang serves this kind"
        raise ModelConfigError(
            f"drafter {folder} is {WORDS[kind]}, and only EAGLE-3 heads and whole small models run "
            "here",
            hint=serve,
        )


def load_target(name: str, devices: Devices, dtype: torch.dtype) -> Target:
    """Loads a decoder-only checkpoint and its tokenizer."""
    folder = model_folder(name, embedded_default="target")
    if (kind := kind_of(folder)) != "draft_model":
        raise ModelConfigError(
            f"target {folder} is {WORDS[kind]}, no model of its own",
            hint="name it by --drafter, and its model by --target",
        )
    check_loadable(folder, devices)
    digest = weights_digest(folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.model_max_length = sys.maxsize  # the loop checks lengths; its warning would be noise
    model = CachedModel(_causal_lm(folder, devices, dtype))
    eos = getattr(model.model.generation_config, "eos_token_id", None)
    eos = tokenizer.eos_token_id if eos is None else eos
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    if is_gguf(folder):  # its further ends, of a turn or a message
        ends = (f"tokenizer.ggml.{name}_token_id" for name in ("eot", "eom"))
        eos_ids += tuple({read_fields(folder).get(name, eos) for name in ends} - {*eos_ids, None})
    return Target(name, folder, model, tokenizer, eos_ids, digest, tokenizer_digest(tokenizer))


def load_drafter(
    folder: Path, target: Target, device: torch.device, dtype: torch.dtype
) -> tuple[Drafter, tuple[str, ...]]:
    """Loads an EAGLE-3 head or a small model, and what was read and assumed of it.

    Of a head that is read in two ways, the one that predicts its target better is taken.
    """
    if kind_of(folder) == "eagle3":
        model: Any = target.model.model
        output = model.get_output_embeddings()
        loaded = load_eagle3(
            folder,
            target_embedding=model.get_input_embeddings().weight,
            target_config=target.model.config,
            target_lm_head=None if output is None else output.weight,
            device=device,
            dtype=dtype,
        )
        with torch.inference_mode():
            reading = better_reading(loaded, target.model, target.tokenizer, str(folder))
        return Eagle3Drafter(loaded.head, reading.config.aux_layers), tuple(loaded.notes)
    check_loadable(folder, (device,))
    small = CachedModel(_causal_lm(folder, (device,), dtype))
    check_vocabulary(folder, small, target)
    size = min(small.vocab_size, target.model.vocab_size)
    return SmallModelDrafter(small, size), (f"a whole small model, {size} draft tokens",)


def check_vocabulary(folder: Path, model: CachedModel, target: Target) -> None:
    """Rejects a drafter with another tokenizer than the target's.

    A drafter without a tokenizer passes if the vocabulary sizes agree. With equal tokenizers the
    sizes may differ, as models of one family pad their vocabularies differently. Where one of the
    two is a GGUF file, tokenizers are equal that give their tokens the same ids.
    """
    ours, theirs = target.tokenizer_digest, None
    if is_gguf(folder) or (folder / "tokenizer_config.json").exists():
        tokenizer = load_tokenizer(folder)
        theirs = tokenizer_digest(tokenizer)
        if is_gguf(folder) or is_gguf(target.folder):
            theirs = ours if tokenizer.get_vocab() == target.tokenizer.get_vocab() else theirs
    same_size = model.vocab_size == target.model.vocab_size
    if (theirs or ours) != ours or (theirs is None and not same_size):
        raise VocabularyMismatchError(
            f"drafter {folder} has another tokenizer, of {model.vocab_size} tokens, than the "
            f"target, of {target.model.vocab_size}",
            hint="use a drafter of the same model family",
        )


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
    check_choice("dtype", dtype, get_args(Dtype))
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    found: torch.dtype = getattr(torch, dtype)
    return found


def check_loadable(folder: Path, devices: Devices) -> None:
    """Rejects, before reading weights, models that cannot be loaded on these devices."""
    names = ", ".join(map(str, devices))
    if is_gguf(folder):
        check_loads(folder)
    if len(devices) > 1 and find_spec("accelerate") is None:
        raise ModelConfigError(
            f"model {folder} on {names} needs the package accelerate, which spreads the layers",
            hint="pip install accelerate",
        )
    quantised = _config(folder).get("quantization_config")
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


def _config(folder: Path) -> dict[str, Any]:
    """A model's `config.json`; empty for a GGUF file, whose weights load dequantised."""
    return {} if is_gguf(folder) else read_config(folder / "config.json")


def _causal_lm(folder: Path, devices: Devices, dtype: torch.dtype) -> PreTrainedModel:
    config = _config(folder)
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
    missing, other = sorted(loading["missing_keys"]), sorted(loading["unexpected_keys"])
    if missing:  # transformers fills them with random numbers and only warns
        raise CheckpointKeyError(
            f"checkpoint {folder} lacks tensor {missing[0]} ({len(missing)} missing in all)"
            f"{f', and has {other[0]} instead' if other else ''}",
            hint="download or save the checkpoint again",
        )
    if unread := [name for name in other if not name.endswith("rotary_emb.inv_freq")]:
        log.warning(
            "model %s has %d tensors that its config.json leaves unused, such as %s",
            *(folder, len(unread), unread[0]),
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
