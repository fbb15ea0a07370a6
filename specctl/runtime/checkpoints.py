"""Draft checkpoints: the kind of a folder or GGUF file, told by its `config.json` and the names of
its tensors. Weights are not read, and torch is not imported.

Marks are those of the makers (SafeAILab's EAGLE, SpecForge, speculators, AngelSlim, NeMo Automodel,
ModelOpt, DeepSpec) and of vLLM 0.32 (`config/speculative.py`, `model_executor/models/registry.py`)
and SGLang 0.5.23 (`srt/speculative/spec_info.py`), which serve them.
"""

from __future__ import annotations

import json
import pickletools
import re
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from specctl.errors import ModelConfigError
from specctl.runtime.gguf import is_gguf, read_fields
from specctl.runtime.identity import read_config, weight_files


class Kind(StrEnum):
    """The kind of a drafter; the values are vLLM's methods, where it has one of that name."""

    EAGLE3 = "eagle3"
    EAGLE = "eagle"
    PEAGLE = "peagle"
    MEDUSA = "medusa"
    MLP = "mlp_speculator"
    DFLASH = "dflash"
    DSPARK = "dspark"
    MTP = "mtp"
    SMALL = "draft_model"

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Kind.EAGLE3: "an EAGLE-3 head",
    Kind.EAGLE: "an EAGLE-1 head",
    Kind.PEAGLE: "a P-EAGLE head, which drafts in parallel",
    Kind.MEDUSA: "a set of Medusa heads",
    Kind.MLP: "an MLP speculator",
    Kind.DFLASH: "a DFlash block drafter",
    Kind.DSPARK: "a DSpark block drafter",
    Kind.MTP: "an MTP head",
    Kind.SMALL: "a whole model",
}
_OF_SPECULATORS = {
    "eagle3": Kind.EAGLE3,
    "eagle": Kind.EAGLE,
    "peagle": Kind.PEAGLE,
    "dflash": Kind.DFLASH,
    "dflash2": Kind.DFLASH,
    "dspark": Kind.DSPARK,
    "mtp": Kind.MTP,
    "mlp": Kind.MLP,
}
"""`speculators_model_type`; `mlp` is of its first releases."""
_OF_ARCHITECTURES = (
    (Kind.PEAGLE, r"^P-?[Ee]agle"),
    (Kind.EAGLE3, r"[Ee]agle3"),
    # Not Eagle2_5_VL, a vision-language model.
    (Kind.EAGLE, r"^Eagle(?!\d)|Eagle(DraftModel|Model)?$"),
    (Kind.DSPARK, r"DSpark"),
    (Kind.DFLASH, r"DFlash|Domino|LiLiCorr|MuseGlimmerAssistant"),
    (Kind.MEDUSA, r"Medusa"),
    (Kind.MLP, r"(MLP|LSTM)Speculator"),
    (Kind.MTP, r"MTP|NextN$|Gemma4\w*Assistant"),
)
_OF_MODEL_TYPES = (
    (Kind.MEDUSA, r"medusa"),
    (Kind.MLP, r"mlp_speculator"),
    (Kind.MTP, r"mtp|.*_(mtp|nextn)|gemma4\w*_assistant"),
    (Kind.EAGLE, r"eagle"),
)
_IN_GGUF = {"eagle3": Kind.EAGLE3, "dflash": Kind.DFLASH, "dspark": Kind.DSPARK}
_FAMILIES = (
    *({kind} for kind in Kind),
    {Kind.EAGLE3, Kind.PEAGLE},
    {Kind.DFLASH, Kind.DSPARK},
    {Kind.EAGLE, Kind.MTP},
)
"""Kinds whose names of tensors may be the same."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")
_TEXT = re.compile("CausalLM|LMHead|ConditionalGeneration")
_COUNTS_OF_MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def kind_of(place: Path) -> Kind:
    """The kind of a folder or GGUF file; weights may be missing, as in the hub's cache.

    Raises:
        ModelConfigError: a kind that is not known, or config.json of one kind beside the tensors
            of another.
        ModelError: no readable config.json.
    """
    if is_gguf(place):
        arch = str(read_fields(place).get("general.architecture"))
        return _IN_GGUF.get(arch, Kind.SMALL)
    raw, names = read_config(place / "config.json"), tensor_names(place)
    stated, found = _stated(raw), _found(names)
    if stated is Kind.EAGLE3 and _drafts_in_parallel(raw, names):
        stated = Kind.PEAGLE
    if stated and found and not any({stated, found} <= family for family in _FAMILIES):
        raise ModelConfigError(
            f"{place} is {stated.words} by its config.json, and {found.words} by the tensors of "
            f"its weights, such as {names[0]}",
            hint="download the folder again, so that both files are of one drafter",
        )
    if kind := stated or found:
        return kind
    if "draft_vocab_size" in raw:  # SafeAILab's EAGLE-3 heads call themselves LlamaForCausalLM
        return Kind.EAGLE3
    if not names and raw.get("num_hidden_layers") == 1:
        raise ModelConfigError(
            f"{place} has a config.json as EAGLE-1 heads and models of one layer have it, and no "
            "weights that would tell",
            hint="download its weights too, or give its kind with --method",
        )
    layers = {one[1] for one in map(_LAYER.search, names) if one}
    if 0 < len(layers) < (stated_layers := raw.get("num_hidden_layers") or 0):
        raise ModelConfigError(
            f"{place} is no whole model: its config.json states {stated_layers} layers, and its "
            f"weights have {len(layers)}, with tensors such as {names[0]}",
            hint="download it again, or choose a drafter of a known kind",
        )
    architectures = raw.get("architectures") or []
    if not architectures or any(_TEXT.search(one) for one in architectures):
        return Kind.SMALL
    raise ModelConfigError(
        f"{place} is no drafter of a known kind, and generates no text (...ForCausalLM): "
        f"{', '.join(architectures)}",
        hint="choose a decoder-only checkpoint, or a drafter of it",
    )


def methods_of(place: Path) -> tuple[Kind, ...]:
    """The kinds as which an engine can load a folder or GGUF file, the likeliest first.

    There are two for a whole model with layers for multi-token prediction, and for block drafters
    as GGUF, which do not say whether they are DFlash's or DSpark's.
    """
    kind = kind_of(place)
    if is_gguf(place):
        counts = [v for k, v in read_fields(place).items() if k.endswith(".nextn_predict_layers")]
        if kind is Kind.DFLASH:
            return kind, Kind.DSPARK
    else:
        raw = read_config(place / "config.json")
        parts = (raw, raw.get("text_config") or {})
        counts = [part.get(name) for part in parts for name in _COUNTS_OF_MTP]
    return (kind, Kind.MTP) if kind is Kind.SMALL and any(counts) else (kind,)


def block_size(place: Path, kind: Kind) -> int | None:
    """Tokens that a block drafter drafts a round at most; None if it is not stated.

    DFlash's block begins with the token before it, which it does not draft; DSpark's does not,
    unless `sample_from_anchor` is false.
    """
    if is_gguf(place) or kind not in (Kind.DFLASH, Kind.DSPARK):
        return None
    raw = read_config(place / "config.json")
    given = raw.get("block_size") or (raw.get("dflash_config") or {}).get("block_size")
    anchored = kind is Kind.DFLASH or raw.get("sample_from_anchor") is False
    return given - anchored if isinstance(given, int) and given > 1 else None


def tensor_names(folder: Path) -> tuple[str, ...]:
    """Names of the tensors in a folder's weight files; unreadable files have none here."""
    files = [*weight_files(folder), *folder.glob("medusa_lm_head.*")]
    return tuple(name for path in files for name in _names(path))


