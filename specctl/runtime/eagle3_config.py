"""`config.json` of an EAGLE-3 head as its makers write it, with their defaults.

Two layouts exist: flat, with Llama's keys at the top (SafeAILab, SpecForge, AngelSlim, NeMo
Automodel, ModelOpt), and that of speculators, with Llama's keys under `transformer_layer_config`.
Two of their facts are read in two ways, and `Readings` then has both:

- *The fused layers.* Without a list all take the inputs of layers 2, n // 2 and n - 3. SpecForge
  (`algorithms/model_providers.py`) and ModelOpt (`plugins/hf_eagle.py`) list layers whose *output*
  is fused; so does SGLang 0.5.23 read `eagle_config` (`models/llama.py`), the only place that it
  knows. speculators lists *inputs*; so does vLLM 0.32 read every list (`models/interfaces.py`).
- *norm_before_residual* in speculators' layout: if it is absent, vLLM takes true
  (`configs/speculators/algos.py`), and speculators itself false (`models/eagle3/config.py`). In
  the flat layout an absent key is false everywhere.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from specctl.errors import ModelConfigError
from specctl.runtime.eagle3_head import Eagle3Config, default_layers
from specctl.runtime.identity import read_config

log = logging.getLogger("specctl.models")
LIST = "eagle_aux_hidden_state_layer_ids"
INSTEAD = "use a bfloat16 head of one Llama layer here, or serve this one: export knows it"
Layers = tuple[int, ...]
_MAKERS = (
    ("AngelSlim", r"^Eagle3"),
    ("NeMo Automodel", r"Eagle3DraftModel$"),
    ("SpecForge", r"Eagle3$"),
    ("SafeAILab's EAGLE", r"ForCausalLM$"),
)
"""Makers of the flat layout, by their name of the architecture."""
_OF_MODELOPT = {"next_layer_regular", "use_last_layernorm", "parallel_draft_step"}
_FLAGS = ("norm_before_fc", "fc_norm", "use_aux_norm", "norm_output")
"""Switches of EAGLE-3.1, which change the arithmetic."""
_BIASES = ("bias", "attention_bias", "mlp_bias")
_ROPE: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, set()),
    "yarn": (
        {"factor"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
}
"""Rotations that do not depend on the length: keys that they need, and others that they know."""
_ROPE_OF_ALL = {"rope_type", "rope_theta", "original_max_position_embeddings"}
_ROPE_OF_IMAGES = {"mrope_section", "mrope_interleaved"}
"""For text all components of a position are the same, so that `mrope` is `default`."""


@dataclass(frozen=True)
class Reading:
    """One way to read a head."""

    config: Eagle3Config
    words: str = ""  # of the choice, and of those who read so; empty where all read alike
    fix: str = ""  # the keys with which all read the head so


class HeadFacts:
    """The facts of a head's `config.json`.

    Attributes:
        notes: what was read and what was assumed, for `specctl doctor`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.raw = folder, read_config(folder / "config.json")
        nested = self.raw.get("transformer_layer_config") or {}
        self.is_nested = bool(nested)
        self.flat: dict[str, Any] = {**self.raw, **nested}
        self.eagle: dict[str, Any] = self.raw.get("eagle_config") or {}
        self.notes = [f"an EAGLE-3 head in the layout of {self._maker()}"]

    def readings(
        self, *, num_fused: int, draft_vocab_size: int, num_layers: int, context: int
    ) -> tuple[Reading, ...]:
        """The ways to read the head; the first is that of its makers.

        Args:
            num_fused: target states that `fc` takes. num_layers: of the target.
            context: positions of the target.

        Raises:
            ModelConfigError: a fact that is missing, contradicts itself, or is not supported.
        """
        self._check_window(context)
        sizes = self._sizes() | {"draft_vocab_size": draft_vocab_size}
        norms = self._norms()
        return tuple(
            Reading(
                Eagle3Config(**sizes, aux_layers=layers, norm_before_residual=norm),
                of_norm or of_layers,
                f'"norm_before_residual": {str(norm).lower()}'
                if of_norm
                else _list_for_all(layers),
            )
            for layers, of_layers in self._layers(num_fused, num_layers)
            for norm, of_norm in norms
        )

    def refuse(self, problem: str, hint: str = INSTEAD) -> ModelConfigError:
        return ModelConfigError(f"EAGLE-3 head {self.folder} {problem}", hint=hint)

    def check_arithmetic(self, *, has_biases: bool) -> None:
        """Rejects heads of another arithmetic by the words of their `config.json`."""
        parts = (self.flat, self.eagle)
        if any(part.get("use_aux_hidden_state") is False for part in parts):
            raise self.refuse(
                "has use_aux_hidden_state false: it reads the last hidden state alone, which is "
                "not supported"
            )
        for name in _FLAGS:
            if any(part.get(name) for part in parts):
                raise self.refuse(f"has {name} true, a norm of EAGLE-3.1 that is not supported")
        activation = self.flat.get("hidden_act") or "silu"
        if activation not in ("silu", "swish"):
            raise self.refuse(f"has hidden_act {activation}, and only silu is supported")
        stated = [name for name in _BIASES if self.flat.get(name)]
        if stated and not has_biases:
            self._warn(
                f"{words(stated)} true, and the file has no biases: read without",
                "vLLM and SGLang would add some that nothing sets: make it false before you serve "
                "the head",
            )

    @property
    def target_width(self) -> int:
        """Width of one fused state."""
        has_own = self.flat.get("target_hidden_size") is not None
        return self.size("target_hidden_size" if has_own else "hidden_size")

    def check_target(self, target: Any) -> None:
        """Rejects a target of other sizes than the head's."""
        ours = {"hidden_size": self.target_width, "vocab_size": self.size("vocab_size")}
        for name, size in ours.items():
            if size != (theirs := getattr(target, name)):
                raise ModelConfigError(
                    f"the EAGLE-3 head was trained for a target of {name} {size}, but this one "
                    f"has {theirs}",
                    hint="pair the head with its own target",
                )

    def check_layers(self) -> None:
        """Names a number of layers in `config.json` that is not the file's one."""
        stated = self.flat.get("num_hidden_layers")
        if stated not in (None, 1):
            self._warn(
                f"num_hidden_layers {stated}, and the file has one layer: read as one",
                "vLLM and SGLang build as many layers as it states: make it 1 before you serve the "
                "head",
            )

    def size(self, name: str) -> int:
        """A number that has no default."""
        value = self.flat.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.refuse(
                f"has {name} {value!r} in its config.json, not a positive integer",
                "download the head again",
            )
        return value

    def _warn(self, found: str, advice: str) -> None:
        self.notes.append(f"config.json has {found}")
        log.warning("EAGLE-3 head %s: config.json has %s; %s", self.folder, found, advice)

    def _maker(self) -> str:
        if self.is_nested or "speculators_model_type" in self.raw:
            return "speculators"
        if _OF_MODELOPT & self.eagle.keys():
            return "ModelOpt"
        names = " ".join(self.raw.get("architectures") or [])
        return next((maker for maker, mark in _MAKERS if re.search(mark, names)), "no known maker")

    def _sizes(self) -> dict[str, Any]:
        flat = self.flat
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        defaults = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
        for name, value in defaults.items():
            if flat.get(name) is None:
                self.notes.append(f"{name} {value} assumed, as config.json states none")
        return {
            "hidden_size": hidden,
            "target_hidden_size": self.target_width,
            "num_attention_heads": heads,
            "num_key_value_heads": flat.get("num_key_value_heads") or heads,
            "head_dim": flat.get("head_dim") or hidden // heads,
            "intermediate_size": self.size("intermediate_size"),
            "vocab_size": self.size("vocab_size"),
            "max_position_embeddings": flat.get("max_position_embeddings") or 2048,
            "rms_norm_eps": float(flat.get("rms_norm_eps") or 1e-6),
            "rope_parameters": self._rope(),
        }

    def _rope(self) -> dict[str, Any]:
        """The rotation in transformers' present form."""
        given = self.flat.get("rope_parameters") or self.flat.get("rope_scaling") or {}
        given = self._of_own_layer(given)
        given = {name: value for name, value in given.items() if value is not None}
        factor = given.pop("partial_rotary_factor", self.flat.get("partial_rotary_factor"))
        if factor not in (None, 1):
            raise self.refuse(f"rotates a part of each head alone (partial_rotary_factor {factor})")
        older = given.pop("type", "default")
        kind = given.setdefault("rope_type", older)
        if kind == "mrope":
            kind = given["rope_type"] = "default"
        for name in _ROPE_OF_IMAGES & given.keys():
            del given[name]
        if kind not in _ROPE:
            raise self.refuse(f"has rope_type {kind!r}, and only {words(_ROPE)} are supported")
        needed, more = _ROPE[kind]
        if missing := needed - given.keys():
            raise self.refuse(f"has rope_type {kind!r} without {words(sorted(missing))}")
        if unknown := given.keys() - needed - more - _ROPE_OF_ALL:
            raise self.refuse(
                f"has {words(sorted(unknown))} for rope_type {kind!r}, which is not known"
            )
        theta = self.flat.get("rope_theta")
        if given.setdefault("rope_theta", theta) is None:
            given["rope_theta"] = 10000
            self.notes.append("rope_theta 10000 assumed, as config.json states none")
        elif theta is not None and theta != given["rope_theta"]:
            raise self.refuse(
                f"has rope_theta {theta} and, beside its rotation, {given['rope_theta']}",
                "make the two the same in config.json, as the head was trained",
            )
        given["rope_theta"] = float(given["rope_theta"])
        self.notes.append(f"rotations {kind}, rope_theta {given['rope_theta']:g}")
        return given

    def _of_own_layer(self, given: dict[str, Any]) -> dict[str, Any]:
        """The entry of the head's layer, where `rope_parameters` has one by kind of attention."""
        entries = {kind: of for kind, of in given.items() if isinstance(of, dict)}
        if not entries:
            return dict(given)
        own = (self.flat.get("layer_types") or [None])[0]
        if own not in entries and len({str(of) for of in entries.values()}) == 1:
            own = next(iter(entries))
        if own not in entries:
            raise self.refuse(
                f"has rope_parameters by kind of attention ({words(sorted(entries))}), and "
                "config.json does not say of which kind its layer is",
                "write the entry that it was trained with flat under rope_parameters",
            )
        self.notes.append(f"rope_parameters of {own}")
        return dict(entries[own])

    def _check_window(self, context: int) -> None:
        kinds, window = self.flat.get("layer_types"), self.flat.get("sliding_window")
        default = self.flat.get("use_sliding_window") is True
        slides = kinds[0] == "sliding_attention" if kinds else default
        if slides and isinstance(window, int) and window < context:
            raise self.refuse(
                f"attends to the last {window} positions alone (sliding_window), and its target "
                f"has {context}"
            )

    def _norms(self) -> list[tuple[bool, str]]:
        given = self.flat.get("norm_before_residual")
        if given is None and self.is_nested:
            absent = "absent norm_before_residual"
            return [
                (True, f"{absent} as true (vLLM)"),
                (False, f"{absent} as false (speculators' own default)"),
            ]
        if given:
            self.notes.append("norm_before_residual true")
        return [(bool(given), "")]

    def _layers(self, num_fused: int, num_layers: int) -> list[tuple[Layers, str]]:
        """The fused layers, by their inputs, in every way in which the list is read."""
        own = default_layers(num_layers)
        top, inner = self.flat.get(LIST), self.eagle.get(LIST)
        for name in (one for one in self.flat if one != LIST and one.endswith("layer_ids")):
            self._warn(f"{name}, which no engine reads for EAGLE-3", f"list them under {LIST}")
        for name, found in ((LIST, top), (f"eagle_config.{LIST}", inner)):
            if found is not None and not is_numbers(found):
                raise self.refuse(f"has {name} {found!r}, no list of layer numbers")
        if top and inner and top not in (inner, [one + 1 for one in inner]):
            raise self.refuse(
                f"has {LIST} {top} at the top and {inner} under eagle_config",
                "make them the same in config.json",
            )
        ids = tuple(top or inner or ())
        if len(ids or own) != num_fused:
            stated = f"lists layers {list(ids)}" if ids else "lists no layers"
            raise self.refuse(
                f"fuses {num_fused} target states by the columns of its fc.weight, and its "
                f"config.json {stated}",
                f"list the {num_fused} layers under {LIST}" if num_fused > 1 else INSTEAD,
            )
        if not ids:
            self._check_order(own, num_layers)
            self.notes.append(f"inputs of layers {words(own)} assumed, as config.json lists none")
            return [(own, "")]
        after = tuple(one + 1 for one in ids)
        if self.is_nested or ids == own or (inner and top and top != inner):
            self._check_order(ids, num_layers)
            self.notes.append(f"inputs of layers {words(ids)}, as config.json lists them")
            return [(ids, "")]
        found = [
            (after, f"layers {words(ids)} as outputs (SpecForge, ModelOpt, SGLang)"),
            (ids, f"layers {words(ids)} as inputs (vLLM)"),
        ]
        if ids[0] != 1:  # nobody fuses the embedding, so that a first 1 is an output
            found.reverse()
        sound = [one for one in found if is_order(one[0], num_layers)]
        if not sound:
            self._check_order(ids, num_layers)
        if len(sound) == 1:
            of = words(found[1 - found.index(sound[0])][0])
            self._warn(
                f"{sound[0][1]}: read so",
                f"the other reading, inputs of {of}, is not supported here",
            )
            return [(sound[0][0], "")]
        return found

    def _check_order(self, ids: Collection[int], num_layers: int) -> None:
        if is_order(ids, num_layers):
            return
        listing = f"lists layers {list(ids)}, and its target has {num_layers}"
        if max(ids) == num_layers:
            raise self.refuse(
                f"{listing}: {num_layers} is the output of the last layer, which is not supported"
            )
        raise self.refuse(
            f"{listing}: they are not rising ones below {num_layers}",
            "pair the head with its own target",
        )


def _list_for_all(inputs: Layers) -> str:
    top, inner = list(inputs), [one - 1 for one in inputs]
    return f'"{LIST}": {top} at the top, for vLLM, and {inner} under eagle_config, for SGLang'


def is_numbers(found: Any) -> bool:
    return isinstance(found, list) and all(type(one) is int for one in found)


def is_order(ids: Collection[int], num_layers: int) -> bool:
    """Whether layers of a target rise."""
    numbers = list(ids)
    rises = all(low < high for low, high in pairwise(numbers))
    return rises and numbers[0] >= 0 and numbers[-1] < num_layers


def words(names: Collection[object]) -> str:
    return ", ".join(map(str, names))
