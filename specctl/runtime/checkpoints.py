"""Draft checkpoints: the kind of a folder or GGUF file, told by its `config.json` and the names of
its tensors. Weights are not read, and torch is not imported.

Marks are those of the makers (SafeAILab's EAGLE, SpecForge, speculators, AngelSlim, NeMo Automodel,
ModelOpt, DeepSpec) and of vLLM 0.33 (`config/speculative.py`, `model_executor/models/registry.py`)
and SGLang 0.5.23 (`srt/speculative/spec_info.py`), which serve them.
"""

from __future__ import annotations

import json
import pickletools
import re
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from specctl.errors import ModelConfigError
from specctl.runtime.gguf import is_gguf, read_fields
from specctl.runtime.identity import read_config, weight_files

Kind = Literal[
    "eagle3",
    "eagle",
    "peagle",
    "medusa",
    "mlp_speculator",
    "dflash",
    "dspark",
    "mtp",
    "draft_model",
]
"""The kind of a drafter: vLLM's method, where it has one of that name."""
Served = Literal["eagle3", "eagle", "peagle", "medusa", "dflash", "dspark", "mtp", "draft_model"]
"""Kinds that an engine of `specctl export` drafts with."""
WORDS: dict[Kind, str] = {
    "eagle3": "an EAGLE-3 head",
    "eagle": "an EAGLE-1 head",
    "peagle": "a P-EAGLE head, which drafts in parallel",
    "medusa": "a set of Medusa heads",
    "mlp_speculator": "an MLP speculator",
    "dflash": "a DFlash block drafter",
    "dspark": "a DSpark block drafter",
    "mtp": "an MTP head",
    "draft_model": "a whole model",
}
_Table = tuple[tuple[Kind, str], ...]
_OF_SPECULATORS: dict[str, Kind] = {
    "eagle3": "eagle3",
    "eagle": "eagle",
    "peagle": "peagle",
    "dflash": "dflash",
    "dflash2": "dflash",
    "dspark": "dspark",
    "mtp": "mtp",
    "mlp": "mlp_speculator",  # of its first releases
}
_OF_ARCHITECTURES: _Table = (
    ("peagle", r"^P-?[Ee]agle"),
    ("eagle3", r"[Ee]agle3"),
    # Not Eagle2_5_VL, a vision-language model.
    ("eagle", r"^Eagle(?!\d)|Eagle(DraftModel|Model)?$"),
    ("dspark", r"DSpark"),
    ("dflash", r"DFlash|XPress|Domino|LiLiCorr|MuseGlimmerAssistant"),
    ("medusa", r"Medusa"),
    ("mlp_speculator", r"(MLP|LSTM)Speculator"),
    ("mtp", r"MTP|NextN$|Gemma4\w*Assistant"),
)
_OF_MODEL_TYPES: _Table = (
    ("medusa", r"^medusa$"),
    ("mlp_speculator", r"^mlp_speculator$"),
    ("mtp", r"^mtp$|_(mtp|nextn)$|^gemma4\w*_assistant$"),
    ("eagle", r"^eagle$"),
)
_OF_TENSORS: _Table = (
    ("eagle3", r"(^|\.)midlayer\."),
    ("dspark", r"(^|\.)markov_(w[12]$|head\.)"),
    ("medusa", r"^medusa_heads\.|^\d+\.\d+\.linear$"),
    ("mlp_speculator", r"^speculator\."),
)
_IN_GGUF: dict[object, Kind] = {"eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
_ALIKE = ({"eagle3", "peagle"}, {"dflash", "dspark"}, {"eagle", "mtp"})
"""Kinds whose names of tensors may be the same."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")
_COUNTS_OF_MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def kind_of(place: Path) -> Kind:
    """The kind of a folder or GGUF file; weights may be missing, as in the hub's cache.

    Raises:
        ModelConfigError: a kind that is not known, or config.json of one kind beside the tensors
            of another.
        ModelError: no readable config.json.
    """
    if is_gguf(place):
        return _IN_GGUF.get(read_fields(place).get("general.architecture"), "draft_model")
    raw, names = read_config(place / "config.json"), _tensor_names(place)
    stated, found = _stated(raw), _found(names)
    has_placeholder = any(name.endswith("mask_hidden") for name in names)
    if stated == "eagle3" and (raw.get("parallel_drafting") or has_placeholder):
        stated = "peagle"  # by Automodel's key, or by the placeholder of its states
    if stated and found and stated != found and {stated, found} not in _ALIKE:
        raise ModelConfigError(
            f"{place} is {WORDS[stated]} by its config.json, and {WORDS[found]} by the tensors of "
            f"its weights, such as {names[0]}",
            hint="download the folder again, so that both files are of one drafter",
        )
    if kind := stated or found:
        return kind
    if "draft_vocab_size" in raw:  # SafeAILab's EAGLE-3 heads call themselves LlamaForCausalLM
        return "eagle3"
    if not names and raw.get("num_hidden_layers") == 1:
        raise ModelConfigError(
            f"{place} has a config.json as EAGLE-1 heads and models of one layer have it, and no "
            "weights that would tell",
            hint="download its weights too; specctl export takes its kind by --method",
        )
    layers = {one[1] for one in map(_LAYER.search, names) if one}
    if 0 < len(layers) < (stated_layers := raw.get("num_hidden_layers") or 0):
        raise ModelConfigError(
            f"{place} is no whole model: its config.json states {stated_layers} layers, and its "
            f"weights have {len(layers)}, with tensors such as {names[0]}",
            hint="download it again, or choose a drafter of a known kind",
        )
    architectures = raw.get("architectures") or []
    writes = re.compile("CausalLM|LMHead|ConditionalGeneration")
    if not architectures or any(map(writes.search, architectures)):
        return "draft_model"
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
        if kind == "dflash":
            return kind, "dspark"
    else:
        raw = read_config(place / "config.json")
        parts = (raw, raw.get("text_config") or {})
        counts = [part.get(name) for part in parts for name in _COUNTS_OF_MTP]
    return (kind, "mtp") if kind == "draft_model" and any(counts) else (kind,)


def block_size(place: Path, kind: Kind) -> int | None:
    """Tokens that a block drafter drafts a round at most; None if it is not stated.

    DFlash's block begins with the token before it, which it does not draft; DSpark's does not,
    unless `sample_from_anchor` is false.
    """
    if is_gguf(place) or kind not in ("dflash", "dspark"):
        return None
    raw = read_config(place / "config.json")
    given = raw.get("block_size") or (raw.get("dflash_config") or {}).get("block_size")
    anchored = kind == "dflash" or raw.get("sample_from_anchor") is False
    return given - anchored if isinstance(given, int) and given > 1 else None


def architecture(place: Path) -> str | None:
    """The model that config.json states first, or the type of speculators; None for a GGUF file."""
    if is_gguf(place):
        return None
    raw = read_config(place / "config.json")
    if (of := raw.get("speculators_model_type")) is not None:
        return f"speculators/{of}"
    return next(iter(raw.get("architectures") or []), "none")


def _tensor_names(folder: Path) -> list[str]:
    """Names of the tensors in a folder's weight files; unreadable files have none here."""
    names = list[str]()
    for path in (*weight_files(folder), *folder.glob("medusa_lm_head.*")):
        with suppress(OSError, ValueError, zipfile.BadZipFile):
            if path.suffix == ".safetensors":
                with path.open("rb") as file:
                    size = int.from_bytes(file.read(8), "little")
                    header = json.loads(file.read(min(size, 2**27)))
                names += [name for name in header if name != "__metadata__"]
                continue
            with zipfile.ZipFile(path) as archive:  # torch's pickle is looked through, never run
                [inner] = [one for one in archive.namelist() if one.endswith("/data.pkl")]
                words = [arg for _, arg, _ in pickletools.genops(archive.read(inner))]
            name = re.compile(r"[\w.]+\.\w+|d2t|t2d|mask_hidden")
            names += [one for one in words if isinstance(one, str) and name.fullmatch(one)]
    return names


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
        return "dspark"
    named = _first(_OF_ARCHITECTURES, raw.get("architectures") or [])
    if named := named or _first(_OF_MODEL_TYPES, [str(raw.get("model_type"))]):
        return named
    has_heads = any(name.startswith("medusa_num_") for name in raw)
    return "dflash" if blocks else "medusa" if has_heads else None


def _found(names: Iterable[str]) -> Kind | None:
    """The kind that tensors show; None for those of a model."""
    stems = {name.rpartition(".")[0] for name in names}
    if named := _first(_OF_TENSORS, stems):
        return named
    last = {stem.rpartition(".")[2] for stem in stems}
    if {"enorm", "hnorm"} <= last:
        layers = {found[1] for stem in stems if (found := re.search(r"layers\.(\d+)\.", stem))}
        return "mtp" if len(layers) <= 1 else None
    fused = [stem for stem in stems if re.fullmatch(r"([\w.]*\.)?fc", stem)]
    before = fused[0].removesuffix("fc") if len(fused) == 1 else None
    if before is None or not any(re.match(rf"{before}layers\.\d", stem) for stem in stems):
        return None
    if "hidden_norm" not in last:  # layers for multi-token prediction end in a norm
        return None if f"{before}norm" in stems else "eagle"
    return "dflash" if f"{before}hidden_norm" in stems else "eagle3"


def _first(table: _Table, words: Iterable[str]) -> Kind | None:
    """The first kind of a table whose mark is in a word."""
    return next((kind for kind, mark in table for one in words if re.search(mark, one)), None)