def _names(path: Path) -> Iterator[str]:
    with suppress(OSError, ValueError, zipfile.BadZipFile):
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(size, 2**27)))
            yield from (name for name in header if name != "__metadata__")
        else:  # torch's: the pickle in the archive is looked through, and never run
            with zipfile.ZipFile(path) as archive:
                [inner] = [one for one in archive.namelist() if one.endswith("/data.pkl")]
                words = [arg for _, arg, _ in pickletools.genops(archive.read(inner))]
            names = [one for one in words if isinstance(one, str)]
            yield from (
                one for one in names if re.fullmatch(r"[\w.]+\.\w+|d2t|t2d|mask_hidden", one)
            )


def _stated(raw: dict[str, Any]) -> Kind | None:
    """The kind that config.json names; None for a model, and for heads that name none."""
    speculators, blocks = raw.get("speculators_model_type"), raw.get("dflash_config") or {}
    if speculators is not None:
        if speculators not in _OF_SPECULATORS:
            raise ModelConfigError(
                f"speculators_model_type {speculators!r} is not known; known are "
                f"{', '.join(_OF_SPECULATORS)}"
            )
        return _OF_SPECULATORS[speculators]
    if blocks.get("projector_type") == "dspark" or "markov_rank" in {**raw, **blocks}:
        return Kind.DSPARK
    for one in raw.get("architectures") or []:
        for kind, mark in _OF_ARCHITECTURES:
            if re.search(mark, one):
                return kind
    for kind, mark in _OF_MODEL_TYPES:
        if re.fullmatch(mark, str(raw.get("model_type"))):
            return kind
    if blocks:
        return Kind.DFLASH
    return Kind.MEDUSA if any(name.startswith("medusa_num_") for name in raw) else None


def _found(names: tuple[str, ...]) -> Kind | None:
    """The kind that tensors show; None for those of a model."""
    stems = {name.rpartition(".")[0] for name in names}
    last = {stem.rpartition(".")[2] for stem in stems}
    if any(re.search(r"(^|\.)midlayer\.", stem) for stem in stems):
        return Kind.EAGLE3
    if any(re.search(r"(^|\.)markov_(w[12]$|head\.)", stem) for stem in stems):
        return Kind.DSPARK
    if any(re.match(r"medusa_heads\.|\d+\.\d+\.linear$", stem) for stem in stems):
        return Kind.MEDUSA
    if any(stem.startswith("speculator.") for stem in stems):
        return Kind.MLP
    layers = {found[1] for stem in stems if (found := re.search(r"layers\.(\d+)\.", stem))}
    if {"enorm", "hnorm"} <= last:
        return Kind.MTP if len(layers) <= 1 else None
    fused = [stem for stem in stems if re.fullmatch(r"([\w.]*\.)?fc", stem)]
    before = fused[0].removesuffix("fc") if len(fused) == 1 else None
    if before is None or not any(re.match(rf"{before}layers\.\d", stem) for stem in stems):
        return None
    if "hidden_norm" not in last:  # layers for multi-token prediction end in a norm
        return None if f"{before}norm" in stems else Kind.EAGLE
    return Kind.DFLASH if f"{before}hidden_norm" in stems else Kind.EAGLE3


def _drafts_in_parallel(raw: dict[str, Any], names: tuple[str, ...]) -> bool:
    """Whether an EAGLE-3 head is P-EAGLE's: by Automodel's key, or by its placeholder state."""
    return bool(raw.get("parallel_drafting")) or any(one.endswith("mask_hidden") for one in names)
